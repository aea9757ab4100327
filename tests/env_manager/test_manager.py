"""EnvManagers among scripted peers: every ticket ends in exactly one outcome, whatever fails."""

from __future__ import annotations

import asyncio
import random

import pytest

from actors.env import manager as manager_module
from actors.env.messages import Followed, FollowTrajectory, LearnerVersion, Stop
from actors.env.recorder import check_trajectory
from actors.env.urgency import is_urgent, turns_left
from tests.env_manager.support import RIGHT, World, world
from tests.support.loops import run, settle, until


async def outcome_of(made: World, ticket: str) -> tuple[str, str]:
    """State and reason, once it has ended; checks that it has ended once."""
    await until(lambda: any(outcome.ticket == ticket for outcome in made.outcomes))
    await settle()
    (outcome,) = [outcome for outcome in made.outcomes if outcome.ticket == ticket]
    return outcome.state, outcome.reason


async def is_at_rest(made: World) -> None:
    """Nothing is left of any trajectory: environments closed, prefixes forgotten, places free."""
    await until(lambda: set(made.worker.closed) >= set(made.worker.steps))
    state = await made.describe()
    assert state.running == []


async def followed(made: World, ticket: str) -> list[Followed]:
    return [step async for step in made.node.stream(made.host, FollowTrajectory(ticket), timeout_s=10)]


# ---- a trajectory --------------------------------------------------------------------------------------------------


def test_a_trajectory_is_played_scored_and_stored() -> None:
    async def test() -> None:
        async with world() as made:
            made.start("t1")
            assert await outcome_of(made, "t1") == ("stored", "")
            (outcome,) = made.outcomes
            assert (outcome.reward, outcome.env_return, outcome.success) == (10.0, 1.0, True)
            assert (outcome.turns, outcome.sampled_tokens, outcome.initiating_version) == (3, 3, 0)
            trajectory = made.store.kept["t1"]
            check_trajectory(trajectory)
            (segment,) = trajectory.segments
            text = b"0>R1>R2>R"
            assert segment.tokens.tolist() == list(text)
            assert segment.loss_mask.tolist() == [int(byte == RIGHT) for byte in text]
            assert (trajectory.group, trajectory.task, trajectory.reward) == (1, 2, 10.0)
            assert made.worker.steps["t1"] == ["R", "R", "R"]
            assert made.proxy.ended == ["t1"]
            await is_at_rest(made)
            assert (await made.describe()).counters == {"stored": 1}

    run(test())


def test_who_follows_a_trajectory_hears_all_that_is_said_and_how_it_ends() -> None:
    async def test() -> None:
        async with world() as made:
            made.start("t1")
            steps = await followed(made, "t1")
            (outcome,) = made.outcomes
            assert [entry for step in steps for entry in step.said] == outcome.transcript
            assert [step.outcome for step in steps[:-1]] == [None] * (len(steps) - 1)
            assert steps[-1].outcome == outcome
            assert {"engine", "environment"} <= {step.now.state for step in steps}
            turns = [step.now.turns for step in steps]
            assert (turns, turns[-1]) == (sorted(turns), 3)

    run(test())


def test_without_a_ticket_the_next_trajectory_that_begins_is_followed() -> None:
    async def test() -> None:
        async with world() as made:
            following = asyncio.create_task(followed(made, ""))
            await settle()
            made.start("t7")
            steps = await following
            assert {step.now.ticket for step in steps} == {"t7"}
            assert steps[-1].outcome is not None

    run(test())


def test_who_would_follow_the_next_trajectory_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "BEGINS_WITHIN_S", 0.05)

    async def test() -> None:
        async with world() as made:
            with pytest.raises(ValueError, match=r"no trajectory has begun on \S+ within 0.05 s: the run is paused"):
                await followed(made, "")

    run(test())


def test_a_trajectory_that_does_not_run_cannot_be_followed() -> None:
    async def test() -> None:
        async with world() as made:
            with pytest.raises(ValueError, match="trajectory t9 does not run here"):
                await followed(made, "t9")

    run(test())


