"""Which ticket goes to which env host, and when: between the scheduler, which decides what shall run, and the hosts.

    scheduler.to_start -> queues (by level, stream and group) -> the host with most room -> Outcome

Invariants:

- every ticket that the scheduler wants to run either waits here or is on exactly one host, until its outcome, its
  host's end, or its eviction; it waits only while no host has room for it, and in the order that
  ``coordinator.scheduling.queues`` gives;
- what is evicted here (it waited longer than the time to live: ``waited_too_long``; more wait than the load allows:
  ``queue_full``) is evicted by the scheduler, and so is in the ledger under its reason;
- time in which no env host is given tickets does not count as waiting.

Nothing here sends a message; ``Batch`` says what there is to send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from actors.core.ref import Ref
from actors.env.messages import Outcome, Ticket
from actors.env.urgency import is_urgent, turns_left
from coordinator.orders import LevelState, Places, Queues, StreamShare
from coordinator.scheduling.envhosts import EnvHost, EnvHosts
from coordinator.scheduling.fairness import Item
from coordinator.scheduling.lives import Lives
from coordinator.scheduling.queues import LEVELS, Level, LevelQueues
from coordinator.scheduling.rolling import RollingScheduler

EVALUATION = "evaluation"
WAITED_TOO_LONG, QUEUE_FULL, ABORTED = "waited_too_long", "queue_full", "aborted_by_order"


class Terms(msgspec.Struct, frozen=True):
    """What the job says about waiting."""

    max_turns: int = 20
    time_to_live_s: float = 3600.0


USUAL = Terms()


class Batch(msgspec.Struct, frozen=True):
    """Tickets for one host."""

    host: Ref
    tickets: list[Ticket]
    more: bool  # whether others wait for a place


class Dispatcher:
    """See the module docstring. ``clock`` is the event loop's."""

    def __init__(self, scheduler: RollingScheduler, terms: Terms, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self._terms = terms
        self._clock = clock
        self._tickets: dict[str, Ticket] = {}  # those that wait here
        self._order = 0
        self._stopped_at: float | None = clock()
        self._stopped_s = 0.0
        self.queues = LevelQueues(time_to_live_s=terms.time_to_live_s)
        self.hosts = EnvHosts()
        self.lives = Lives(clock)
        self.queues.set_weights(scheduler.mix.shares)
        scheduler.ledger.watched_by(self.lives.transition)
        scheduler.bounded_by(lambda tickets: self.queues.room(tickets, coming=len(scheduler.to_start)))

    # ---- what comes in -------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Queue what the scheduler wants to run."""
        tickets, self.scheduler.to_start = self.scheduler.to_start, []
        for ticket in tickets:
            group = self.scheduler.group_of(ticket.id)
            self._queue(ticket, "" if group is None else group.stream)

    def evaluate(self, tickets: Iterable[Ticket]) -> None:
        """Queue tickets of an evaluation."""
        for ticket in tickets:
            self._queue(ticket, EVALUATION)

    def _queue(self, ticket: Ticket, stream: str) -> None:
        level = self._level(ticket, stream)
        self._tickets[ticket.id] = ticket
        self._order += 1
        self.queues.add(Item(ticket.id, stream, ticket.group, self._order), level, self.now())
        life = self.lives.note(ticket.id, "queued", level)
        life.ticket, life.stream = ticket, stream

    def _level(self, ticket: Ticket, stream: str) -> Level:
        if ticket.purpose == "evaluate":
            return "evaluation"
        left = turns_left(self._terms.max_turns, 0, self.scheduler.mix.turns(stream))
        return "short" if is_urgent(ticket.purpose, left) else "elastic"

    # ---- what goes out -------------------------------------------------------------------------------------------

    def batches(self) -> list[Batch]:
        """Give waiting tickets to hosts with room, and let the scheduler admit as many as that makes room for."""
        shares: dict[Ref, list[Ticket]] = {}
        given = 1
        while given:
            self.scheduler.refill()
            self.collect()
            given = self._give(shares)
        return [Batch(host, tickets, len(self.queues) > 0) for host, tickets in shares.items()]

    def _give(self, shares: dict[Ref, list[Ticket]]) -> int:
        given = 0
        while len(self.queues) and (host := self.hosts.choose()) is not None:
            id_ = self.queues.take()
            if id_ is None:
                break
            ticket = self._tickets.pop(id_)
            self.hosts.give(id_, host)
            self.lives.note(id_, "sent", f"to {host.name}").host = host.name
            shares.setdefault(host.ref, []).append(ticket)
            given += 1
        self.queues.elastic.started(given)
        return given

    # ---- ends ----------------------------------------------------------------------------------------------------

    def ended(self, outcome: Outcome) -> None:
        """An outcome has arrived, for the first time or again."""
        self.withdraw(outcome.ticket, f"{outcome.state} {outcome.reason}".strip())
        self.hosts.ended(outcome.ticket)
        group = self.scheduler.group_of(outcome.ticket)
        if group is not None:
            self.queues.used(group.index)

    def stop(self, ticket: str) -> EnvHost | None:
        """It shall not run any more: it waits no longer; returns the host that has it, if one has."""
        self.withdraw(ticket)
        return self.hosts.ended(ticket)

    def withdraw(self, ticket: str, end: str = "given up") -> None:
        """It waits no longer, if it did. ``end``: of an evaluation's, whose end the ledger does not tell."""
        self._tickets.pop(ticket, None)
        self.queues.remove(ticket)
        life = self.lives.of(ticket)
        if life is not None and life.stream == EVALUATION:
            self.lives.note(ticket, "ended", end)

    def waits(self, ticket: str) -> bool:
        return ticket in self._tickets

    def left_places(self, tickets: Iterable[str]) -> None:
        """They are only scored and stored from now on."""
        for ticket in tickets:
            if self.hosts.host_of(ticket) is not None:
                self.hosts.left_place(ticket)
                self.lives.note(ticket, "left its place")

    # ---- time ----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """A clock that stands still while nothing can be started."""
        return (self._clock() if self._stopped_at is None else self._stopped_at) - self._stopped_s

    def hosts_changed(self) -> None:
        """One came, left, or is given tickets again or no more."""
        accepting = self.hosts.accepting
        if accepting and self._stopped_at is not None:
            self._stopped_s += self._clock() - self._stopped_at
            self._stopped_at = None
        elif not accepting and self._stopped_at is None:
            self._stopped_at = self._clock()
        self.queues.elastic.measure(self.hosts.places, self._clock())

    def bind(self, places: int) -> None:
        """Use no more places than that; what runs beyond it goes on to its end."""
        self.hosts.bound = places
        self.hosts_changed()

    def sweep(self) -> None:
        """Fit what may wait to the load, and give up what has waited too long or is too much. To be called now and
        then, and followed by what the scheduler then has to say."""
        self.collect()
        self.queues.elastic.measure(self.hosts.places, self._clock())
        while (late := self.queues.expired(self.now())) is not None:
            self._give_up(late, WAITED_TOO_LONG)
        while (surplus := self.queues.overfull()) is not None:
            self._give_up(surplus, QUEUE_FULL)

    def _give_up(self, ticket: str, reason: str) -> None:
        self.withdraw(ticket)
        self.scheduler.give_up(ticket, reason)  # its group's others are stopped as by any eviction

    # ---- for people ----------------------------------------------------------------------------------------------

    def places(self) -> Places:
        return Places(self.hosts.used, self.hosts.used + len(self.queues), self.hosts.bound)

    def describe(self) -> Queues:
        mix, queues, now = self.scheduler.mix, self.queues, self.now()
        capacity = queues.elastic.capacity
        bounds = {"elastic": None if capacity == float("inf") else int(capacity)}
        levels = [
            LevelState(level, queues.count(level), bounds.get(level), queues.oldest_s(level, now), queues.flows(level))
            for level in LEVELS
        ]
        streams = [StreamShare(name, share, mix.admitted[name]) for name, share in mix.shares.items()]
        return Queues(levels, streams, self.hosts.states(), queues.elastic.rate)
