"""The engines of a proxy, ordered by load, so that a request looks at one or two of each kind and not at all of them.

Invariant: ``Group.least`` is what a scan of the group would find (least full, then least work ahead, then name), after
whatever happened to its engines. Engines of one group are alike to a request but for their load and its prefix: of one
hardware class, with one version of the weights.

Each change of an engine puts a new entry on its group's heap, with a stamp by which older ones are known as such and
dropped when they come up; a heap of which more is old than new is made anew. So a change costs O(log n), and a look
next to nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping

from actors.proxy.entry import EngineEntry, Kind, State

SPARE = 64
"""Old entries that a small heap may keep."""


Ranked = tuple[bool, int, str, int, EngineEntry]
"""Full, work ahead in nanoseconds, name, stamp: of an engine as it was when it had this stamp."""


class Group:
    """Engines of one state, class and version; see the module docstring."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        _, self.hardware_class, self.version = kind
        self.engines = 0
        self.in_flight = 0  # requests, of all of them
        self.places = 0  # likewise
        self.outstanding = 0  # nanoseconds, likewise
        self.batch = 1.0  # requests in the running batch of one of its engines, on average, with another one
        self.mean = 0  # nanoseconds that are left of a request of its engines
        self._heap: list[Ranked] = []

    def count(self, engines: int, in_flight: int, places: int, outstanding: int) -> None:
        """So many more."""
        self.engines += engines
        self.in_flight += in_flight
        self.places += places
        self.outstanding += outstanding
        self.mean = self.outstanding // self.in_flight if self.in_flight else 0
        if self.engines:
            self.batch = min(1.0 + self.in_flight / self.engines, self.places / self.engines)

    def push(self, entry: EngineEntry) -> None:
        """It is of this group, or still is, and has changed."""
        heapq.heappush(self._heap, (entry.full, entry.ahead, entry.name, entry.stamp, entry))
        if len(self._heap) > 2 * self.engines + SPARE:
            self._heap = [one for one in self._heap if one[4].stamp == one[3]]
            heapq.heapify(self._heap)

    def least(self, barred: str | None = None) -> Ranked | None:
        """The least loaded one, of those with another name than that."""
        heap = self._heap
        while heap and heap[0][4].stamp != heap[0][3]:  # it has changed since
            heapq.heappop(heap)
        if not heap or heap[0][2] != barred:
            return heap[0] if heap else None
        aside = heapq.heappop(heap)
        found = self.least()
        heapq.heappush(heap, aside)
        return found


class Pool:
    """See the module docstring."""

    def __init__(self, engines: Iterable[EngineEntry]) -> None:
        self.engines: dict[str, EngineEntry] = {engine.name: engine for engine in engines}
        self._states: Counter[State] = Counter()
        self._groups: dict[Kind, Group] = {}
        self._open: list[Group] | None = None  # that requests may go to, until an engine changes its kind
        # Engine -> where it counts, with what requests, places and nanoseconds.
        self._counted: dict[str, tuple[Kind, int, int, int]] = {}
        for engine in self.engines.values():
            engine.changed = self._changed
            self._changed(engine)

    def serving(self) -> dict[str, int]:
        """Hardware class -> places of the engines that serve, or are to again in a moment, as in a swap."""
        found: Counter[str] = Counter()
        for group in (*self.of("serving"), *self.of("suspended")):
            found[group.hardware_class] += group.places
        return dict(found)

    @property
    def none_left(self) -> bool:
        return self._states["removed"] == len(self.engines)

    @property
    def serves(self) -> bool:
        """Whether any engine does."""
        return self._states["serving"] > 0

    def groups(self) -> list[Group]:
        """Those that a request may go to. Where none serves: a suspended one has room to wait in, and may hold the
        prefix."""
        if self._open is None:
            self._open = self.of("serving" if self.serves else "suspended")
        return self._open

    def of(self, state: State) -> list[Group]:
        """Those whose engines are in this state."""
        return [group for kind, group in self._groups.items() if kind[0] == state]

    @property
    def versions(self) -> set[int]:
        """That engines have, whatever their state."""
        return {group.version for group in self._groups.values() if group.version is not None}

    def _changed(self, engine: EngineEntry) -> None:
        kind, requests, places = engine.kind, len(engine.in_flight), engine.limits.max_sequences
        outstanding = engine.outstanding
        before = self._counted.get(engine.name)
        if before is not None and before[0] == kind:
            group = self._groups[kind]
            group.count(0, requests - before[1], places - before[2], outstanding - before[3])
        else:
            self._open = None
            if before is not None:
                self._leave(*before)
            group = self._groups.setdefault(kind, Group(kind))
            group.count(1, requests, places, outstanding)
            self._states[engine.state] += 1
        self._counted[engine.name] = kind, requests, places, outstanding
        engine.stamp += 1
        group.push(engine)

    def _leave(self, kind: Kind, requests: int, places: int, outstanding: int) -> None:
        group = self._groups[kind]
        group.count(-1, -requests, -places, -outstanding)
        self._states[kind[0]] -= 1
        if not group.engines:
            del self._groups[kind]


def by_name(engines: Mapping[str, EngineEntry], name: str) -> EngineEntry:
    """Raises ``ValueError``."""
    if name not in engines:
        raise ValueError(f"no engine {name!r}; there are {', '.join(engines)}")
    return engines[name]
