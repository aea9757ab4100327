"""The requests at a simulated engine: who waits, who has a place in the running batch, who has none any more.

Invariant: a request is in one of three places (``waiting``, ``fresh``, ``decoding``) until it is taken out; the memory
(``SimulatedCache``) holds exactly the tokens of those with a place. No time passes here.

A request begins where there is a place, and memory for all that it has. Where what runs outgrows the memory, the one
that began last gives its place back, with its tokens, and waits before all others of its kind; so does vLLM.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.proxy.engines.simulated_cache import SimulatedCache
from actors.proxy.engines.simulated_row import Row

PREFILL_TOKENS = 8192
"""Of one step: vLLM's usual bound. A prompt that is longer goes alone."""
WATERMARK = 0.01
"""Share of the memory that must stay free where a request begins beside others: what runs is about to grow."""


class SimulatedBatch:
    """See the module docstring. ``places``: requests that run at once."""

    def __init__(self, places: int, cache: SimulatedCache) -> None:
        self.places = places
        self.cache = cache
        self.waiting: dict[str, Row] = {}
        self.fresh: dict[str, Row] = {}  # have a place, and are to be prefilled
        self.decoding: dict[str, Row] = {}
        self.preempted = 0  # places that were given back, ever

    @property
    def running(self) -> int:
        return len(self.fresh) + len(self.decoding)

    def here(self) -> dict[str, Row]:
        return self.waiting | self.fresh | self.decoding

    def take_out(self, id_: str) -> Row | None:
        """None for one that is not here."""
        row = self.decoding.pop(id_, None) or self.fresh.pop(id_, None)
        if row is None:
            return self.waiting.pop(id_, None)
        self.cache.leave(row.request.trajectory, row.length, computed=row.length - row.missing)
        return row

    def admit(self, may_start: Callable[[Row], bool]) -> None:
        """Give places to those that wait, urgent ones first and each kind in its order. One for which the memory has
        no room holds up those behind it, or it would never begin."""
        spare = int(WATERMARK * self.cache.capacity)
        for id_, row in sorted(self.waiting.items(), key=_by_urgency):
            if self.running >= self.places:
                break
            if not may_start(row):
                continue
            if self.running and row.length + spare > self.cache.room:
                break
            row.missing = row.length - self.cache.enter(row.request.trajectory, row.length)
            self.fresh[id_] = self.waiting.pop(id_)

    def prefills(self) -> list[Row]:
        """Those that the next step computes together."""
        tokens = 0
        rows: list[Row] = []
        for row in self.fresh.values():
            tokens += row.missing
            if rows and tokens > PREFILL_TOKENS:
                break
            rows.append(row)
        return rows

    def steps(self) -> int:
        """How many steps all that decode make until one ends or the memory is full; makes room for at least one."""
        while len(self.decoding) > max(1, self.cache.room):
            self._preempt()
        steps = min(row.left for row in self.decoding.values())
        batch = len(self.decoding)
        return steps if batch == 1 else min(steps, self.cache.room // batch)

    def _preempt(self) -> None:
        id_, row = self.decoding.popitem()
        self.cache.leave(row.request.trajectory, row.length, computed=row.length)
        self.waiting = {id_: row} | self.waiting
        self.preempted += 1

    def sampled(self, rows: list[Row], count: int, version: int) -> list[Row]:
        """They have been given so many tokens each; returns those that are at their end, which are taken out."""
        for row in rows:
            id_ = row.request.request_id
            if id_ in self.fresh:
                self.decoding[id_] = self.fresh.pop(id_)
                row.missing = 0
            row.sample(version, count)
        self.cache.grow(count * len(rows))
        done = [row for row in rows if not row.left]
        for row in done:
            self.take_out(row.request.request_id)
        return done

    def begin_anew(self) -> None:
        """Under other weights: whatever has a place is to be prefilled, and no prefix is left."""
        self.cache.clear()
        self.fresh |= self.decoding
        self.decoding.clear()
        for row in self.fresh.values():
            row.missing = row.length


def _by_urgency(waiting: tuple[str, Row]) -> bool:
    """Sorts urgent ones first, each kind in the order in which it came."""
    return not waiting[1].request.urgent
