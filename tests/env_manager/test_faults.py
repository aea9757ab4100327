"""Whatever fails on the way, every ticket ends in exactly one outcome, under its reason."""

from __future__ import annotations

import asyncio
import random

import pytest

from actors.env.messages import Stop
from bus.virtual_time import run
from tests.env_manager.support import is_at_rest, outcome_of
from tests.env_manager.support import simulated_world as world
from tests.support.loops import settle, until

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


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_own_trajectory_alone_and_is_counted_under_its_reason(fault: str) -> None:
    async def test() -> None:
        async with world() as made:
            made.start("bad", faults={"bad": fault})
            assert await outcome_of(made, "bad") == ("lost", FAULTS[fault])
            made.start("good")
            assert await outcome_of(made, "good") == ("stored", "")
            await is_at_rest(made)
            assert (await made.describe()).counters[f"lost_{FAULTS[fault]}"] == 1
            assert made.proxy.ended == ["bad", "good"]
            played = {"good", "bad"} if fault.partition(" ")[0] in ("reward", "store") else {"good"}
            assert made.proxy.whole == played

    run(test())


@pytest.mark.parametrize("fault", ["proxy is silent", "engine hangs"])
def test_what_nobody_waits_for_any_more_is_aborted(fault: str) -> None:
    async def test() -> None:
        async with world() as made:
            made.start("t1", faults={"t1": fault})
            await outcome_of(made, "t1")
            assert made.proxy.aborted == ["t1/0"]

    run(test())


def test_what_was_perhaps_stored_but_counted_lost_is_discarded() -> None:
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


def test_a_first_turn_may_wait_for_the_publication_of_its_version() -> None:
    async def test() -> None:
        async with world(turn_timeout_s=5.0) as made:
            made.proxy.holds = lambda request: True
            made.start("t1", "t2", from_version=3)
            await until(lambda: len(made.proxy.held) == 2)
            await asyncio.sleep(590.0)  # an engine keeps both until it has version 3
            assert made.outcomes == []
            made.proxy.version = 3
            made.proxy.holds = lambda request: request.request_id == "t3/0"
            made.proxy.answer("t1/0")
            assert await outcome_of(made, "t1") == ("stored", "")
            made.start("t3", from_version=3)  # which is served by now
            began = asyncio.get_running_loop().time()
            assert await outcome_of(made, "t3") == ("lost", "generation_timeout")
            assert await outcome_of(made, "t2") == ("lost", "generation_timeout")
            assert asyncio.get_running_loop().time() - began < 8.0  # so what waited for it waits for no more

    run(test())


def test_every_ticket_has_one_outcome_when_everything_fails_at_random() -> None:
    async def test() -> None:
        chance = random.Random(5)
        tickets = [f"t{index}" for index in range(300)]
        faults = {ticket: chance.choice([*FAULTS, "", "", ""]) for ticket in tickets}
        async with world(concurrent=60) as made:
            made.start(*tickets, faults=faults)
            stopped = chance.sample(tickets, 40)
            for ticket in stopped:
                await asyncio.sleep(chance.uniform(0.0, 0.02))
                made.node.tell(made.host, Stop([ticket], "stopped"))
            await until(lambda: len(made.outcomes) >= len(tickets))
            await is_at_rest(made)
            assert sorted(outcome.ticket for outcome in made.outcomes) == sorted(tickets)
            for outcome in made.outcomes:
                fault = faults[outcome.ticket]
                expected = {("lost", FAULTS[fault]) if fault else ("stored", "")}
                if outcome.ticket in stopped:
                    expected.add(("lost", "stopped"))
                assert (outcome.state, outcome.reason) in expected
            stored = {outcome.ticket for outcome in made.outcomes if outcome.state == "stored"}
            assert stored >= {ticket for ticket in tickets if not faults[ticket]} - set(stopped)
            assert {("lost", "stopped"), ("stored", "")} <= {(each.state, each.reason) for each in made.outcomes}
            await until(lambda: made.store.kept.keys() - set(made.store.discarded) == stored)

    run(test())
