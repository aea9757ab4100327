"""The rolling scheduler: which groups are admitted, which batch is taken, what is replaced.

Invariants:

- admission: groups in flight, buffered or taken <= (1 + alpha) * B + slack, where B is the batch in groups. A group
  lost for whatever reason frees its place at once, a batch when it has been trained on. No member of a group begins
  under an older version than the learner's at its admission (``Ticket.from_version``: until an engine has it, its
  environment is reset and its first turn waits there), so that with no overtaking nothing is ever stale. (Could it
  begin one version earlier, it would be alpha + 1 versions old when it is trained on, alpha + 1 batches later.)
- a batch holds only groups whose version (their oldest member's) is >= n - alpha: stale ones are evicted first;
- a lost member is run again while its group may still be trained on (at most ``MEMBER_RETRIES`` times a group), else
  the whole group is evicted and a fresh one takes its place;
- of streams that are sampled dynamically (DAPO), a group whose members all score alike teaches nothing and is replaced,
  up to ``REPLACED_AT_MOST`` batches of them a step, so that a policy that always succeeds still gets batches;
- alpha = 0: what still runs when a batch is taken is cut, no straggler is carried over, and nothing is admitted before
  it has been trained on. The rest is the same rule: B groups are taken, and no place is free.

Redundant groups (slack > 0) are there to be overtaken: with alpha >= 1 the slowest of them may become stale.

It decides and records; messages are the coordinator's business (``to_start``, ``to_stop``, ``to_discard`` collect what
there is to say; whoever takes them does so in the same turn of the loop). Nothing here reads a clock or waits, and no
decision costs more for more that is live: groups are kept by the version that makes them stale, complete ones in the
order in which they will be taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from actors.env.messages import Outcome, Ticket
from coordinator.scheduling.groups import Group, Groups, GroupState
from coordinator.scheduling.journal import Event
from coordinator.scheduling.ledger import Balance, Entry, Ledger, LedgerError, admitted
from coordinator.scheduling.mix import Mix, StreamState
from coordinator.scheduling.succession import Found, FoundGroup

MEMBER_RETRIES = 3
REPLACED_AT_MOST = 3
"""Batches' worth of groups that score alike and are replaced between two steps; more of them are kept."""


class Rules(msgspec.Struct, frozen=True):
    """What the job says about admission."""

    groups_per_step: int
    group_size: int
    alpha: int
    redundant_groups: int
    temperature: float
    seed: int
    sampled_dynamically: frozenset[str] = frozenset()  # streams whose groups are replaced where all members score alike

    @property
    def capacity(self) -> int:
        """Groups that may be in flight or buffered."""
        return (1 + self.alpha) * self.groups_per_step + self.redundant_groups


class Taken(msgspec.Struct, frozen=True):
    """A batch: whole groups, oldest first."""

    groups: list[list[str]]
    outcomes: list[Outcome]


class SchedulerState(msgspec.Struct, frozen=True):
    """What a checkpoint keeps of the scheduler: the data order, the buffer and the books."""

    next_group: int
    next_ticket: int
    groups: list[GroupState]
    balance: Balance
    live: list[str]  # tickets
    journal: int  # where in the ledger's journal it stands
    mix: dict[str, StreamState] = {}


NOTHING_YET = SchedulerState(0, 0, [], Balance(0, 0, {}, {}, 0, 0, 0), [], 0)
"""Before the first ticket."""


