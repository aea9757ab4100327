"""The loop rests while a step runs, and is there when it is over, when none follows, and when it takes long; the thread
waits for what the loop does then, but not for long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from actors.proxy.engines.turns import Turns
from tests.support.loops import DEADLINE_S, run, until

FOREVER_S = 1_000.0


@pytest.fixture(autouse=True)
def _rests_end_for_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.proxy.engines.turns.REST_S", FOREVER_S)
    monkeypatch.setattr("actors.proxy.engines.turns.GIVE_WAY_S", FOREVER_S)


def some_news() -> bool:
    return True


def in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    return asyncio.ensure_future(asyncio.to_thread(work))


def rests(turns: Turns[str]) -> None:
    """Wait, in the thread, until the loop does."""
    until = time.monotonic() + DEADLINE_S
    while not turns._resting:
        if time.monotonic() > until:
            raise TimeoutError(f"the loop does not rest within {DEADLINE_S:g} s")
        time.sleep(0.001)


def test_a_message_waits_for_the_end_of_the_step_that_is_under_way() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        log: list[str] = []
        turns: Turns[str] = Turns(log.append, some_news)

        def thread() -> None:
            turns.ended("step 1")
            rests(turns)
            loop.call_soon_threadsafe(log.append, "message")
            turns.ended("step 2")
            turns.idle()

        await in_thread(thread)
        await until(lambda: len(log) == 3)
        assert log == ["step 1", "step 2", "message"]

    run(test())


def test_the_next_step_waits_for_what_has_come_during_the_last_one() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        log: list[str] = []
        turns: Turns[str] = Turns(log.append, some_news)

        def thread() -> None:
            turns.ended("step 1")
            rests(turns)
            loop.call_soon_threadsafe(loop.call_soon, log.append, "a message's actor has woken up")
            turns.ended("step 2")
            log.append("step 3 begins")
            turns.idle()

        await in_thread(thread)
        assert log == ["step 1", "step 2", "a message's actor has woken up", "step 3 begins"]

    run(test())


def test_the_thread_goes_on_when_the_loop_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.proxy.engines.turns.GIVE_WAY_S", 0.001)

    async def test() -> None:
        loop = asyncio.get_running_loop()
        log: list[str] = []
        turns: Turns[str] = Turns(log.append, some_news)
        released = threading.Event()

        def hold_up() -> None:
            log.append("released" if released.wait(DEADLINE_S) else "never released")

        def thread() -> None:
            turns.ended("step 1")
            rests(turns)
            loop.call_soon_threadsafe(hold_up)
            turns.ended("step 2")
            released.set()
            turns.idle()

        await in_thread(thread)
        await until(lambda: len(log) == 3)
        assert log == ["step 1", "step 2", "released"]

    run(test())


def test_what_follows_from_a_result_happens_before_the_loop_rests() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        log: list[str] = []
        followed = threading.Event()
        turns: Turns[str] = Turns(lambda _: first_round(), some_news)

        def first_round() -> None:
            loop.call_soon(second_round)

        def second_round() -> None:
            log.append("an actor has woken up")
            followed.set()

        def thread() -> None:
            turns.ended("step 1")
            log.append("in time" if followed.wait(DEADLINE_S) else "too late")  # the next step is under way
            turns.idle()

        await in_thread(thread)
        assert log == ["an actor has woken up", "in time"]

    run(test())


def test_the_loop_rests_on_after_a_step_that_finished_nothing_until_something_has_come() -> None:
    async def test() -> None:
        log: list[str] = []
        came = False
        turns: Turns[str] = Turns(log.append, lambda: came)

        def thread() -> None:
            nonlocal came
            turns.ended("step 1")
            rests(turns)
            turns.ended("step 2", nothing=True)
            log.append("nothing has come")
            came = True
            turns.ended("step 3", nothing=True)
            log.append("something has come")
            turns.idle()

        await in_thread(thread)
        assert log == ["step 1", "nothing has come", "step 3", "something has come"]

    run(test())


def test_the_loop_does_not_rest_when_no_step_follows() -> None:
    async def test() -> None:
        log: list[str] = []
        turns: Turns[str] = Turns(log.append, some_news)

        def thread() -> None:
            turns.ended("step 1")
            turns.idle()

        await in_thread(thread)
        await until(lambda: log == ["step 1"])
        for _ in range(10):
            await asyncio.sleep(0)

    run(test())


def test_in_a_long_step_the_loop_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.proxy.engines.turns.REST_S", 0.001)

    async def test() -> None:
        log: list[str] = []
        turns: Turns[str] = Turns(log.append, some_news)
        await in_thread(lambda: turns.ended("step 1"))  # and no word any more
        await until(lambda: log == ["step 1"])
        await asyncio.sleep(0.01)
        await in_thread(lambda: turns.ended("step 2"))
        await until(lambda: log == ["step 1", "step 2"])

    run(test())


def test_the_loop_does_not_rest_while_it_has_work_of_its_own() -> None:
    async def test() -> None:
        log: list[str] = []
        turns: Turns[str] = Turns(log.append, some_news)
        with turns.undisturbed():
            await in_thread(lambda: turns.ended("step 1"))  # the next step is under way, and lasts
            for _ in range(10):
                await asyncio.sleep(0)
            assert log == ["step 1"]
        turns.idle()

    run(test())
