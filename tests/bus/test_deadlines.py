"""Deadlines that share a timer, in virtual time."""

from __future__ import annotations

import asyncio

from bus.deadlines import SPARE, Deadlines
from bus.virtual_time import run


def test_what_is_not_over_is_called_at_its_time_and_once() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        called: list[tuple[str, float]] = []
        deadlines = Deadlines(loop)

        def add(name: str, after_s: float) -> int:
            return deadlines.add(start + after_s, lambda: called.append((name, loop.time() - start)))

        add("late", 3.0)
        over = add("over", 2.0)
        add("early", 1.0)  # the timer is brought forward
        add("early too", 1.0)
        deadlines.over(over)
        await asyncio.sleep(10)
        assert called == [("early", 1.0), ("early too", 1.0), ("late", 3.0)]

    run(test(), seed=1)


def test_one_may_be_added_or_ended_by_another() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        called: list[str] = []
        deadlines = Deadlines(loop)
        ended: list[int] = []

        def first() -> None:
            for number in ended:
                deadlines.over(number)
            deadlines.add(loop.time() + 5, lambda: called.append("second"))
            called.append("first")

        deadlines.add(loop.time() + 1, first)
        ended += [deadlines.add(loop.time() + after_s, lambda: called.append("never")) for after_s in (1, 2)]
        await asyncio.sleep(10)
        assert called == ["first", "second"]

    run(test(), seed=1)


def test_what_is_over_takes_no_memory() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        deadlines = Deadlines(loop)
        for _ in range(100_000):
            deadlines.over(deadlines.add(loop.time() + 60, lambda: None))
        assert len(deadlines._times) <= SPARE + 1
        assert not deadlines._late

    run(test(), seed=1)


def test_once_closed_none_is_called() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        called: list[int] = []
        deadlines = Deadlines(loop)
        deadlines.add(loop.time() + 1, lambda: called.append(1))
        deadlines.close()
        await asyncio.sleep(5)
        assert called == []

    run(test(), seed=1)
