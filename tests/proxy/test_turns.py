"""Thread and loop take turns: each goes on when the other has had its own, or has taken too long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from actors.proxy.engines.turns import Turns
from tests.support.loops import DEADLINE_S, run, until

FOREVER_S = 1_000.0


@pytest.fixture(autouse=True)
def _nobody_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on, goes on because of the other."""
    monkeypatch.setattr("actors.proxy.engines.turns.REST_S", FOREVER_S)
    monkeypatch.setattr("actors.proxy.engines.turns.TURN_S", FOREVER_S)


def in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    return asyncio.ensure_future(asyncio.to_thread(work))


def test_the_thread_goes_on_when_the_loop_has_taken_its_result_and_what_follows_from_it() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        log: list[str] = []

        def take(result: str) -> None:
            log.append(result)
            loop.call_soon(first_round)

        def first_round() -> None:
            log.append("round 1")
            loop.call_soon(log.append, "round 2")

        turns: Turns[str] = Turns(take)
        seen: list[list[str]] = []

        def thread() -> None:
            turns.ended("step 1")
            seen.append(list(log))
            turns.idle()

        await in_thread(thread)
        assert seen == [["step 1", "round 1", "round 2"]]

    run(test())


def test_the_loop_rests_until_the_next_step_has_ended_or_none_follows() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        log: list[str] = []
        turns: Turns[str] = Turns(log.append)

        def thread() -> None:
            turns.ended("step 1")
            loop.call_soon_threadsafe(log.append, "message")
            turns.ended("step 2")
            turns.idle()
            loop.call_soon_threadsafe(log.append, "message to an idle engine")

        await in_thread(thread)
        await until(lambda: len(log) == 4)
        assert log == ["step 1", "step 2", "message", "message to an idle engine"]

    run(test())


def test_the_loop_rests_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.proxy.engines.turns.REST_S", 0.001)

    async def test() -> None:
        log: list[str] = []
        turns: Turns[str] = Turns(log.append)
        await in_thread(lambda: turns.ended("step 1"))  # and no word any more
        await in_thread(lambda: turns.ended("step 2"))
        assert log == ["step 1", "step 2"]

    run(test())


def test_a_turn_that_takes_too_long_is_not_waited_for_and_the_next_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        log: list[str] = []
        turns: Turns[str] = Turns(log.append)
        monkeypatch.setattr("actors.proxy.engines.turns.TURN_S", 0.001)
        went_on = threading.Event()
        seen: list[list[str]] = []

        def thread(step: str) -> None:
            turns.ended(step)
            seen.append(list(log))
            turns.idle()
            went_on.set()

        ended = in_thread(lambda: thread("step 1"))
        await asyncio.sleep(0)
        assert went_on.wait(DEADLINE_S)  # the loop stands still here
        await ended
        await until(lambda: log == ["step 1"])
        await asyncio.sleep(0.01)  # it has ended its turn, which nobody waited for
        monkeypatch.setattr("actors.proxy.engines.turns.TURN_S", FOREVER_S)
        await in_thread(lambda: thread("step 2"))
        assert seen == [[], ["step 1", "step 2"]]

    run(test())


def test_neither_waits_while_the_loop_has_work_of_its_own() -> None:
    async def test() -> None:
        log: list[str] = []
        turns: Turns[str] = Turns(log.append)
        with turns.undisturbed():
            went_on = threading.Event()

            def thread() -> None:
                turns.ended("step 1")
                went_on.set()

            ended = in_thread(thread)
            await asyncio.sleep(0)
            assert went_on.wait(DEADLINE_S)  # though the loop stands still here
            await ended
            for _ in range(10):  # it does not rest, either
                await asyncio.sleep(0)
            assert log == ["step 1"]

    run(test())
