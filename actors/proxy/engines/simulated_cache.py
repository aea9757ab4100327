"""The memory of a simulated engine: keys and values of what runs, and of prefixes that are kept for a next turn.

Invariant: what runs is never lost; prefixes have what it leaves, and where that becomes less, the prefix that was used
least recently gives way, from its end (so does vLLM, whose blocks are freed from the last one on). All that is counted
are tokens.
"""

from __future__ import annotations

from collections import OrderedDict


class SimulatedCache:
    """See the module docstring. ``capacity``: tokens; one sequence that is longer than all of it runs alone."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.running = 0  # tokens of what runs
        self._kept: OrderedDict[str, int] = OrderedDict()  # trajectory -> tokens, least recently used first
        self._idle = 0  # their sum
        self.evicted = 0  # tokens, ever

    @property
    def room(self) -> int:
        """Tokens that what runs may have beyond what it has."""
        return self.capacity - self.running

    def known(self, trajectory: str) -> int:
        """Tokens of its prefix that are kept."""
        return self._kept.get(trajectory, 0)

    def enter(self, trajectory: str, length: int) -> int:
        """A sequence begins to run; how many of its tokens are there already. The last is always computed anew: its
        result is what the first token is sampled from."""
        known = self._pop(trajectory)
        self.grow(length)
        return min(known, length - 1)

    def grow(self, tokens: int) -> None:
        """What runs has become longer."""
        self.running += tokens
        self._give_way()

    def leave(self, trajectory: str, length: int, *, computed: int) -> None:
        """A sequence of this length runs no more; what was computed of it is kept."""
        self.running -= length
        self._pop(trajectory)
        if computed:
            self._kept[trajectory] = computed
            self._idle += computed
            self._give_way()

    def forget(self, trajectory: str) -> None:
        self._pop(trajectory)

    def clear(self) -> None:
        """Other weights: no prefix is worth anything."""
        self._kept.clear()
        self._idle = 0

    def _pop(self, trajectory: str) -> int:
        tokens = self._kept.pop(trajectory, 0)
        self._idle -= tokens
        return tokens

    def _give_way(self) -> None:
        while self._kept and self.running + self._idle > self.capacity:
            trajectory, tokens = next(iter(self._kept.items()))
            cut = min(tokens, self.running + self._idle - self.capacity)
            self._idle -= cut
            self.evicted += cut
            if cut == tokens:
                del self._kept[trajectory]
            else:
                self._kept[trajectory] = tokens - cut