def test_every_turn_asks_with_all_tokens_before_it_and_a_seed_of_its_own() -> None:
    async def test() -> None:
        async with world() as made:
            made.start("t1")
            await outcome_of(made, "t1")
            requests = made.proxy.requests
            assert [request.request_id for request in requests] == ["t1/0", "t1/1", "t1/2"]
            assert [bytes(request.prompt.tolist()) for request in requests] == [b"0>", b"0>R1>", b"0>R1>R2>"]
            assert [request.seed for request in requests] == [100, 101, 102]
            assert {request.allowed_token_ids for request in requests} == {(ord("L"), ord("R"))}
            assert {request.max_tokens for request in requests} == {1}

    run(test())


def test_requests_of_the_last_turns_and_of_evaluations_are_urgent() -> None:
    async def test() -> None:
        async with world(max_turns=6) as made:
            made.start("t1")
            await outcome_of(made, "t1")
            assert [request.urgent for request in made.proxy.requests] == [False, False, True]  # 6, 5, 4 turns left
            made.start("e1", purpose="evaluate")
            await outcome_of(made, "e1")
            assert all(request.urgent for request in made.proxy.requests[3:])

    run(test())


@pytest.mark.parametrize(
    ("bound", "taken", "estimate", "left"), [(20, 0, None, 20), (20, 16, None, 4), (20, 3, 2, 2), (20, 18, 9, 2)]
)
def test_turns_left_are_the_fewer_of_the_bound_and_what_the_environment_says(
    bound: int, taken: int, estimate: int | None, left: int
) -> None:
    assert turns_left(bound, taken, estimate) == left
    assert is_urgent("train", left) == (left < 5)


def test_who_waits_elsewhere_is_told_of_places_that_are_free_only_where_somebody_waits() -> None:
    async def test() -> None:
        async with world() as made:
            made.reward.gate.clear()
            made.start("t1")
            await until(lambda: made.reward.scoring == ["t1"])
            made.start("t2", "t3", more=True)
            await until(lambda: made.coordinator.left == ["t2", "t3"])
            assert made.outcomes == []  # they are only being scored
            made.reward.gate.set()
            await outcome_of(made, "t1")
            assert made.coordinator.left == ["t2", "t3"]

    run(test())


def test_a_trajectory_ends_at_the_bound_of_turns() -> None:
    async def test() -> None:
        async with world(max_turns=2) as made:
            made.worker.length = 100
            made.start("t1")
            assert await outcome_of(made, "t1") == ("stored", "")
            assert made.outcomes[0].turns == 2
            assert made.outcomes[0].success is False
            assert bytes(made.store.kept["t1"].segments[0].tokens.tolist()) == b"0>R1>R"

    run(test())


def test_an_evaluation_is_neither_scored_nor_stored() -> None:
    async def test() -> None:
        async with world() as made:
            made.node.tell(made.host, LearnerVersion(50, 0))  # nor ever stale
            made.start("e1", purpose="evaluate")
            assert await outcome_of(made, "e1") == ("evaluated", "")
            assert (made.outcomes[0].reward, made.outcomes[0].success) == (1.0, True)
            assert (made.reward.scoring, made.store.storing) == ([], [])
            assert made.proxy.requests[0].temperature == 0.0

    run(test())


def test_a_repeated_start_has_no_effect() -> None:
    async def test() -> None:
        async with world() as made:
            made.start("t1", "t1")
            made.start("t1")
            assert await outcome_of(made, "t1") == ("stored", "")
            assert len(made.proxy.requests) == 3
            assert (await made.describe()).counters["repeated_starts"] == 2

    run(test())


# ---- places --------------------------------------------------------------------------------------------------------


def test_no_more_trajectories_run_than_there_are_places() -> None:
    async def test() -> None:
        async with world(concurrent=2) as made:
            made.worker.gate.clear()
            made.start("t1", "t2", "t3")
            await until(lambda: len(made.worker.waiting) == 2)
            await settle()
            assert await made.states() == {"t1": "environment", "t2": "environment", "t3": "place"}
            made.worker.gate.set()
            assert await outcome_of(made, "t3") == ("stored", "")

    run(test())


def test_the_place_is_free_before_the_trajectory_is_scored() -> None:
    async def test() -> None:
        async with world(concurrent=1) as made:
            made.reward.gate.clear()
            made.start("t1", "t2")
            await until(lambda: len(made.reward.scoring) == 2)  # the second one has played, though the first waits
            assert await made.states() == {"t1": "reward", "t2": "reward"}
            made.reward.gate.set()
            await outcome_of(made, "t1")
            await outcome_of(made, "t2")

    run(test())


