"""What a new leader reads in the ledger's journal of the one before: which groups are live, and where each member is.

Invariant: every ticket that was ever admitted is in exactly one place of what is found (a group's members, or the sums
of those that have ended), so that the conservation of trajectories holds across a change of leaders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from coordinator.scheduling.journal import Event, read_on
from coordinator.scheduling.ledger import Balance


class FoundGroup(msgspec.Struct):
    """One that has not ended as a whole. ``cut``: why it was being evicted, if the journal breaks off in the middle."""

    index: int
    task: int
    stream: str = ""
    missing: list[str] = []
    stored: dict[str, int] = {}  # ticket -> initiating version
    retries: int = 0
    cut: str = ""


class Found(msgspec.Struct):
    """The scheduler as its journal tells it."""

    version: int
    next_group: int
    next_ticket: int
    groups: dict[int, FoundGroup]
    streams: dict[str, int]  # of tasks -> groups that were taken from it
    trained: int
    lost: dict[str, int]
    evicted: dict[str, int]
    ruled: tuple[int, int] | None = None  # alpha and redundant groups, as a person has ordered; likewise:
    weights: dict[str, float] = {}
    paused: bool = False
    places: int | None = None  # that it may use

    @property
    def balance(self) -> Balance:
        """Whatever is live counts as in flight or buffered: a batch that was taken is for the trainer to tell."""
        in_flight = sum(len(group.missing) for group in self.groups.values())
        buffered = sum(len(group.stored) for group in self.groups.values())
        return Balance(self.next_ticket, self.trained, self.lost, self.evicted, in_flight, buffered, 0)


class _Reading:
    """The state after each event."""

    def __init__(self) -> None:
        self.version = 0
        self.next_group = 0
        self.admitted = 0
        self.ruled: tuple[int, int] | None = None
        self.paused = False
        self.places: int | None = None
        self.weights: dict[str, float] = {}
        self.groups: dict[int, FoundGroup] = {}
        self._group_of: dict[str, int] = {}
        self._task_of: dict[int, tuple[int, str]] = {}
        self._version_of: dict[str, int] = {}
        self._ended: dict[str, Event] = {}

    def read(self, event: Event) -> None:
        match event.event:
            case "admitted":
                self._admit(event)
            case "resumed":
                self._resume(event)
            case "stored":
                for ticket in event.tickets:
                    self._version_of[ticket] = event.version
                    self._store(ticket)
            case "trained" | "lost" | "evicted":
                self._end(event)
            case "ruled":
                self._rule(event)

    def _rule(self, event: Event) -> None:
        if event.alpha >= 0:
            self.ruled = event.alpha, event.redundant_groups
        self.weights |= event.weights
        self.paused = self.paused if event.paused is None else event.paused
        self.places = self.places if event.places < 0 else event.places

    def _admit(self, event: Event) -> None:
        index = event.group
        group = self.groups.setdefault(index, FoundGroup(index, event.task, event.stream))
        self._task_of[index] = event.task, event.stream
        for ticket in event.tickets:
            self._group_of[ticket] = index
            group.missing.append(ticket)
            self.admitted += 1
        self.next_group = max(self.next_group, index + 1)

    def _resume(self, event: Event) -> None:
        self.version, self.next_group = event.version, event.group
        # Another sitting, which goes by its job.
        self.ruled, self.weights, self.paused, self.places = None, {}, False, None
        self.groups.clear()
        for ticket in event.tickets:
            self._ended.pop(ticket, None)
            index = self._group_of[ticket]
            self.groups.setdefault(index, FoundGroup(index, *self._task_of[index]))
            self._store(ticket)

    def _store(self, ticket: str) -> None:
        group = self.groups[self._group_of[ticket]]
        if ticket in group.missing:
            group.missing.remove(ticket)
        group.stored[ticket] = self._version_of[ticket]

    def _end(self, event: Event) -> None:
        self.version = event.version if event.event == "trained" else self.version
        for ticket in event.tickets:
            self._ended[ticket] = event
            group = self.groups.get(self._group_of[ticket])
            if group is None or (ticket not in group.missing and ticket not in group.stored):
                continue  # it was not live in what the run went back to
            group.stored.pop(ticket, None)
            if ticket in group.missing:
                group.missing.remove(ticket)
            group.retries += event.event == "lost"
            group.cut = event.reason if event.event == "evicted" else group.cut
            if not group.missing and not group.stored and event.event != "lost":
                del self.groups[group.index]

    def found(self) -> Found:
        kinds = Counter((event.event, event.reason) for event in self._ended.values())
        return Found(
            version=self.version,
            next_group=self.next_group,
            next_ticket=self.admitted,
            groups=self.groups,
            streams=Counter(stream for index, (_, stream) in self._task_of.items() if index < self.next_group),
            trained=kinds["trained", ""],
            lost={reason: count for (kind, reason), count in kinds.items() if kind == "lost"},
            evicted={reason: count for (kind, reason), count in kinds.items() if kind == "evicted"},
            ruled=self.ruled,
            weights=self.weights,
            paused=self.paused,
            places=self.places,
        )


def found_in(events: Iterable[Event]) -> Found:
    """What a whole journal says, from its first line."""
    reading = _Reading()
    for event in events:
        reading.read(event)
    return reading.found()


class JournalReader:
    """Reads a journal as it grows, so that whoever stands by has little left to read when its turn comes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reading = _Reading()
        self._offset = 0

    def catch_up(self) -> None:
        """Read what is new, to the last whole line. Raises ``OSError``."""
        events, self._offset = read_on(self._path, self._offset)
        for event in events:
            self._reading.read(event)

    @property
    def begun(self) -> bool:
        """Whether any ticket was admitted, as far as it has been read."""
        return self._reading.admitted > 0

    def found(self) -> Found:
        """What is there now. To be called once. Raises ``OSError``."""
        self.catch_up()
        return self._reading.found()
