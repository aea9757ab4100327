"""The sample ledger: every ticket that was ever admitted, and how it ended.

    ADMITTED --Outcome stored--> BUFFERED --batch taken--> TAKEN --step done--> TRAINED
        |  |                         |                        |
        |  +-- lost (reason)         |                        +--> BUFFERED again, if the step did not happen
        +----------------------------+-- evicted (reason)

Invariant (conservation): admitted = trained + lost by reason + evicted by reason + in flight + buffered + taken, at
any time and over all sittings of a run. A ticket changes state only through the methods here; each of them checks where
it comes from, and the journal has it before the method returns.

Going back to a checkpoint changes what became of the tickets since (``restore``):

- what its buffer holds is buffered again, whatever happened to it since;
- what was trained on since is lost, ``rolled_back``: the step that it was in is undone;
- what was stored since is lost, ``unsaved``. It is not put into the buffer: its tokens, if not its first one then later
  ones, come from versions that are gone (the versions that will bear their numbers have other weights), and its group
  runs again from the checkpoint's order of the data anyway;
- what still ran is lost, ``interrupted``; what was lost or evicted since stays so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from actors.env.messages import Outcome, Ticket
from coordinator.scheduling.journal import MOST_DETAIL, Event, Journal, NoJournal

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

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal: Journal = journal or NoJournal()
        self._watcher: Callable[[Event], None] = _nobody
        self._live: dict[str, Entry] = {}
        self._states: Counter[State] = Counter()  # of live tickets
        self.admitted = 0
        self.trained = 0
        self.lost: Counter[str] = Counter()
        self.evicted: Counter[str] = Counter()

    def watched_by(self, watcher: Callable[[Event], None]) -> None:
        """Whom to tell of every transition, once the journal has it."""
        self._watcher = watcher

    def __contains__(self, ticket: str) -> bool:
        return ticket in self._live

    def entry(self, ticket: str) -> Entry:
        """A live ticket. Raises ``LedgerError``."""
        if ticket not in self._live:
            raise LedgerError(f"ticket {ticket} is not live: it was never admitted here, or has ended")
        return self._live[ticket]

    def admit(self, ticket: Ticket, stream: str = "") -> None:
        if ticket.id in self._live:
            raise LedgerError(f"ticket {ticket.id} was admitted already")
        self._write(Event("admitted", [ticket.id], group=ticket.group, task=ticket.task, stream=stream))
        self._live[ticket.id] = Entry(ticket)
        self._states["admitted"] += 1
        self.admitted += 1

    def buffer(self, outcome: Outcome) -> None:
        """Its trajectory is durably stored."""
        entry = self._require(outcome.ticket, "admitted")
        self._write(Event("stored", [outcome.ticket], outcome.initiating_version))
        self._move(entry, "buffered")

    def take(self, tickets: list[str]) -> None:
        """All or, with an error, none."""
        for entry in [self._require(ticket, "buffered") for ticket in tickets]:
            self._move(entry, "taken")

    def put_back(self, tickets: list[str]) -> None:
        """The step that took them did not happen."""
        for entry in [self._require(ticket, "taken") for ticket in tickets]:
            self._move(entry, "buffered")

    def train(self, tickets: list[str], version: int) -> None:
        """The step on them is done and made ``version``. All or, with an error, none."""
        for ticket in tickets:
            self._require(ticket, "taken")
        self._write(Event("trained", tickets, version))
        for ticket in tickets:
            self._end(ticket)
        self.trained += len(tickets)

    def lose(self, ticket: str, reason: str, detail: str = "") -> None:
        """It ended while it ran."""
        self._require(ticket, "admitted")
        self._write(Event("lost", [ticket], reason=reason, detail=detail[:MOST_DETAIL]))
        self._end(ticket)
        self.lost[reason] += 1

    def evict(self, ticket: str, reason: str) -> None:
        """It will not be trained on, though it runs or is buffered; whoever calls this stops or discards it."""
        if self.entry(ticket).state == "taken":
            raise LedgerError(f"ticket {ticket} is taken: the step on it must end first")
        self._write(Event("evicted", [ticket], reason=reason))
        self._end(ticket)
        self.evicted[reason] += 1

    def _require(self, ticket: str, state: State) -> Entry:
        entry = self.entry(ticket)
        if entry.state != state:
            raise LedgerError(f"ticket {ticket} is {entry.state}, expected {state}")
        return entry

    def _write(self, event: Event) -> None:
        self._journal.write([event])
        self._watcher(event)

    def _move(self, entry: Entry, state: State) -> None:
        self._states[entry.state] -= 1
        self._states[state] += 1
        entry.state = state

    def _end(self, ticket: str) -> None:
        self._states[self._live.pop(ticket).state] -= 1

    def ruled(self, order: Event) -> None:
        """What a person has ordered, for whoever leads on."""
        self._journal.write([order])

    def mark(self) -> int:
        """Where in the journal a checkpoint stands that is taken now."""
        return self._journal.mark()

    def live(self) -> list[str]:
        """Tickets that have not ended."""
        return list(self._live)

    def restore(
        self,
        balance: Balance,
        live: Iterable[str],
        buffered: Sequence[Ticket],
        *,
        version: int,
        next_group: int = -1,
        since: Sequence[Event] = (),
        acknowledged: Iterable[str] = (),
    ) -> None:
        """Go on from a checkpoint of ``version``; see the module docstring. ``live``: the tickets that were when it was
        taken, ``since``: what the journal says after that, ``acknowledged``: what the store held in the end. To be
        called on a fresh ledger."""
        fates = _fates(live, since, acknowledged)
        for ticket in buffered:
            fates.pop(ticket.id, None)
            self._live[ticket.id] = Entry(ticket, "buffered")
            self._states["buffered"] += 1
        self.admitted = balance.admitted + admitted(since)
        self.trained = balance.trained
        self.lost, self.evicted = Counter(balance.lost), Counter(balance.evicted)
        new: dict[str, list[str]] = defaultdict(list)
        for id_, fate in fates.items():
            (self.evicted if fate.evicted else self.lost)[fate.reason] += 1
            if not fate.on_record:
                new[fate.reason].append(id_)
        losses = [Event("lost", tickets, reason=reason) for reason, tickets in new.items()]
        events = [Event("resumed", [ticket.id for ticket in buffered], version, group=next_group), *losses]
        self._journal.write(events)
        for event in events:
            self._watcher(event)

    def inherit(self, balance: Balance, live: Mapping[str, Entry]) -> None:
        """Go on where another process was, with all that is live; the journal says so already. To be called on a fresh
        ledger."""
        self._live = dict(live)
        self._states = Counter(entry.state for entry in live.values())
        self.admitted, self.trained = balance.admitted, balance.trained
        self.lost, self.evicted = Counter(balance.lost), Counter(balance.evicted)

    def balance(self) -> Balance:
        return Balance(
            self.admitted,
            self.trained,
            dict(self.lost),
            dict(self.evicted),
            self._states["admitted"],
            self._states["buffered"],
            self._states["taken"],
        )

    def counts(self) -> tuple[int, int]:
        """Tickets in flight and buffered."""
        return self._states["admitted"], self._states["buffered"]

    def ended(self) -> dict[str, int]:
        """All that was admitted and not trained on, by reason."""
        return dict(self.lost + self.evicted)


def _nobody(event: Event) -> None:
    """Nobody wants to hear of transitions."""


class _Fate(msgspec.Struct, frozen=True):
    """What became of a ticket, once the checkpoint's buffer does not hold it."""

    reason: str
    evicted: bool = False
    on_record: bool = False  # the journal says so already


_INTERRUPTED, _UNSAVED, _ROLLED_BACK = _Fate("interrupted"), _Fate("unsaved"), _Fate("rolled_back")


def _fates(live: Iterable[str], since: Iterable[Event], acknowledged: Iterable[str]) -> dict[str, _Fate]:
    fates = dict.fromkeys(live, _INTERRUPTED)
    for event in since:
        fates |= dict.fromkeys(event.tickets, _fate(event))
    for id_ in acknowledged:
        if fates.get(id_) is _INTERRUPTED:
            fates[id_] = _UNSAVED
    return fates


def _fate(event: Event) -> _Fate:
    if event.event in ("lost", "evicted"):
        return _Fate(event.reason, evicted=event.event == "evicted", on_record=True)
    return {"trained": _ROLLED_BACK, "stored": _UNSAVED}.get(event.event, _INTERRUPTED)


def admitted(events: Iterable[Event]) -> int:
    """How many tickets were."""
    return sum(len(event.tickets) for event in events if event.event == "admitted")
