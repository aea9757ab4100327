"""Where trajectories have their prefixes, and how much of them an engine need not compute again.

Invariant: a trajectory has one holder at most. What it is said to have there was computed there under the weights that
the holder has now; after a swap that is nothing, because engines forget what they had computed under others.
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.proxy.entry import EngineEntry


class Prefixes:
    """See the module docstring."""

    def __init__(self) -> None:
        self.holder: dict[str, str] = {}  # trajectory -> engine
        self._tokens: dict[str, int] = {}  # of the last prompt, and of the answer to it
        self._under: dict[str, int | None] = {}  # the version
        self._ordered: set[str] = set()  # those that are to go on where they have never been

    def put(self, trajectory: str, engine: EngineEntry, tokens: int) -> None:
        """The engine has been given a prompt."""
        self.holder[trajectory] = engine.name
        self._tokens[trajectory] = tokens
        self._under[trajectory] = engine.version
        self._ordered.discard(trajectory)

    def grew(self, trajectory: str, engine: EngineEntry, tokens: int) -> None:
        """The engine has answered: so many tokens more."""
        if self.holder.get(trajectory) == engine.name:
            self._tokens[trajectory] = self._tokens.get(trajectory, 0) + tokens
            self._under[trajectory] = engine.version

    def move(self, trajectory: str, engine: EngineEntry) -> None:
        """By order: it is to go on there, where nothing of it has been computed."""
        self.holder[trajectory] = engine.name
        self._under.pop(trajectory, None)
        self._ordered.add(trajectory)

    def end(self, trajectory: str) -> str | None:
        """Nothing more comes of it. Returns its holder."""
        self._tokens.pop(trajectory, None)
        return self.lost(trajectory)

    def lost(self, trajectory: str) -> str | None:
        """Its holder does not have it any more. Returns that."""
        self._under.pop(trajectory, None)
        self._ordered.discard(trajectory)
        return self.holder.pop(trajectory, None)

    def tokens(self, trajectory: str) -> int:
        """That would have to be computed anew elsewhere."""
        return self._tokens.get(trajectory, 0)

    def cached(self, trajectory: str, engine: EngineEntry) -> int:
        """Tokens that the engine need not compute again."""
        if self.holder.get(trajectory) != engine.name or self._under.get(trajectory, -1) != engine.version:
            return 0
        return self._tokens.get(trajectory, 0)

    def claimed(self, trajectory: str, engine: EngineEntry) -> int:
        """The same, for the choice of an engine: one that it was ordered to counts as if it had all of it."""
        if trajectory in self._ordered and self.holder.get(trajectory) == engine.name:
            return self._tokens.get(trajectory, 0)
        return self.cached(trajectory, engine)

    def of(self, engine: str) -> Iterator[str]:
        """Trajectories that have theirs there."""
        return (trajectory for trajectory, name in self.holder.items() if name == engine)
