"""Conservation and the admission rules under random sequences of everything that can happen to a scheduler.

The model keeps its own books, from the messages alone that the scheduler gives out (start, stop, discard).
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from actors.env.messages import Outcome, Ticket
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.rolling import RollingScheduler, SchedulerState
from coordinator.scheduling.succession import found_in
from tests.scheduling.support import Written, lost, rules, started, stored
from tests.support.audit import audited

REASONS = st.sampled_from(["env_failed", "env_timeout", "stale", "engine_failed"])
SIZE = 2


class Saved(msgspec.Struct):
    """A checkpoint and what the model knows of its moment."""

    state: bytes
    version: int
    held: dict[str, Ticket]
    trained: int
    mark: int


class SchedulerMachine(RuleBasedStateMachine):
    """One run; ``running`` maps a ticket to the version that it began under, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = Written()
        self.made = RollingScheduler(rules(), Ledger(self.journal))
        self.tickets: dict[str, Ticket] = {}
        self.running: dict[str, int | None] = {}
        self.buffered: dict[str, int] = {}
        self.taken: list[str] = []
        self.gone: list[str] = []  # evicted ones, of which reports may still arrive
        self.trained = 0
        self.served = 0
        self.next_group = 0
        self.rerun_groups: set[int] = set()  # of a checkpoint: begun before, so not new
        self.saved: Saved | None = None

    # ---- what the coordinator does after every call ----------------------------------------------------------------

    def follow(self, *, may_admit: bool = True) -> None:
        """Take note of the scheduler's messages; check what they may say."""
        evicted = {id_ for id_, _ in self.made.to_stop}
        discarded = set(self.made.to_discard)
        self.made.to_stop, self.made.to_discard = [], []
        for id_ in evicted:
            del self.running[id_]
        for id_ in discarded & self.buffered.keys():
            del self.buffered[id_]
        self.gone += [*evicted, *discarded]
        new = started(self.made)
        groups = {ticket.group for ticket in new} - {self.tickets[id_].group for id_ in self.live()}
        fresh = sorted(groups - self.rerun_groups)
        assert fresh == list(range(self.next_group, self.next_group + len(fresh)))  # each task once, in order
        assert may_admit or not fresh
        self.next_group += len(fresh)
        for ticket in new:
            assert ticket.id not in self.tickets
            self.tickets[ticket.id] = ticket
            self.running[ticket.id] = None
        if fresh:
            waiting = len({self.tickets[id_].group for id_ in self.live() - set(self.taken)})
            batches = bool(self.taken)
            assert waiting + batches * self.made.rules.groups_per_step <= self.made.rules.capacity
            assert self.made.rules.alpha > 0 or batches == 0

    def live(self) -> set[str]:
        return {*self.running, *self.buffered, *self.taken}

    # ---- what happens ----------------------------------------------------------------------------------------------

    @initialize(alpha=st.integers(0, 2), groups=st.integers(1, 2), redundant=st.integers(0, 1))
    def begin_run(self, alpha: int, groups: int, redundant: int) -> None:
        self.made = RollingScheduler(rules(alpha, groups=groups, size=SIZE, redundant=redundant), Ledger(self.journal))
        self.began_with = self.made.rules
        self.made.open()
        self.follow()

    def begun_or_may(self) -> list[str]:
        """An engine keeps a ticket's first turn until it has the version that it is for."""
        return sorted(
            id_
            for id_, began in self.running.items()
            if began is not None or self.tickets[id_].from_version <= self.served
        )

    @precondition(lambda self: self.begun_or_may())
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(self.begun_or_may()))
        if self.running[id_] is None:
            self.running[id_] = self.served

    @precondition(lambda self: self.begun_or_may())
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(self.begun_or_may()))
        began = self.running.pop(id_)
        version = self.served if began is None else began
        self.buffered[id_] = version
        self.made.stored(stored(id_, version))
        self.follow()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reason=REASONS)
    def lose(self, data: st.DataObject, reason: str) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[id_]
        self.rerun_groups = {self.tickets[id_].group}
        self.made.lost(lost(id_, reason))
        self.follow()
        self.rerun_groups = set()

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), was_stored=st.booleans())
    def late_report(self, data: st.DataObject, was_stored: bool) -> None:
        id_ = self.gone.pop(data.draw(st.integers(0, len(self.gone) - 1)))
        self.made.stored(stored(id_)) if was_stored else self.made.lost(lost(id_))
        assert self.made.to_discard == [id_] * was_stored
        self.made.to_discard = []
        self.follow(may_admit=False)

    @precondition(lambda self: self.buffered or self.taken)
    @rule(data=st.data())
    def repeated_report(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted({*self.buffered, *self.taken})))
        self.made.stored(stored(id_, self.made.version))
        assert self.made.to_discard == []
        self.follow(may_admit=False)

    @precondition(lambda self: self.made.ready())
    @rule()
    def take(self) -> None:
        taken = self.made.take()
        assert len(taken.groups) == self.made.rules.groups_per_step
        assert [outcome.ticket for outcome in taken.outcomes] == [id_ for group in taken.groups for id_ in group]
        for group in taken.groups:
            assert len(group) == SIZE
            assert len({self.tickets[id_].group for id_ in group}) == 1
        self.check_fresh(taken.outcomes)
        self.taken = [outcome.ticket for outcome in taken.outcomes]
        self.versions_taken = {id_: self.buffered.pop(id_) for id_ in self.taken}
        straggled = self.made.rules.alpha == 0
        self.follow(may_admit=not straggled)
        assert not straggled or self.live() == set(self.taken)  # none is carried over

    def check_fresh(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            assert outcome.initiating_version == self.buffered[outcome.ticket]
            assert outcome.initiating_version >= self.made.version - self.made.rules.alpha

    @precondition(lambda self: self.taken)
    @rule()
    def train(self) -> None:
        self.trained += len(self.taken)
        self.taken = []
        self.made.trained(self.made.version + 1)
        self.follow()

    @precondition(lambda self: self.taken)
    @rule()
    def put_back(self) -> None:
        self.buffered |= self.versions_taken
        self.taken = []
        self.made.put_back()
        self.follow()

    @precondition(lambda self: self.served < self.made.version)
    @rule()
    def serve(self) -> None:
        self.served += 1

    @rule(alpha=st.integers(0, 3))
    def set_alpha(self, alpha: int) -> None:
        self.made.set_rules(msgspec.structs.replace(self.made.rules, alpha=alpha))
        self.follow()

    @rule()
    def pause(self) -> None:
        self.made.close()
        self.made.set_rules(self.made.rules)
        self.follow(may_admit=False)

    @rule()
    def unpause(self) -> None:
        self.made.open()
        self.follow()

    @rule()
    def checkpoint(self) -> None:
        state = msgspec.json.encode(self.made.state())
        held = {id_: self.tickets[id_] for id_ in (*self.buffered, *self.taken)}
        self.saved = Saved(state, self.made.version, held, self.trained, len(self.journal.events))

    @precondition(lambda self: self.saved is not None)
    @rule(data=st.data())
    def crash_and_resume(self, data: st.DataObject) -> None:
        assert self.saved is not None
        saved = self.saved
        state = msgspec.json.decode(saved.state, type=SchedulerState)
        held = set(data.draw(st.lists(st.sampled_from(sorted(saved.held)), unique=True))) if saved.held else set()
        acknowledged = [*self.buffered, *self.taken]
        since = self.journal.events[saved.mark :]
        self.began_with = self.made.rules
        self.made = RollingScheduler(self.made.rules, Ledger(self.journal))
        self.made.restore(state, saved.version, [*held, "foreign"], since=since, acknowledged=acknowledged)
        assert "foreign" in self.made.to_discard
        discarded = set(self.made.to_discard)
        self.made.to_discard = []
        assert self.made.to_start == []
        self.buffered = {
            id_: outcome.initiating_version
            for group in state.groups
            for id_, outcome in group.stored.items()
            if id_ in held - discarded
        }
        self.running, self.taken, self.gone = {}, [], []
        self.tickets |= {id_: saved.held[id_] for id_ in self.buffered}  # no name is ever given twice
        self.trained, self.served = saved.trained, saved.version
        self.next_group = state.next_group
        self.rerun_groups = {group.index for group in state.groups}
        self.made.open()
        self.follow()
        self.rerun_groups = set()

    @rule()
    def another_process_leads_on(self) -> None:
        """It has the journal, what env hosts run, what the trainer's store has and which batch it works on."""
        order = [self.taken[first : first + SIZE] for first in range(0, len(self.taken), SIZE)]
        versions = self.buffered | (self.versions_taken if self.taken else {})
        outcomes = {id_: stored(id_, version) for id_, version in versions.items()}
        was_open, rules_now, version = self.made.is_open, self.made.rules, self.made.version
        self.made = RollingScheduler(self.began_with, Ledger(self.journal))
        found = found_in(self.journal.events)
        assert found.version == version
        self.made.inherit(found, outcomes, running=set(self.running), epoch=2)
        if order:
            retaken = self.made.retake(order)
            assert [outcome.ticket for outcome in retaken.outcomes] == self.taken
        assert self.made.rules == rules_now
        assert self.made.to_start == []
        assert self.made.to_stop == []
        if was_open:
            self.made.open()
        self.follow()

    # ---- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def everything_is_accounted_for(self) -> None:
        balance = self.made.ledger.balance()
        assert balance.holds
        assert balance.in_flight == len(self.running)
        assert balance.buffered == len(self.buffered)
        assert balance.taken == len(self.taken)
        assert balance.trained == self.trained

    def teardown(self) -> None:
        """The journal tells the same story, of all sittings, to somebody who knows nothing else."""
        audit = audited(msgspec.to_builtins(event) for event in self.journal.events)
        balance = self.made.ledger.balance()
        assert len(audit.state) == balance.admitted
        assert len(audit.trained) == balance.trained
        assert +audit.lost == balance.lost
        assert +audit.evicted == balance.evicted

    @invariant()
    def groups_are_whole(self) -> None:
        sizes: dict[int, int] = {}
        for id_ in self.live():
            sizes[self.tickets[id_].group] = sizes.get(self.tickets[id_].group, 0) + 1
        assert set(sizes.values()) <= {SIZE}

    @invariant()
    def nothing_stale_is_kept(self) -> None:
        oldest = min(self.buffered.values(), default=self.made.version)
        assert oldest >= self.made.version - self.made.rules.alpha


def test_everything_adds_up_whatever_happens() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=_settings(examples=80, steps=50))


@pytest.mark.deep
def test_everything_adds_up_in_long_runs_too() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=_settings(examples=600, steps=150))


def _settings(*, examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
