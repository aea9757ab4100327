"""Engines that get nowhere: what they say of themselves, and what becomes of them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from actors.proxy.engines.load import engine_load
from actors.proxy.engines.progress import Activity, Effort, Patience, ProgressMeter
from actors.proxy.messages import HostScore, HostSuspend, Scored, Served
from bus.virtual_time import run as run_virtually
from tests.proxy.hosted import World as Hosted
from tests.proxy.hosted import world as hosted
from tests.proxy.support import world
from tests.scheduling.heat import Play, Town, town
from tests.support.loops import run, until

# ---- what is counted -----------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


def test_time_without_a_token_adds_up_over_whatever_comes_in_between_and_begins_anew_with_a_token() -> None:
    clock = Clock()
    meter = ProgressMeter(clock)
    clock.pass_s(100)
    assert meter.read() == Effort()
    meter.at("steps")
    clock.pass_s(30)
    meter.at("scoring")
    clock.pass_s(50)
    assert meter.read() == Effort("scoring", 50.0)
    meter.at("nothing")
    clock.pass_s(7)
    meter.at("steps")
    clock.pass_s(20)
    meter.at("steps")
    clock.pass_s(5)
    assert meter.read() == Effort("steps", 55.0)
    meter.progressed()
    clock.pass_s(1)
    assert meter.read() == Effort("steps", 1.0)
    meter.rest()
    clock.pass_s(1)
    assert meter.read() == Effort()
    meter.at("steps")
    assert meter.read() == Effort("steps", 0.0)


@pytest.mark.parametrize(
    ("at", "fruitless_s", "why"),
    [
        ("nothing", 1e9, ""),
        ("steps", 60.0, ""),
        ("steps", 60.5, "it hangs: no token for 60.5 s, rollout.progress_timeout_s=60; 3 requests wait"),
        ("loading", 299.0, ""),
        ("loading", 301.0, "it hangs: weights are being loaded for 301.0 s, at most 300 s; 3 requests wait"),
        ("scoring", 119.0, ""),
        ("scoring", 121.0, "it hangs: a sequence is being scored for 121.0 s, at most 120 s; 3 requests wait"),
    ],
)
def test_each_thing_that_an_engine_may_be_at_has_a_limit_of_its_own(at: Activity, fruitless_s: float, why: str) -> None:
    assert Patience(60.0).verdict(Effort(at, fruitless_s), 3) == why


# ---- what an engine's host says ------------------------------------------------------------------------------------


async def _says(made: Hosted, at: Activity) -> list[float]:
    """Four times in a row, for how long it has been at that."""
    made.peer.efforts.clear()
    await until(lambda: [effort.at for effort in made.peer.efforts[-4:]] == [at] * 4)
    return [effort.fruitless_s for effort in made.peer.efforts[-4:]]


def test_a_host_whose_step_blocks_says_for_how_long_and_nothing_of_the_kind_when_it_goes_on() -> None:
    async def test() -> None:
        async with hosted(load_every_s=0.02) as made:
            await made.begin()
            await _says(made, "nothing")
            made.engine.gate.clear()
            made.add("a", tokens=1)
            ages = await _says(made, "steps")
            assert ages == sorted(ages)
            assert ages[3] > ages[0]
            made.engine.gate.set()
            await until(lambda: made.peer.finished)
            assert set(await _says(made, "nothing")) == {0.0}

    run(test())


def test_steps_that_compute_nothing_are_no_progress_and_those_that_count_a_token_are() -> None:
    async def test() -> None:
        async with hosted(load_every_s=0.02) as made:
            await made.begin()
            made.add("a", tokens=10**9)
            ages = await _says(made, "steps")
            assert ages[3] >= ages[0] + 0.03
            made.engine.counts = True
            await until(lambda: made.peer.efforts[-1].fruitless_s < ages[0])

    run(test())


def test_suspension_and_scoring_are_not_held_against_an_engine() -> None:
    async def test() -> None:
        async with hosted(load_every_s=0.02) as made:
            await made.begin()
            made.add("a", tokens=10**9)
            await _says(made, "steps")
            await made.ask(HostSuspend())
            assert set(await _says(made, "nothing")) == {0.0}
            made.engine.score_gate.clear()
            asking = asyncio.ensure_future(made.ask(HostScore(np.zeros(4, np.int32)), Scored))
            ages = await _says(made, "scoring")
            assert ages[3] > ages[0]
            made.engine.score_gate.set()
            await asking

    run(test())


# ---- what becomes of it --------------------------------------------------------------------------------------------


def test_the_proxy_has_engines_judged_by_what_they_say_and_counts_those_that_hang() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            await made.serve("e0")
            await made.add("t/0")
            for effort in (Effort("steps", 0.0), Effort("steps", 91.0)):
                made.node.tell(made.proxy.ref, Served("e0", [], 0, engine_load(0.5, 0.5, None), effort=effort))
            await until(lambda: len(made.fleet.judged) == 2)
            assert made.fleet.judged == [("e0", Effort("steps", 0.0), 1), ("e0", Effort("steps", 91.0), 1)]
            assert (await made.describe()).counters == {"engines_hung": 1}

    run(test())


def test_requests_of_a_hung_engine_go_on_at_another_one_in_virtual_time() -> None:
    """It hangs from 5 s on, when what was under way is over; the default of 90 s has passed by the report at 96 s."""

    async def test() -> Town:
        async with town({"e0": "H20", "e1": "H20"}, tokens_every_s=1.0) as made:
            await made.serve("e0")
            played = [made.players.begin(f"t{index}", Play(turns=1, response=1_500)) for index in range(4)]
            await made.go_on(4)
            made.hosts["e0"].hanging = True
            await made.serve("e1")
            await made.go_on(88)
            assert made.fleet.killed == []
            await made.go_on(5)
            await made.kill("e0")
            for task in played:
                await task
            return made

    made = run_virtually(test())
    when, engine, why = made.fleet.killed[0]
    assert engine == "e0"
    assert 95 <= when <= 97
    assert why.startswith("it hangs: no token for 9")
    assert why.endswith("rollout.progress_timeout_s=90; 4 requests wait")
    assert made.players.wrong == made.players.failures == []
    assert set(made.players.answers.values()) == {1}
    assert len(made.players.answers) == 4
    assert made.proxy._counters["tokens_kept"] > 0
