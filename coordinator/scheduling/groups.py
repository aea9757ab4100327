"""A group: the trajectories of one task, compared with each other by GRPO, admitted and evicted as a whole."""

from __future__ import annotations

import msgspec

from actors.env.messages import Outcome


class Group(msgspec.Struct):
    """``missing`` members run or wait to; ``stored`` ones are in the trainer's store."""

    index: int
    task: int
    missing: set[str]
    stored: dict[str, Outcome] = {}
    retries: int = 0

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
