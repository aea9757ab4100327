"""The sample ledger: every ticket that was ever admitted, and how it ended.

    ADMITTED --Outcome stored--> BUFFERED --batch taken--> TAKEN --step done--> TRAINED
        |  |                         |                        |
        |  +-- lost (reason)         |                        +--> BUFFERED again, if the step did not happen
        +----------------------------+-- evicted (reason)

Invariant (conservation): admitted = trained + lost by reason + evicted by reason + in flight + buffered + taken, at
any time. A ticket changes state only through the methods here, and each of them checks where it comes from.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from actors.env.messages import Outcome, Ticket

State = Literal["admitted", "buffered", "taken"]


class LedgerError(RuntimeError):
    """A transition that the ledger does not allow; the message names the ticket and its state."""


class Entry(msgspec.Struct):
    """One live ticket."""

    ticket: Ticket
    state: State = "admitted"


class Balance(msgspec.Struct, frozen=True):
    """The ledger's sum; ``holds`` is the conservation law."""

    admitted: int
    trained: int
    lost: dict[str, int]
    evicted: dict[str, int]
    in_flight: int
    buffered: int
    taken: int

    @property
    def holds(self) -> bool:
        ended = self.trained + sum(self.lost.values()) + sum(self.evicted.values())
        return self.admitted == ended + self.in_flight + self.buffered + self.taken

    def __str__(self) -> str:
        lost = ", ".join(f"{reason} {count}" for reason, count in sorted(self.lost.items())) or "none"
        evicted = ", ".join(f"{reason} {count}" for reason, count in sorted(self.evicted.items())) or "none"
        return (
            f"admitted {self.admitted} = trained {self.trained} + lost ({lost}) + evicted ({evicted}) + "
            f"in flight {self.in_flight} + buffered {self.buffered} + taken {self.taken}"
        )


class Ledger:
    """Training tickets only: evaluation has no part in conservation."""

    def __init__(self) -> None:
        self._live: dict[str, Entry] = {}
        self.admitted = 0
        self.trained = 0
        self.lost: Counter[str] = Counter()
        self.evicted: Counter[str] = Counter()

    def __contains__(self, ticket: str) -> bool:
        return ticket in self._live

    def entry(self, ticket: str) -> Entry:
        """A live ticket. Raises ``LedgerError``."""
        if ticket not in self._live:
            raise LedgerError(f"ticket {ticket} is not live: it was never admitted here, or has ended")
        return self._live[ticket]

    def admit(self, ticket: Ticket) -> None:
        if ticket.id in self._live:
            raise LedgerError(f"ticket {ticket.id} was admitted already")
        self._live[ticket.id] = Entry(ticket)
        self.admitted += 1

    def buffer(self, outcome: Outcome) -> None:
        """Its trajectory is durably stored."""
        self._require(outcome.ticket, "admitted").state = "buffered"

    def take(self, tickets: list[str]) -> None:
        """All or, with an error, none."""
        for entry in [self._require(ticket, "buffered") for ticket in tickets]:
            entry.state = "taken"

    def put_back(self, tickets: list[str]) -> None:
        """The step that took them did not happen."""
        for entry in [self._require(ticket, "taken") for ticket in tickets]:
            entry.state = "buffered"

    def train(self, tickets: list[str]) -> None:
        """The step on them is done. All or, with an error, none."""
        for ticket in tickets:
            self._require(ticket, "taken")
        for ticket in tickets:
            del self._live[ticket]
        self.trained += len(tickets)

    def lose(self, ticket: str, reason: str) -> None:
        """It ended while it ran."""
        self._require(ticket, "admitted")
        del self._live[ticket]
        self.lost[reason] += 1

    def evict(self, ticket: str, reason: str) -> None:
        """It will not be trained on, though it runs or is buffered; whoever calls this stops or discards it."""
        if self.entry(ticket).state == "taken":
            raise LedgerError(f"ticket {ticket} is taken: the step on it must end first")
        del self._live[ticket]
        self.evicted[reason] += 1

    def _require(self, ticket: str, state: State) -> Entry:
        entry = self.entry(ticket)
        if entry.state != state:
            raise LedgerError(f"ticket {ticket} is {entry.state}, expected {state}")
        return entry

    def restore(self, balance: Balance, buffered: list[Ticket]) -> None:
        """Go on from a checkpoint's balance: ``buffered`` tickets are live again, whatever else was live when it was
        taken was lost when the run was interrupted. To be called on a fresh ledger."""
        gone = balance.in_flight + balance.buffered + balance.taken - len(buffered)
        self.admitted, self.trained = balance.admitted, balance.trained
        self.lost, self.evicted = Counter(balance.lost), Counter(balance.evicted)
        if gone:
            self.lost["interrupted"] += gone
        for ticket in buffered:
            self._live[ticket.id] = Entry(ticket, "buffered")

    def balance(self) -> Balance:
        states = Counter(entry.state for entry in self._live.values())
        return Balance(
            self.admitted,
            self.trained,
            dict(self.lost),
            dict(self.evicted),
            states["admitted"],
            states["buffered"],
            states["taken"],
        )

    def ended(self) -> dict[str, int]:
        """All that was admitted and not trained on, by reason."""
        return dict(self.lost + self.evicted)