# ---- failures ------------------------------------------------------------------------------------------------------

FAULTS = {
    "reset raises": "env_failed",
    "step raises": "env_failed",
    "reset hangs": "env_timeout",
    "step hangs": "env_timeout",
    "empty observation": "internal_error",
    "proxy is silent": "proxy_timeout",
    "engine fails": "engine_failed",
    "engine hangs": "generation_timeout",
    "engine aborts": "aborted",
    "reward raises": "reward_failed",
    "reward hangs": "reward_timeout",
    "reward is NaN": "reward_failed",
    "store raises": "store_failed",
    "store hangs": "store_failed",
}


SILENT = ("hangs", "silent")
"""Faults that only a deadline ends."""


def limit(fault: str, patch: pytest.MonkeyPatch) -> float:
    """A deadline for everything: short for a fault that it must end, else one that no busy machine will reach."""
    seconds = 0.4 if fault.endswith(SILENT) else 15.0
    patch.setattr(manager_module, "COMMAND_TIMEOUT_S", seconds)
    patch.setattr(manager_module, "STORE_TIMEOUT_S", seconds)
    return seconds


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_own_trajectory_alone_and_is_counted_under_its_reason(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = limit(fault, monkeypatch)

    async def test() -> None:
        async with world(step_timeout_s=seconds, turn_timeout_s=seconds, reward_timeout_s=seconds) as made:
            made.start("bad", faults={"bad": fault})
            assert await outcome_of(made, "bad") == ("lost", FAULTS[fault])
            made.start("good")
            assert await outcome_of(made, "good") == ("stored", "")
            await is_at_rest(made)
            assert (await made.describe()).counters[f"lost_{FAULTS[fault]}"] == 1
            assert made.proxy.ended == ["bad", "good"]

    run(test())


@pytest.mark.parametrize("fault", ["proxy is silent", "engine hangs"])
def test_what_nobody_waits_for_any_more_is_aborted(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = limit(fault, monkeypatch)

    async def test() -> None:
        async with world(turn_timeout_s=seconds) as made:
            made.start("t1", faults={"t1": fault})
            await outcome_of(made, "t1")
            assert made.proxy.aborted == ["t1/0"]

    run(test())


def test_what_was_perhaps_stored_but_counted_lost_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    limit("store hangs", monkeypatch)

    async def test() -> None:
        async with world() as made:
            made.start("t1", faults={"t1": "store hangs"})
            assert await outcome_of(made, "t1") == ("lost", "store_failed")
            await until(lambda: made.store.discarded == ["t1"])

    run(test())


def test_a_hanging_environment_costs_its_worker() -> None:
    async def test() -> None:
        async with world(step_timeout_s=0.1) as made:
            made.start("t1", faults={"t1": "reset hangs"})
            assert await outcome_of(made, "t1") == ("lost", "env_timeout")
            assert made.pool.killed == ["worker-0"]

    run(test())


def test_a_worker_that_is_slow_but_answers_others_is_not_killed() -> None:
    async def test() -> None:
        async with world(step_timeout_s=0.8, max_turns=1_000_000) as made:
            made.worker.length = 1_000_000
            made.start("busy")
            await until(lambda: made.worker.steps.get("busy"))
            made.start("t1", faults={"t1": "step hangs"})
            assert await outcome_of(made, "t1") == ("lost", "env_timeout")
            assert made.pool.killed == []
            made.node.tell(made.host, Stop(["busy"], "enough"))
            await outcome_of(made, "busy")

    run(test())


def test_a_worker_that_dies_costs_what_it_was_playing_at_once() -> None:
    async def test() -> None:
        async with world() as made:
            made.worker.gate.clear()
            made.start("t1", "t2")
            await until(lambda: len(made.worker.waiting) == 2)
            made.node.lose(made.worker_node.address, "killed by SIGSEGV")
            assert await outcome_of(made, "t1") == ("lost", "env_worker_died")
            assert await outcome_of(made, "t2") == ("lost", "env_worker_died")

    run(test())


def test_a_worker_that_does_not_come_up_is_a_loss_with_a_reason() -> None:
    async def test() -> None:
        async with world() as made:
            made.pool.not_ready = "worker worker-0 was not ready within 120 s"
            made.start("t1")
            assert await outcome_of(made, "t1") == ("lost", "env_worker_died")
            made.pool.not_ready = ""
            made.start("t2")
            assert await outcome_of(made, "t2") == ("stored", "")

    run(test())


def test_a_late_completion_is_counted_and_ignored() -> None:
    async def test() -> None:
        async with world(turn_timeout_s=0.1) as made:
            made.start("t1", faults={"t1": "engine hangs"})
            await outcome_of(made, "t1")  # its abort was answered when nobody waited any more
            await settle()
            assert (await made.describe()).counters == {"late_completions": 1, "lost_generation_timeout": 1}

    run(test())


def test_every_ticket_has_one_outcome_when_everything_fails_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = limit("everything hangs", monkeypatch)

    async def test() -> None:
        chance = random.Random(5)
        tickets = [f"t{index}" for index in range(300)]
        faults = {ticket: chance.choice([*FAULTS, "", "", ""]) for ticket in tickets}
        async with world(
            concurrent=60, step_timeout_s=seconds, turn_timeout_s=seconds, reward_timeout_s=seconds
        ) as made:
            made.start(*tickets, faults=faults)
            stopped = chance.sample(tickets, 40)
            for ticket in stopped:
                await settle(chance.randrange(5))
                made.node.tell(made.host, Stop([ticket], "stopped"))
            await until(lambda: len(made.outcomes) >= len(tickets))
            await is_at_rest(made)
            assert sorted(outcome.ticket for outcome in made.outcomes) == sorted(tickets)
            late = {("lost", reason) for fault, reason in FAULTS.items() if fault.endswith(SILENT)}  # on a busy machine
            for outcome in made.outcomes:
                fault = faults[outcome.ticket]
                expected = {("lost", FAULTS[fault]) if fault else ("stored", "")} | late
                if outcome.ticket in stopped:
                    expected.add(("lost", "stopped"))
                assert (outcome.state, outcome.reason) in expected
            stored = {outcome.ticket for outcome in made.outcomes if outcome.state == "stored"}
            await until(lambda: made.store.kept.keys() - set(made.store.discarded) == stored)
            assert len(stored) > 20

    run(test())


# ---- stopping and staleness ----------------------------------------------------------------------------------------


def test_a_stop_right_behind_its_start_is_not_overlooked() -> None:
    async def test() -> None:
        async with world() as made:
            made.start("t1")
            made.node.tell(made.host, Stop(["t1"], "straggler"))
            assert await outcome_of(made, "t1") == ("lost", "straggler")
            assert made.proxy.requests == []

    run(test())


def test_what_waits_for_a_place_ends_at_once_when_it_is_stopped() -> None:
    async def test() -> None:
        async with world(concurrent=1) as made:
            made.worker.gate.clear()
            made.start("t1", "t2", "t3")
            await until(lambda: made.worker.waiting)
            made.node.tell(made.host, Stop(["t2"], "straggler"))
            assert await outcome_of(made, "t2") == ("lost", "straggler")
            assert made.worker.waiting == ["t1"]  # which still has the place
            made.worker.gate.set()
            assert await outcome_of(made, "t3") == ("stored", "")

    run(test())


def test_what_an_engine_generates_for_is_aborted_when_it_is_stopped() -> None:
    async def test() -> None:
        async with world() as made:
            made.proxy.holds = lambda request: True
            made.start("t1")
            await until(lambda: made.proxy.held)
            made.node.tell(made.host, Stop(["t1"], "straggler"))
            assert await outcome_of(made, "t1") == ("lost", "straggler")
            assert made.proxy.aborted == ["t1/0"]
            await is_at_rest(made)

    run(test())


def test_an_engine_that_dies_over_what_was_stopped_does_not_change_the_reason() -> None:
    async def test() -> None:
        async with world() as made:
            made.proxy.holds = lambda request: True
            made.start("t1", faults={"t1": "engine dies"})
            await until(lambda: made.proxy.held)
            made.node.tell(made.host, Stop(["t1"], "straggler"))
            assert await outcome_of(made, "t1") == ("lost", "straggler")
            assert (await made.describe()).counters == {"lost_straggler": 1}

    run(test())


def test_a_request_that_was_not_there_yet_when_it_was_aborted_is_aborted_again() -> None:
    async def test() -> None:
        async with world(turn_timeout_s=1_000.0) as made:
            made.proxy.holds = lambda request: True
            made.proxy.accepts.clear()
            made.start("t1")
            await until(lambda: made.proxy.requests)
            made.node.tell(made.host, Stop(["t1"], "straggler"))
            await until(lambda: made.proxy.aborted)
            made.proxy.accepts.set()
            assert await outcome_of(made, "t1") == ("lost", "straggler")
            assert made.proxy.aborted == ["t1/0", "t1/0"]

    run(test())


def test_what_its_environment_holds_up_stops_before_the_next_turn() -> None:
    async def test() -> None:
        async with world() as made:
            made.worker.gate.clear()
            made.start("t1")
            await until(lambda: made.worker.waiting)
            made.node.tell(made.host, Stop(["t1"], "straggler"))
            await settle()
            made.worker.gate.set()
            assert await outcome_of(made, "t1") == ("lost", "straggler")
            assert len(made.proxy.requests) == 1

    run(test())


def test_what_is_being_scored_is_not_stored_once_it_is_stopped() -> None:
    async def test() -> None:
        async with world() as made:
            made.reward.gate.clear()
            made.start("t1")
            await until(lambda: made.reward.scoring)
            made.node.tell(made.host, Stop(["t1"], "straggler"))
            await settle()
            made.reward.gate.set()
            assert await outcome_of(made, "t1") == ("lost", "straggler")
            assert made.store.storing == []

    run(test())


def test_what_is_being_stored_is_stored_though_it_is_stopped() -> None:
    async def test() -> None:
        async with world() as made:
            made.store.gate.clear()
            made.start("t1")
            await until(lambda: made.store.storing)
            made.node.tell(made.host, Stop(["t1"], "straggler"))
            await settle()
            made.store.gate.set()
            assert await outcome_of(made, "t1") == ("stored", "")

    run(test())


def test_stopping_what_has_ended_or_was_never_here_does_nothing() -> None:
    async def test() -> None:
        async with world() as made:
            made.start("t1")
            await outcome_of(made, "t1")
            made.node.tell(made.host, Stop(["t1", "unknown"], "straggler"))
            await settle()
            assert len(made.outcomes) == 1

    run(test())


@pytest.mark.parametrize(("alpha", "outcome"), [(2, ("stored", "")), (1, ("lost", "stale"))])
def test_a_trajectory_that_can_no_longer_be_trained_on_stops_at_its_next_turn(
    alpha: int, outcome: tuple[str, str]
) -> None:
    async def test() -> None:
        async with world() as made:
            made.proxy.version = 3
            made.proxy.holds = lambda request: request.request_id == "t1/1"
            made.start("t1")
            await until(lambda: made.proxy.held)
            made.node.tell(made.host, LearnerVersion(5, alpha))  # 5 - 2 = 3 may be trained on, 5 - 1 = 4 not
            await settle()
            made.proxy.version = 5
            made.proxy.answer("t1/1")
            assert await outcome_of(made, "t1") == outcome
            assert made.outcomes[0].initiating_version == 3
            assert len(made.proxy.requests) == (3 if outcome[0] == "stored" else 2)

    run(test())


def test_a_trajectory_that_has_not_begun_is_never_stale() -> None:
    async def test() -> None:
        async with world() as made:
            made.proxy.version = 9
            made.node.tell(made.host, LearnerVersion(9, 0))
            made.start("t1")
            assert await outcome_of(made, "t1") == ("stored", "")

    run(test())


def test_a_trajectory_that_went_stale_while_it_was_scored_is_not_stored() -> None:
    async def test() -> None:
        async with world() as made:
            made.reward.gate.clear()
            made.start("t1")
            await until(lambda: made.reward.scoring)
            made.node.tell(made.host, LearnerVersion(2, 1))
            await settle()
            made.reward.gate.set()
            assert await outcome_of(made, "t1") == ("lost", "stale")
            assert made.store.storing == []

    run(test())


def test_a_host_that_is_stopped_leaves_nothing_running() -> None:
    async def test() -> None:
        async with world(concurrent=1) as made:
            made.proxy.holds = lambda request: True
            made.start("t1", "t2")
            await until(lambda: made.proxy.held)
            await made.node.stop(made.host)
            await until(lambda: made.worker.closed == ["t1"])
            assert made.proxy.ended == ["t1"]

    run(test())
