"""The rolling scheduler: what is admitted, taken, replaced and resumed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from actors.env.messages import Outcome, Ticket
from coordinator.scheduling.journal import Event
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.rolling import MEMBER_RETRIES, REPLACED_AT_MOST, RollingScheduler, SchedulerState
from tests.scheduling.support import Written, lost, rules, scheduler, started, store_all, stored


def groups_of(tickets: list[Ticket]) -> list[int]:
    return sorted({ticket.group for ticket in tickets})


# ---- admission -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "redundant", "capacity"), [(0, 0, 2), (1, 0, 4), (3, 0, 8), (0, 3, 5), (2, 1, 7)])
def test_one_plus_alpha_batches_and_the_slack_are_admitted(alpha: int, redundant: int, capacity: int) -> None:
    tickets = started(scheduler(alpha, redundant=redundant))
    assert groups_of(tickets) == list(range(capacity))
    assert len(tickets) == 2 * capacity


def test_nothing_is_admitted_before_it_opens_or_after_it_closes() -> None:
    made = RollingScheduler(rules(alpha=0), Ledger())
    assert made.to_start == []
    made.open()
    store_all(made, started(made))
    made.take()
    made.close()
    made.trained(1)
    assert made.to_start == []
    made.open()
    assert groups_of(started(made)) == [2, 3]


def test_tickets_are_unique_and_every_trajectory_has_a_seed_of_its_own() -> None:
    tickets = started(scheduler(alpha=4, groups=4, size=8))
    assert len({ticket.id for ticket in tickets}) == len({ticket.seed for ticket in tickets}) == 160


def test_a_ticket_that_the_journal_could_not_take_leaves_no_gap_in_the_names() -> None:
    """On a resume the next name follows from the number of admissions in the journal."""

    class FullOnce(Written):
        full = True

        def write(self, events: Sequence[Event]) -> None:
            if self.full and self.events:
                self.full = False
                raise OSError("no space")
            super().write(events)

    made = RollingScheduler(rules(), Ledger(FullOnce()))
    with pytest.raises(OSError, match="no space"):
        made.open()
    made.set_rules(rules())
    assert [ticket.id for ticket in started(made)][:3] == ["t0", "t1", "t2"]


def test_the_same_seed_gives_the_same_tickets() -> None:
    assert started(scheduler()) == started(scheduler())


def test_members_of_a_group_get_the_task_of_their_group() -> None:
    tickets = started(scheduler())
    assert {(ticket.group, ticket.task) for ticket in tickets} == {(0, 0), (1, 1), (2, 2), (3, 3)}


def test_a_batch_frees_its_places_when_it_is_trained_on_and_what_follows_begins_under_its_version() -> None:
    made = scheduler(alpha=1)
    first = started(made)
    assert {ticket.from_version for ticket in first} == {0}
    store_all(made, first)
    made.take()
    assert made.to_start == []
    made.trained(1)
    fresh = started(made)
    assert groups_of(fresh) == [4, 5]
    assert {ticket.from_version for ticket in fresh} == {1}


def test_a_member_that_is_run_again_may_begin_under_the_version_of_its_groups_admission() -> None:
    made = scheduler(alpha=2)
    tickets = started(made)
    store_all(made, tickets[:-1])
    made.take()
    made.trained(1)
    started(made)
    made.lost(lost(tickets[-1].id))
    [again] = started(made)
    assert (again.group, again.from_version) == (tickets[-1].group, 0)


def test_at_alpha_zero_nothing_is_admitted_until_the_batch_is_trained_on_not_even_redundant_groups() -> None:
    made = scheduler(alpha=0, redundant=2)
    tickets = started(made)
    store_all(made, [ticket for ticket in tickets if ticket.group in (1, 2)])
    made.take()
    assert made.to_start == []
    made.trained(1)
    assert groups_of(started(made)) == [4, 5, 6, 7]


def test_at_alpha_zero_stragglers_are_cut_when_the_batch_is_taken() -> None:
    made = scheduler(alpha=0, redundant=1)
    tickets = started(made)
    straggler = [ticket for ticket in tickets if ticket.group == 1]
    store_all(made, [ticket for ticket in tickets if ticket.group != 1] + straggler[:1])
    taken = made.take()
    assert [made.ledger.entry(group[0]).ticket.group for group in taken.groups] == [0, 2]
    assert made.to_stop == [(straggler[1].id, "straggler")]
    assert made.to_discard == [straggler[0].id]
    assert made.ledger.balance().evicted == {"straggler": 2}
    assert made.counts() == (0, 0)


# ---- losses --------------------------------------------------------------------------------------------------------


def test_a_lost_member_runs_again_in_its_group() -> None:
    made = scheduler()
    first = started(made)[0]
    made.lost(lost(first.id))
    (again,) = started(made)
    assert (again.group, again.task) == (first.group, first.task)
    assert again.id != first.id
    assert made.ledger.balance().lost == {"env_failed": 1}


def test_a_group_that_keeps_losing_members_is_replaced_whole() -> None:
    made = scheduler()
    tickets = started(made)
    first, second = tickets[0], tickets[1]
    made.stored(stored(second.id))
    losing = first
    for _ in range(MEMBER_RETRIES):
        made.lost(lost(losing.id))
        (losing,) = started(made)
    made.lost(lost(losing.id, "env_timeout"))
    assert made.to_discard == [second.id]
    fresh = started(made)
    assert groups_of(fresh) == [4]
    assert len(fresh) == 2
    balance = made.ledger.balance()
    assert balance.lost == {"env_failed": MEMBER_RETRIES, "env_timeout": 1}
    assert balance.evicted == {"env_timeout": 1}
    assert balance.holds


def test_a_stale_member_takes_its_whole_group_with_it() -> None:
    made = scheduler()
    first, second, *_ = started(made)
    made.lost(lost(first.id, "stale"))
    assert made.to_stop == [(second.id, "stale")]
    assert groups_of(started(made)) == [4]


def test_a_run_does_not_starve_however_many_trajectories_are_lost() -> None:
    made = scheduler(alpha=0)
    chance = random.Random(3)
    tickets = started(made)
    for _ in range(2_000):
        if made.ready():
            return
        ticket = tickets.pop(chance.randrange(len(tickets)))
        reason = chance.choice(["env_failed", "env_timeout", "stale", "generation_timeout"])
        made.lost(lost(ticket.id, reason)) if chance.random() < 0.6 else made.stored(stored(ticket.id))
        stopped = {id_ for id_, _ in made.to_stop}
        tickets = [ticket for ticket in tickets if ticket.id not in stopped] + started(made)
    pytest.fail(f"no batch: {made.ledger.balance()}")


def scored(ticket: str, reward: float) -> Outcome:
    return msgspec.structs.replace(stored(ticket), reward=reward)


def test_groups_that_score_alike_are_replaced_and_counted_where_a_stream_is_sampled_dynamically() -> None:
    made = RollingScheduler(msgspec.structs.replace(rules(0), sampled_dynamically=frozenset({""})), Ledger())
    made.open()
    first, second, third, fourth = started(made)
    made.stored(scored(first.id, 1.0))
    made.stored(scored(second.id, 1.0))  # group 0 teaches nothing
    made.stored(scored(third.id, 1.0))
    made.stored(scored(fourth.id, 0.0))
    assert made.to_discard == [first.id, second.id]
    assert made.ledger.balance().evicted == {"alike": 2}
    again = started(made)
    assert groups_of(again) == [2]
    made.stored(scored(again[0].id, 0.0))
    made.stored(scored(again[1].id, 1.0))
    assert made.take().groups == [[third.id, fourth.id], [again[0].id, again[1].id]]


def test_a_policy_that_always_succeeds_still_gets_its_batches() -> None:
    made = RollingScheduler(msgspec.structs.replace(rules(0), sampled_dynamically=frozenset({""})), Ledger())
    made.open()
    for version in range(3):
        rounds = 0
        while not made.ready():
            store_all(made, started(made), version)
            rounds += 1
        assert rounds == 1 + REPLACED_AT_MOST
        made.take()
        made.trained(version + 1)
    assert made.ledger.balance().evicted == {"alike": 3 * REPLACED_AT_MOST * 2 * 2}


def test_what_was_never_sent_is_not_started_nor_stopped_once_its_group_is_evicted() -> None:
    made = scheduler(alpha=0, groups=1)
    first, second = started(made)
    for _ in range(MEMBER_RETRIES):
        made.lost(lost(first.id))
        (first,) = started(made)
    made.lost(lost(second.id))  # the group is replaced; its first member runs
    assert made.to_stop == [(first.id, "env_failed")]
    fresh = made.to_start[:]
    made.lost(lost(fresh[0].id, "stale"))  # the second one was not sent yet
    assert made.to_stop == [(first.id, "env_failed")]
    assert fresh[1] not in made.to_start


def test_what_arrives_of_an_evicted_group_is_discarded_or_ignored() -> None:
    made = scheduler()
    first, second, *_ = started(made)
    made.lost(lost(first.id, "stale"))
    before = made.ledger.balance()
    made.stored(stored(second.id))
    assert made.to_discard == [second.id]
    made.lost(lost(second.id, "stale"))
    assert made.ledger.balance() == before


def test_a_repeated_outcome_has_no_effect_buffered_or_taken() -> None:
    made = scheduler()
    tickets = started(made)
    store_all(made, tickets)
    for _ in range(2):
        before = made.ledger.balance()
        made.stored(stored(tickets[0].id))
        made.lost(lost(tickets[0].id))
        assert made.ledger.balance() == before
        assert made.to_discard == []
        if made.ready():
            made.take()


# ---- batches -------------------------------------------------------------------------------------------------------


def test_a_batch_takes_the_oldest_complete_groups_and_keeps_members_together() -> None:
    made = scheduler(alpha=1)
    tickets = started(made)
    of = {index: [ticket.id for ticket in tickets if ticket.group == index] for index in range(4)}
    for index, version in ((3, 0), (1, 0), (0, 0), (2, 0)):
        for id_ in of[index]:
            made.stored(stored(id_, version))
    taken = made.take()
    assert taken.groups == [of[0], of[1]]
    assert [outcome.ticket for outcome in taken.outcomes] == [*of[0], *of[1]]


def test_a_groups_version_is_that_of_its_oldest_member() -> None:
    made = scheduler(alpha=1, groups=1)
    early = started(made)
    store_all(made, early[:2])  # group 0, version 0
    made.stored(stored(early[2].id, 0))  # one member of group 1
    made.take()
    made.trained(1)
    made.stored(stored(early[3].id, 1))
    made.take()  # group 1 is of version 0, and 1 - alpha = 0: it may still be trained on
    made.trained(2)
    assert made.ledger.balance().evicted == {}
    late = started(made)
    made.stored(stored(late[0].id, 0))  # 2 - alpha = 1
    assert made.ledger.balance().evicted == {"stale": 2}


def test_stale_groups_are_evicted_and_replaced_as_soon_as_the_learner_has_moved_on() -> None:
    made = scheduler(alpha=0, groups=1, redundant=1)
    made.set_rules(rules(alpha=1, groups=1))
    tickets = started(made)
    store_all(made, tickets)  # two groups of version 0
    made.take()
    made.set_rules(rules(alpha=0, groups=1))
    assert made.ledger.balance().evicted == {}  # at version 0 it is fresh
    made.trained(1)
    assert made.ledger.balance().evicted == {"stale": 2}
    assert sorted(made.to_discard) == sorted(ticket.id for ticket in tickets if ticket.group == 1)


def test_no_batch_is_taken_while_another_is_trained_on() -> None:
    made = scheduler(alpha=1)
    store_all(made, started(made))
    made.take()
    assert not made.ready()
    with pytest.raises(RuntimeError, match="2 are complete, and 2 are being trained on"):
        made.take()


def test_an_incomplete_batch_is_not_taken() -> None:
    made = scheduler(alpha=1)
    store_all(made, started(made)[:3])
    assert not made.ready()
    with pytest.raises(RuntimeError, match="a batch of 2 groups cannot be taken: 1 are complete"):
        made.take()


def test_one_batch_makes_one_version() -> None:
    made = scheduler(alpha=1)
    store_all(made, started(made))
    with pytest.raises(RuntimeError, match="batch of 0 groups"):
        made.trained(1)
    made.take()
    with pytest.raises(RuntimeError, match="version 2 cannot follow version 0"):
        made.trained(2)


def test_a_batch_whose_step_failed_is_buffered_again_and_can_be_taken_again() -> None:
    made = scheduler(alpha=1)
    told: list[bool] = []
    made.on_change(lambda: told.append(True))
    store_all(made, started(made))
    taken = made.take()
    told.clear()
    made.put_back()
    assert told
    assert made.ledger.balance().buffered == 8
    assert made.take() == taken


def test_a_batch_put_back_under_a_lowered_bound_is_evicted_if_it_is_too_old() -> None:
    made = scheduler(alpha=1, groups=1)
    tickets = started(made)
    store_all(made, tickets[:2])
    made.take()
    made.trained(1)
    store_all(made, tickets[2:])
    made.take()  # version 0 at learner version 1
    made.set_rules(rules(alpha=0, groups=1))
    made.put_back()
    assert made.ledger.balance().evicted == {"stale": 2}


@pytest.mark.parametrize("alpha", range(5))
@pytest.mark.parametrize("seed", range(8))
def test_with_no_overtaking_nothing_is_ever_stale(alpha: int, seed: int) -> None:
    """Groups begin and end in the order of their admission, none before engines have the version that it is for;
    everything else happens in any order. (By hand: at the moment of admission under version v at most (1 + alpha) B - 1
    groups and batches are ahead, so it is in the batch that is taken at version v + alpha at the latest.)"""
    chance = random.Random(seed)
    made = scheduler(alpha, groups=2, size=2)
    waiting, running = started(made), list[tuple[Ticket, int]]()
    served, published, ages = 0, list[int](), set[int]()
    batch: list[Outcome] | None = None
    while made.version < 40:
        may_begin = bool(waiting) and waiting[0].from_version <= served
        moves = ["begin"] * may_begin * 3 + ["end"] * bool(running) * 3 + ["serve"] * bool(published)
        moves += ["take"] * made.ready() + ["train"] * (batch is not None)
        move = chance.choice(moves)
        if move == "begin":
            running.append((waiting.pop(0), served))
        elif move == "end":
            ticket, version = running.pop(0)
            made.stored(stored(ticket.id, version))
        elif move == "take":
            batch = made.take().outcomes
            ages |= {made.version - outcome.initiating_version for outcome in batch}
        elif move == "train":
            made.trained(made.version + 1)
            published.append(made.version)
            batch = None
        else:
            served = published.pop(0)
        waiting += started(made)
    assert made.ledger.balance().evicted == {}
    assert ages <= set(range(alpha + 1))
    assert made.to_stop == []


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def through_json(state: SchedulerState) -> SchedulerState:
    """As a checkpoint keeps it."""
    return msgspec.json.decode(msgspec.json.encode(state), type=SchedulerState)


def test_the_order_of_the_data_goes_on_after_a_restart() -> None:
    made = scheduler(alpha=1)
    tickets = started(made)
    store_all(made, tickets)
    made.take()
    made.close()
    made.trained(1)
    state = through_json(made.state())

    resumed = RollingScheduler(rules(alpha=1), Ledger())
    resumed.restore(state, 1, [ticket.id for ticket in tickets])
    assert resumed.version == 1
    assert resumed.ready()
    resumed.open()
    fresh = started(resumed)
    made.open()
    assert fresh == started(made)  # what the unbroken run admits
    assert groups_of(fresh) == [4, 5]


def test_members_that_ran_run_again_once_the_resumed_run_opens() -> None:
    made = scheduler(alpha=0)
    first, *others = started(made)
    made.stored(stored(first.id))
    state = through_json(made.state())

    resumed = RollingScheduler(rules(alpha=0), Ledger())
    resumed.restore(state, 0, [first.id])
    assert resumed.to_start == []  # engines are not ready yet
    resumed.open()
    again = started(resumed)
    assert sorted(ticket.group for ticket in again) == [0, 1, 1]
    assert not {ticket.id for ticket in again} & {ticket.id for ticket in others}
    balance = resumed.ledger.balance()
    assert balance.lost == {"interrupted": 3}
    assert (balance.admitted, balance.buffered, balance.in_flight) == (7, 1, 3)
    assert balance.holds


def test_a_stored_member_whose_bytes_are_gone_runs_again() -> None:
    made = scheduler(alpha=0)
    tickets = started(made)
    store_all(made, tickets)
    resumed = RollingScheduler(rules(alpha=0), Ledger())
    resumed.restore(through_json(made.state()), 0, [ticket.id for ticket in tickets[1:]])
    resumed.open()
    (again,) = started(resumed)
    assert again.group == tickets[0].group
    assert resumed.ledger.balance().lost == {"interrupted": 1}


def test_bytes_that_the_checkpoint_does_not_account_for_are_discarded() -> None:
    made = scheduler(alpha=0)
    first = started(made)[0]
    made.stored(stored(first.id))
    resumed = RollingScheduler(rules(alpha=0), Ledger())
    resumed.restore(through_json(made.state()), 0, [first.id, "t99", "t3"])
    assert resumed.to_discard == ["t3", "t99"]


def test_a_batch_that_is_trained_on_when_the_state_is_saved_is_not_lost() -> None:
    made = scheduler(alpha=0)
    tickets = started(made)
    store_all(made, tickets)
    taken = made.take()
    resumed = RollingScheduler(rules(alpha=0), Ledger())
    resumed.restore(through_json(made.state()), 0, [ticket.id for ticket in tickets])
    assert resumed.ledger.balance().lost == {}
    assert resumed.take() == taken


def test_groups_that_a_lower_alpha_makes_stale_are_evicted_on_resuming() -> None:
    made = scheduler(alpha=1, groups=1)
    tickets = started(made)
    store_all(made, tickets)
    made.take()
    made.trained(1)
    resumed = RollingScheduler(rules(alpha=0, groups=1), Ledger())
    resumed.restore(through_json(made.state()), 1, [ticket.id for ticket in tickets[2:]])
    assert resumed.ledger.balance().evicted == {"stale": 2}
    resumed.open()
    assert groups_of(started(resumed)) == [2]


def test_members_of_a_group_that_is_stale_on_resuming_do_not_run_again() -> None:
    made = scheduler(alpha=1, groups=1)
    tickets = started(made)
    store_all(made, tickets[:3])
    made.take()
    made.trained(1)
    resumed = RollingScheduler(rules(alpha=0, groups=1), Ledger())
    resumed.restore(through_json(made.state()), 1, [tickets[2].id])
    assert resumed.ledger.balance().evicted == {"stale": 2}
    resumed.open()
    assert groups_of(started(resumed)) == [2]
