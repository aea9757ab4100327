"""Schedulers and outcomes for the tests of this directory."""

from __future__ import annotations

from collections.abc import Sequence

from actors.env.messages import Outcome, Ticket
from coordinator.scheduling.journal import Event
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.rolling import RollingScheduler, Rules


class Written:
    """A journal that can be read."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, events: Sequence[Event]) -> None:
        self.events += events

    def mark(self) -> int:
        return len(self.events)


def rules(alpha: int = 1, *, groups: int = 2, size: int = 2, redundant: int = 0) -> Rules:
    return Rules(groups, size, alpha, redundant, temperature=1.0, seed=7)


def scheduler(alpha: int = 1, *, groups: int = 2, size: int = 2, redundant: int = 0) -> RollingScheduler:
    """Open, with its first groups admitted."""
    made = RollingScheduler(rules(alpha, groups=groups, size=size, redundant=redundant), Ledger())
    made.open()
    return made


def started(made: RollingScheduler) -> list[Ticket]:
    """Take what is to be started, as the coordinator does."""
    tickets, made.to_start = made.to_start, []
    return tickets


def stored(ticket: str, version: int = 0) -> Outcome:
    return Outcome(ticket, "stored", initiating_version=version, reward=1.0, turns=1, sampled_tokens=1)


def lost(ticket: str, reason: str = "env_failed") -> Outcome:
    return Outcome(ticket, "lost", reason)


def store_all(made: RollingScheduler, tickets: list[Ticket], version: int = 0) -> None:
    for ticket in tickets:
        made.stored(stored(ticket.id, version))
