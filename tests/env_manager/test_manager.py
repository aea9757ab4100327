"""EnvManagers among scripted peers: a trajectory is played, scored and stored, in a place of its own."""

from __future__ import annotations

import asyncio

import pytest

from actors.env import manager as manager_module
from actors.env.messages import LearnerVersion
from actors.env.recorder import check_trajectory
from actors.env.urgency import is_urgent, turns_left
from bus import virtual_time
from tests.env_manager.support import RIGHT, followed, is_at_rest, outcome_of, simulated_world, world
from tests.support.loops import run, settle, until


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


def test_every_turn_says_which_it_is_and_of_which_stream_of_tasks_or_else_environment() -> None:
    async def test() -> None:
        async with world() as made:
            made.start("t1", stream="hard")
            await outcome_of(made, "t1")
            made.start("t2")
            await outcome_of(made, "t2")
            assert made.proxy.asked == [(task, turn) for task in ("hard", "game") for turn in range(3)]

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
        async with simulated_world() as made:
            made.reward.gate.clear()
            made.start("t1")
            await until(lambda: made.reward.scoring == ["t1"])
            made.start("t2", "t3", more=True)
            await until(lambda: made.coordinator.left == ["t2", "t3"])
            assert made.outcomes == []  # they are only being scored
            made.reward.gate.set()
            await outcome_of(made, "t1")
            assert made.coordinator.left == ["t2", "t3"]

    virtual_time.run(test())


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
