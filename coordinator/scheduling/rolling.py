"""The rolling scheduler: which groups are admitted, which batch is taken, what is replaced.

Invariants:

- admission: groups in flight, buffered or taken <= (1 + alpha) * B + slack, where B is the batch in groups. A group
  lost for whatever reason frees its place at once, a batch frees its places when engines serve the version that came
  of it: what is admitted then begins under that version, so that with no overtaking nothing is ever stale. (Were the
  places free as soon as the batch is taken, their successors would begin one version too early: trained alpha + 1
  batches later, they would be alpha + 1 versions old.)
- a batch holds only groups whose version (their oldest member's) is >= n - alpha: stale ones are evicted first;
- a lost member is run again while its group may still be trained on (at most ``MEMBER_RETRIES`` times a group), else
  the whole group is evicted and a fresh one takes its place;
- alpha = 0: what still runs when a batch is taken is cut, no straggler is carried over, and nothing is admitted before
  the new version is served. The rest is the same rule: B groups are taken, and no place is free.

It decides and records; messages are the coordinator's business (``to_start``, ``to_stop``, ``to_discard`` collect what
there is to say). Nothing here reads a clock or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from actors.env.messages import Outcome, Ticket
from actors.env.protocol import training_task
from coordinator.scheduling.groups import Group, GroupState
from coordinator.scheduling.ledger import Balance, Ledger

MEMBER_RETRIES = 3


class Rules(msgspec.Struct, frozen=True):
    """What the job says about admission."""

    groups_per_step: int
    group_size: int
    alpha: int
    redundant_groups: int
    temperature: float
    seed: int

    @property
    def capacity(self) -> int:
        """Groups that may be in flight or buffered."""
        return (1 + self.alpha) * self.groups_per_step + self.redundant_groups


class Taken(msgspec.Struct, frozen=True):
    """A batch: whole groups, oldest first."""

    groups: list[list[str]]
    outcomes: list[Outcome]


class SchedulerState(msgspec.Struct, frozen=True):
    """What a checkpoint keeps of the scheduler: the data order and the buffer."""

    next_group: int
    next_ticket: int
    groups: list[GroupState]
    balance: Balance


class RollingScheduler:
    """See the module docstring."""

    def __init__(self, rules: Rules, ledger: Ledger) -> None:
        self.rules = rules
        self.ledger = ledger
        self.version = 0
        self.to_start: list[Ticket] = []
        self.to_stop: list[tuple[str, str]] = []
        self.to_discard: list[str] = []
        self._changed: Callable[[], None] = _nobody
        self._groups: dict[int, Group] = {}
        self._group_of: dict[str, int] = {}
        self._open = False
        self._training = 0  # groups of the batch that is trained on now
        self._unserved: dict[int, int] = {}  # version -> groups it was trained on, until engines serve it
        self._next_group = 0
        self._next_ticket = 0

    def on_change(self, changed: Callable[[], None]) -> None:
        """Whom to tell when a batch may have become ready."""
        self._changed = changed

    # ---- admission -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Let groups in, up to the bound, from now on."""
        self._open = True
        self._admit()

    def close(self) -> None:
        """Let no new group in; members of admitted ones may still be run again."""
        self._open = False

    def set_rules(self, rules: Rules) -> None:
        """A changed alpha or slack, from now on."""
        self.rules = rules
        self._evict_stale()
        self._admit()

    def _admit(self) -> None:
        while self._open and self._places() > 0:
            index = self._next_group
            self._next_group += 1
            self._add_group(index, training_task(index))
        self._changed()

    def _places(self) -> int:
        """Groups that may be admitted now."""
        on_their_way = self._training + sum(self._unserved.values())
        if self.rules.alpha == 0 and on_their_way:
            return 0
        return self.rules.capacity - len(self._groups) - on_their_way

    def _add_group(
        self, index: int, task: int, stored: dict[str, Outcome] | None = None, members: int | None = None
    ) -> None:
        group = Group(index, task, set(), stored if stored is not None else {})
        self._groups[index] = group
        for _ in range(self.rules.group_size if members is None else members):
            self._add_member(group)

    def _add_member(self, group: Group) -> None:
        ticket = self._ticket(group)
        self.ledger.admit(ticket)
        group.missing.add(ticket.id)
        self._group_of[ticket.id] = group.index
        self.to_start.append(ticket)

    def _ticket(self, group: Group) -> Ticket:
        number = self._next_ticket
        self._next_ticket += 1
        seed = int(np.random.default_rng([self.rules.seed, number]).integers(2**31))
        return Ticket(f"t{number}", group.index, group.task, "train", self.rules.temperature, seed)

    # ---- what comes back -----------------------------------------------------------------------------------------

    def stored(self, outcome: Outcome) -> None:
        """A trajectory is durably stored."""
        group = self._group(outcome.ticket)
        if group is None:  # evicted while it was on its way
            self.to_discard.append(outcome.ticket)
            return
        self.ledger.buffer(outcome)
        group.missing.discard(outcome.ticket)
        group.stored[outcome.ticket] = outcome
        if group.version < self.version - self.rules.alpha:
            self._evict_group(group, "stale")
        self._admit()

    def lost(self, outcome: Outcome) -> None:
        """A trajectory ended without a result."""
        group = self._group(outcome.ticket)
        if group is None:
            return
        self.ledger.lose(outcome.ticket, outcome.reason)
        group.missing.discard(outcome.ticket)
        del self._group_of[outcome.ticket]
        group.retries += 1
        if outcome.reason == "stale" or group.retries > MEMBER_RETRIES:
            self._evict_group(group, outcome.reason)
        else:
            self._add_member(group)
        self._admit()

    def _group(self, ticket: str) -> Group | None:
        index = self._group_of.get(ticket)
        return None if index is None else self._groups[index]

    # ---- batches -------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a batch can be taken now."""
        self._evict_stale()
        return len(self._complete()) >= self.rules.groups_per_step

    @property
    def complete_groups(self) -> int:
        """Groups of which every member is stored."""
        return len(self._complete())

    def _complete(self) -> list[Group]:
        groups = [group for group in self._groups.values() if group.complete]
        return sorted(groups, key=lambda group: (group.version, group.index))

    def take(self) -> Taken:
        """The oldest complete groups, B of them; call only when ``ready``. At alpha = 0 the rest is cut."""
        groups = self._complete()[: self.rules.groups_per_step]
        if len(groups) < self.rules.groups_per_step:
            raise RuntimeError(f"a batch needs {self.rules.groups_per_step} complete groups, there are {len(groups)}")
        for group in groups:
            self.ledger.take(list(group.stored))
            self._remove(group)
        self._training = len(groups)
        if self.rules.alpha == 0:
            for group in list(self._groups.values()):
                self._evict_group(group, "straggler")
        self._admit()
        return Taken(
            [list(group.stored) for group in groups],
            [outcome for group in groups for outcome in group.stored.values()],
        )

    def trained(self, taken: Taken, version: int) -> None:
        """The step on a batch is done, and the learner is at ``version``."""
        self.ledger.train([ticket for group in taken.groups for ticket in group])
        self.version = version
        self._unserved[version], self._training = self._training, 0
        self._evict_stale()
        self._admit()

    def served(self, version: int) -> None:
        """Engines serve ``version`` from now on: the places of what it was trained on are free."""
        self._unserved = {unserved: groups for unserved, groups in self._unserved.items() if unserved > version}
        self._admit()

    def put_back(self, taken: Taken) -> None:
        """The step on a batch did not happen: its groups are buffered again."""
        self._training = 0
        outcomes = {outcome.ticket: outcome for outcome in taken.outcomes}
        for tickets in taken.groups:
            self.ledger.put_back(tickets)
            ticket = self.ledger.entry(tickets[0]).ticket
            stored = {id_: outcomes[id_] for id_ in tickets}
            self._groups[ticket.group] = Group(ticket.group, ticket.task, set(), stored)
            self._group_of |= dict.fromkeys(tickets, ticket.group)

    def _evict_stale(self) -> None:
        for group in list(self._groups.values()):
            if group.stored and group.version < self.version - self.rules.alpha:
                self._evict_group(group, "stale")

    def _evict_group(self, group: Group, reason: str) -> None:
        for ticket in list(group.stored):
            self.ledger.evict(ticket, reason)
            self.to_discard.append(ticket)
        for ticket in sorted(group.missing):
            self.ledger.evict(ticket, reason)
            self.to_stop.append((ticket, reason))
        waiting = group.missing
        self.to_start = [ticket for ticket in self.to_start if ticket.id not in waiting]
        self._remove(group)

    def _remove(self, group: Group) -> None:
        del self._groups[group.index]
        for ticket in group.tickets:
            self._group_of.pop(ticket, None)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> SchedulerState:
        """Enough to go on from: the order of the data and the buffered groups."""
        groups = [
            GroupState(group.index, group.task, dict(group.stored), len(group.missing))
            for group in self._groups.values()
        ]
        return SchedulerState(self._next_group, self._next_ticket, groups, self.ledger.balance())

    def restore(self, state: SchedulerState, version: int, held: Iterable[str]) -> None:
        """Take up where ``state`` left off; members whose bytes are not ``held`` are run again. To be called on a
        fresh scheduler."""
        present = set(held)
        self.version = version
        self._next_group, self._next_ticket = state.next_group, state.next_ticket
        buffered = {
            ticket: (Ticket(ticket, saved.index, saved.task, "train", self.rules.temperature, 0), outcome)
            for saved in state.groups
            for ticket, outcome in saved.stored.items()
            if ticket in present
        }
        self.ledger.restore(state.balance, buffered)
        for saved in state.groups:
            stored = {ticket: outcome for ticket, outcome in saved.stored.items() if ticket in present}
            self._group_of |= dict.fromkeys(stored, saved.index)
            self._add_group(saved.index, saved.task, stored, saved.rerun + len(saved.stored) - len(stored))
        self._evict_stale()

    def counts(self) -> tuple[int, int]:
        """Trajectories in flight and buffered."""
        missing = sum(len(group.missing) for group in self._groups.values())
        return missing, sum(len(group.stored) for group in self._groups.values())


def _nobody() -> None:
    """Nobody waits for a batch yet."""
