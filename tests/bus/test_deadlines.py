"""Deadlines that share a timer, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from bus.deadlines import SPARE, Deadlines

pytestmark = pytest.mark.virtual_time


class Calls:
    """Deadlines that write down by name when they were called; times are seconds from the beginning."""

    def __init__(self) -> None:
        self.deadlines = Deadlines(asyncio.get_running_loop())
        self.made: list[tuple[str, float]] = []

    def add(self, name: str, when_s: float) -> int:
        return self.deadlines.add(when_s, lambda: self.made.append((name, asyncio.get_running_loop().time())))


async def test_what_is_not_over_is_called_at_its_time_and_once() -> None:
    calls = Calls()
    calls.add("late", 3.0)
    over = calls.add("over", 2.0)
    calls.add("early", 1.0)  # the timer is brought forward
    calls.add("early too", 1.0)
    calls.deadlines.over(over)
    await asyncio.sleep(10)
    assert calls.made == [("early", 1.0), ("early too", 1.0), ("late", 3.0)]


async def test_one_may_be_added_or_ended_by_another() -> None:
    calls = Calls()
    ended: list[int] = []

    def first() -> None:
        for number in ended:
            calls.deadlines.over(number)
        calls.add("second", 6.0)

    calls.deadlines.add(1.0, first)
    ended += [calls.add("never", when_s) for when_s in (1.0, 2.0)]
    await asyncio.sleep(10)
    assert calls.made == [("second", 6.0)]


async def test_one_that_raises_keeps_none_from_being_called() -> None:
    calls = Calls()
    raised: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(repr(context["exception"])))

    def wrong() -> None:
        raise ValueError("no")

    for call in (wrong, wrong):
        calls.deadlines.add(1.0, call)
    calls.add("at the same time", 1.0)
    calls.add("later", 2.0)
    await asyncio.sleep(10)
    assert raised == ["ValueError('no')"] * 2
    assert calls.made == [("at the same time", 1.0), ("later", 2.0)]


async def test_what_is_over_takes_no_memory() -> None:
    deadlines = Deadlines(asyncio.get_running_loop())
    for _ in range(100_000):
        deadlines.over(deadlines.add(60.0, lambda: None))
    assert len(deadlines._times) <= SPARE + 1
    assert not deadlines._late


async def test_once_closed_none_is_called() -> None:
    calls = Calls()
    calls.add("never", 1.0)
    calls.deadlines.close()
    await asyncio.sleep(5)
    assert calls.made == []
