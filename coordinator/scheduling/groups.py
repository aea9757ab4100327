"""A group: the trajectories of one task, compared with each other by GRPO, admitted and evicted as a whole; and all of
them that a scheduler holds.

Invariant of ``Groups``: the complete ones come out oldest first, and the stale ones are found, in time that does not
grow with how many there are (but for a logarithm).
"""

from __future__ import annotations

import heapq
from collections import defaultdict

import msgspec

from actors.env.messages import Outcome


class Group(msgspec.Struct):
    """``missing`` members run or wait to; ``stored`` ones are in the trainer's store."""

    index: int
    task: int
    missing: set[str]
    stored: dict[str, Outcome] = {}
    retries: int = 0
    stream: str = ""
    from_version: int = 0  # no member begins under an older one

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def version(self) -> int:
        """That of the oldest member; only for groups with a stored member."""
        return min(outcome.initiating_version for outcome in self.stored.values())

    @property
    def tickets(self) -> list[str]:
        return [*self.stored, *sorted(self.missing)]


class GroupState(msgspec.Struct, frozen=True):
    """A group as a checkpoint keeps it: members that still ran are run again."""

    index: int
    task: int
    stored: dict[str, Outcome]
    rerun: int
    stream: str = ""


class Groups:
    """Groups in flight and buffered; see the module docstring."""

    def __init__(self) -> None:
        self._all: dict[int, Group] = {}
        self._by_version: defaultdict[int, set[int]] = defaultdict(set)  # those with a stored member
        self._complete: set[int] = set()
        self._queue: list[tuple[int, int]] = []  # heap of (version, index) of complete ones, and of some that are gone

    def __len__(self) -> int:
        return len(self._all)

    def get(self, index: int) -> Group | None:
        return self._all.get(index)

    def all(self) -> list[Group]:
        """In the order in which they came."""
        return list(self._all.values())

    @property
    def complete(self) -> int:
        """Groups of which every member is stored."""
        return len(self._complete)

    def add(self, group: Group) -> None:
        """Once it has its members."""
        self._all[group.index] = group
        if group.stored:
            self._by_version[group.version].add(group.index)
            self._note_complete(group)

    def remove(self, group: Group) -> None:
        del self._all[group.index]
        self._complete.discard(group.index)
        if group.stored:
            self._by_version[group.version].discard(group.index)

    def store(self, group: Group, outcome: Outcome) -> None:
        """A member that was missing is stored: the group is as old as the oldest of them."""
        if group.stored:
            self._by_version[group.version].discard(group.index)
        group.missing.discard(outcome.ticket)
        group.stored[outcome.ticket] = outcome
        self._by_version[group.version].add(group.index)
        self._note_complete(group)

    def take(self) -> Group:
        """Remove the oldest complete one. Raises ``IndexError`` where none is."""
        while True:
            version, index = heapq.heappop(self._queue)
            if index in self._complete and self._all[index].version == version:
                group = self._all[index]
                self.remove(group)
                return group

    def before(self, version: int) -> list[Group]:
        """Those with a member older than this version, oldest first."""
        old = sorted(known for known in self._by_version if known < version)
        found = [self._all[index] for known in old for index in sorted(self._by_version[known])]
        for known in old:
            if not self._by_version[known]:
                del self._by_version[known]
        return found

    def _note_complete(self, group: Group) -> None:
        if group.complete and group.index not in self._complete:
            self._complete.add(group.index)
            heapq.heappush(self._queue, (group.version, group.index))