class RollingScheduler:
    """See the module docstring."""

    def __init__(self, rules: Rules, ledger: Ledger, mix: Mix | None = None) -> None:
        self.rules = rules
        self.ledger = ledger
        self.mix = mix or Mix({})
        self.version = 0
        self.to_start: list[Ticket] = []
        self.to_stop: list[tuple[str, str]] = []
        self.to_discard: list[str] = []
        self._changed: Callable[[], None] = _nobody
        self._room: Callable[[int], bool] = _any_number
        self._groups = Groups()
        self._group_of: dict[str, int] = {}
        self._open = False
        self._resumed: list[Ticket] = []  # members of a checkpoint's groups that run again, once it opens
        self._taken: list[Group] = []  # the batch that is trained on now
        self._next_group = 0
        self._next_ticket = 0
        self._replaced = 0  # groups that scored alike, since the last step

    def on_change(self, changed: Callable[[], None]) -> None:
        """Whom to tell when a batch may have become ready."""
        self._changed = changed

    def bounded_by(self, room: Callable[[int], bool]) -> None:
        """Who says whether so many more tickets may wait to be started: while they may not, no group is admitted."""
        self._room = room

    # ---- admission -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Let groups in, up to the bound, from now on."""
        self._open = True
        self.to_start += self._resumed
        self._resumed = []
        self._admit()

    @property
    def is_open(self) -> bool:
        return self._open

    def close(self) -> None:
        """Let no new group in; members of admitted ones may still be run again."""
        self._open = False

    def set_rules(self, rules: Rules, why: str = "") -> None:
        """A changed alpha or slack, from now on; ``why``, if nobody ordered it."""
        if rules != self.rules:
            event = Event("ruled", [], alpha=rules.alpha, redundant_groups=rules.redundant_groups, detail=why)
            self.ledger.ruled(event)
        self.rules = rules
        self._evict_stale()
        self._admit()

    def set_weights(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Other shares for streams of tasks, for what is admitted from now on. Raises ``ValueError``."""
        shares = self.mix.set_weights(weights)
        self.ledger.ruled(Event("ruled", [], weights=dict(weights)))
        return shares

    def set_paused(self, paused: bool) -> None:
        """Let no new group in, or groups again."""
        self.ledger.ruled(Event("ruled", [], paused=paused))
        self.close() if paused else self.open()

    def refill(self) -> None:
        """Admit what there is room for now."""
        self._admit()

    def _admit(self) -> None:
        while self._open and self._places() > 0 and self._room(self.rules.group_size):
            index = self._next_group
            self._next_group += 1
            stream, task = self.mix.next()
            group = Group(index, task, set(), {}, stream=stream, from_version=self.version)
            self._add_group(group, self.rules.group_size)
        self._changed()

    def _places(self) -> int:
        """Groups that may be admitted now."""
        if self.rules.alpha == 0 and self._taken:
            return 0
        return self.rules.capacity - len(self._groups) - len(self._taken)

    def _add_group(self, group: Group, members: int) -> None:
        """A group with so many members that are yet to run."""
        try:
            for _ in range(members):
                self._add_member(group)
        finally:  # those that the journal has are accounted for, whatever became of the others
            self._groups.add(group)

    def _add_member(self, group: Group) -> None:
        ticket = self._ticket(group, self._next_ticket)
        self.ledger.admit(ticket, group.stream)
        self._next_ticket += 1  # after the journal has it: a number that is skipped there would be given twice
        group.missing.add(ticket.id)
        self._group_of[ticket.id] = group.index
        self.to_start.append(ticket)

    def _ticket(self, group: Group, number: int) -> Ticket:
        seed = int(np.random.default_rng([self.rules.seed, number]).integers(2**31))
        temperature = self.rules.temperature
        stream = self.mix.named(group.stream)
        return Ticket(
            f"t{number}", group.index, group.task, "train", temperature, seed, group.from_version, stream=stream
        )

    # ---- what comes back -----------------------------------------------------------------------------------------

    def stored(self, outcome: Outcome) -> None:
        """A trajectory is durably stored. One that was evicted meanwhile is discarded, a repeated report ignored."""
        group = self._running(outcome.ticket)
        if group is None:
            if outcome.ticket not in self.ledger:
                self.to_discard.append(outcome.ticket)
            return
        self.ledger.buffer(outcome)
        self._groups.store(group, outcome)
        if self._is_stale(group):
            self._evict_group(group, "stale")
        elif self._teaches_nothing(group):
            self._replaced += 1
            self._evict_group(group, "alike")
        self._admit()

    def _teaches_nothing(self, group: Group) -> bool:
        """Whether it is to be replaced for that."""
        if self.mix.named(group.stream) not in self.rules.sampled_dynamically or not group.complete:
            return False
        alike = len({outcome.reward for outcome in group.stored.values()}) == 1
        return alike and self._replaced < REPLACED_AT_MOST * self.rules.groups_per_step

    def lost(self, outcome: Outcome) -> None:
        """A trajectory ended without a result; reports on tickets that do not run here any more are ignored."""
        group = self._running(outcome.ticket)
        if group is None:
            return
        self.ledger.lose(outcome.ticket, outcome.reason, outcome.detail)
        group.missing.discard(outcome.ticket)
        del self._group_of[outcome.ticket]
        group.retries += 1
        if outcome.reason == "stale" or group.retries > MEMBER_RETRIES:
            self._evict_group(group, outcome.reason)
        else:
            self._add_member(group)
        self._admit()

    def give_up(self, ticket: str, reason: str) -> None:
        """A ticket that has not ended will not be waited for any longer: its group is evicted whole. Others are
        ignored."""
        group = self._running(ticket)
        if group is not None:
            self._evict_group(group, reason)
            self._admit()

    def group_of(self, ticket: str) -> Group | None:
        """That of a ticket in flight or buffered."""
        index = self._group_of.get(ticket)
        return None if index is None else self._groups.get(index)

    def _running(self, ticket: str) -> Group | None:
        """The group of a ticket that has not ended."""
        index = self._group_of.get(ticket)
        group = None if index is None else self._groups.get(index)
        return group if group is not None and ticket in group.missing else None

    # ---- batches -------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a batch can be taken now."""
        return not self._taken and self.complete_groups >= self.rules.groups_per_step

    @property
    def complete_groups(self) -> int:
        """Groups of which every member is stored."""
        return self._groups.complete

    @property
    def training(self) -> int:
        """Groups of the batch that is trained on now."""
        return len(self._taken)

    @property
    def places(self) -> int:
        """Groups that may be admitted now, if there is room for their tickets."""
        return max(0, self._places())

    def take(self) -> Taken:
        """The oldest complete groups, B of them; call only when ``ready``. At alpha = 0 the rest is cut."""
        self._evict_stale()
        complete = self._groups.complete
        if self._taken or complete < self.rules.groups_per_step:
            raise RuntimeError(
                f"a batch of {self.rules.groups_per_step} groups cannot be taken: {complete} are complete, and "
                f"{len(self._taken)} are being trained on"
            )
        groups = [self._groups.take() for _ in range(self.rules.groups_per_step)]
        for group in groups:
            self.ledger.take(list(group.stored))
            self._forget(group)
        self._taken = groups
        if self.rules.alpha == 0:
            for group in self._groups.all():
                self._evict_group(group, "straggler")
        self._admit()
        return Taken(
            [list(group.stored) for group in groups],
            [outcome for group in groups for outcome in group.stored.values()],
        )

    def trained(self, version: int) -> None:
        """The step on the batch is done, and the learner is at ``version``."""
        if not self._taken or version != self.version + 1:
            raise RuntimeError(
                f"version {version} cannot follow version {self.version} on a batch of {len(self._taken)} groups: one "
                f"batch makes one version"
            )
        self.ledger.train([ticket for group in self._taken for ticket in group.stored], version)
        self.version = version
        self._taken = []
        self._replaced = 0
        self._evict_stale()
        self._admit()

    def put_back(self) -> None:
        """The step on the batch did not happen: its groups are buffered again."""
        groups, self._taken = self._taken, []
        for group in groups:
            self.ledger.put_back(list(group.stored))
            self._groups.add(group)
            self._group_of.update(dict.fromkeys(group.stored, group.index))
        self._evict_stale()  # the bound may have been lowered meanwhile
        self._admit()

    def _is_stale(self, group: Group) -> bool:
        """Groups that have not begun are as fresh as can be."""
        return bool(group.stored) and group.version < self.version - self.rules.alpha

    def _evict_stale(self) -> None:
        for group in self._groups.before(self.version - self.rules.alpha):
            self._evict_group(group, "stale")

    def _evict_group(self, group: Group, reason: str) -> None:
        for ticket in group.stored:
            self.ledger.evict(ticket, reason)
            self.to_discard.append(ticket)
        unsent = {ticket.id for ticket in (*self.to_start, *self._resumed)} & group.missing
        for id_ in sorted(group.missing):
            self.ledger.evict(id_, reason)
            if id_ not in unsent:
                self.to_stop.append((id_, reason))
        if unsent:
            self.to_start = [ticket for ticket in self.to_start if ticket.id not in unsent]
            self._resumed = [ticket for ticket in self._resumed if ticket.id not in unsent]
        self._groups.remove(group)
        self._forget(group)

    def _forget(self, group: Group) -> None:
        for ticket in group.tickets:
            self._group_of.pop(ticket, None)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> SchedulerState:
        """Enough to go on from: the order of the data and the buffered groups. A batch that is being trained on is
        among them: what is saved are the weights before its step."""
        groups = [
            GroupState(group.index, group.task, dict(group.stored), len(group.missing), group.stream)
            for group in (*self._taken, *self._groups.all())
        ]
        ledger = self.ledger
        return SchedulerState(
            self._next_group,
            self._next_ticket,
            groups,
            ledger.balance(),
            ledger.live(),
            ledger.mark(),
            self.mix.state(),
        )

    def restore(
        self,
        state: SchedulerState,
        version: int,
        held: Iterable[str],
        *,
        since: Sequence[Event] = (),
        acknowledged: Iterable[str] = (),
    ) -> None:
        """Take up where ``state`` left off; members whose bytes are not ``held`` are run again, and what is held
        beyond them is discarded. ``since`` and ``acknowledged``: see ``Ledger.restore``; no ticket's name is given
        twice. To be called on a fresh scheduler, before ``open``."""
        present = set(held)
        self.version = version
        self._next_group, self._next_ticket = state.next_group, state.next_ticket + admitted(since)
        self.mix.restore(state.mix, state.next_group)
        stored = {
            saved.index: {id_: outcome for id_, outcome in saved.stored.items() if id_ in present}
            for saved in state.groups
        }
        tickets = [self._restored(id_, saved) for saved in state.groups for id_ in stored[saved.index]]
        self.ledger.restore(
            state.balance,
            state.live,
            tickets,
            version=version,
            next_group=state.next_group,
            since=since,
            acknowledged=acknowledged,
        )
        self.to_discard += sorted(present - {ticket.id for ticket in tickets})
        for saved in state.groups:
            kept = stored[saved.index]
            self._group_of.update(dict.fromkeys(kept, saved.index))
            group = Group(saved.index, saved.task, set(), kept, stream=saved.stream, from_version=version)
            self._add_group(group, saved.rerun + len(saved.stored) - len(kept))
        self._resumed, self.to_start = self.to_start, []
        self._evict_stale()

    # ---- another leader's run ------------------------------------------------------------------------------------

    def inherit(self, found: Found, outcomes: Mapping[str, Outcome], *, running: Collection[str], epoch: int) -> None:
        """Go on where another process was that led this run: ``found`` is what its journal tells, ``outcomes`` those of
        the trajectories that the trainer's store has, ``running`` the tickets that env hosts have, ``epoch`` this
        leader's. Tickets that nobody runs are started again, from the version that there is now on. To be called on a
        fresh scheduler, before ``open``."""
        self.version = found.version
        self._next_group, self._next_ticket = found.next_group, found.next_ticket
        if found.ruled:
            alpha, redundant = found.ruled
            self.rules = msgspec.structs.replace(self.rules, alpha=alpha, redundant_groups=redundant)
        if found.weights:
            self.mix.set_weights(found.weights)
        self.mix.restore({name: StreamState(groups, 0.0) for name, groups in found.streams.items()}, found.next_group)
        live: dict[str, Entry] = {}
        groups = {each.index: _inherited(each, outcomes, self.version) for each in found.groups.values()}
        for group in groups.values():
            live |= {id_: Entry(self._ticket(group, int(id_[1:]))) for id_ in sorted(group.missing)}
            live |= {id_: Entry(self._ticket(group, int(id_[1:])), "buffered") for id_ in group.stored}
            self._group_of.update(dict.fromkeys(group.tickets, group.index))
        self.to_start = [
            msgspec.structs.replace(live[id_].ticket, again=epoch)
            for each in found.groups.values()
            for id_ in each.missing
            if id_ not in running
        ]
        self.ledger.inherit(found.balance, live)
        for each in found.groups.values():
            self._mend(groups[each.index], each)

    def _mend(self, group: Group, found: FoundGroup) -> None:
        """Finish what the other leader was in the middle of."""
        cut = found.cut or ("retries" if group.retries > MEMBER_RETRIES else "")
        self._add_group(group, 0 if cut else self.rules.group_size - len(group.tickets))
        if cut:
            self._evict_group(group, cut)

    def retake(self, order: Sequence[Sequence[str]]) -> Taken:
        """Take the very batch that the trainer was given by another leader. Raises ``LedgerError`` where a ticket of it
        is not buffered."""
        outcomes: list[Outcome] = []
        for tickets in order:
            self.ledger.take(list(tickets))
            group = self.group_of(tickets[0])
            if group is None:
                raise LedgerError(f"ticket {tickets[0]} is of no group: the batch cannot be taken again")
            outcomes += [group.stored[id_] for id_ in tickets]
            self._groups.remove(group)
            self._forget(group)
            self._taken.append(group)
        return Taken([list(tickets) for tickets in order], outcomes)

    def _restored(self, id_: str, group: GroupState) -> Ticket:
        """A ticket that has run already: its seed is of no use any more."""
        return Ticket(id_, group.index, group.task, "train", self.rules.temperature, 0)

    @property
    def groups(self) -> int:
        """Groups in flight or buffered."""
        return len(self._groups)

    def counts(self) -> tuple[int, int]:
        """Trajectories in flight and buffered."""
        return self.ledger.counts()


def _inherited(found: FoundGroup, outcomes: Mapping[str, Outcome], version: int) -> Group:
    """What begins in it anew does so under ``version``. One whose stored members' bytes are not all there is cut."""
    stored = {}
    for id_, initiating in found.stored.items():
        stored[id_] = outcomes.get(id_) or Outcome(id_, "stored", initiating_version=initiating)
        if id_ not in outcomes:
            found.cut = found.cut or "store_lost"
    return Group(found.index, found.task, set(found.missing), stored, found.retries, found.stream, version)


def _nobody() -> None:
    """Nobody waits for a batch yet."""


def _any_number(tickets: int) -> bool:
    """Nothing but the admission rule bounds what is admitted."""
    return True
