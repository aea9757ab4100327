"""A trajectory that is stopped, or can no longer be trained on, ends as soon as it may."""

from __future__ import annotations

import pytest

from actors.env.messages import LearnerVersion, Stop
from tests.env_manager.support import is_at_rest, outcome_of, world
from tests.support.loops import run, settle, until


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
            assert (made.proxy.ended, made.proxy.whole) == (["t1"], set())

    run(test())
