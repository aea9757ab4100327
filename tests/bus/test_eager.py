"""Looking for answers, with what comes decided here. Over real sockets every test of nodes does it."""

from __future__ import annotations

import asyncio
import time

import pytest

from bus import eager
from bus.eager import SKIPPED, Eager


class Letterbox:
    """Counts how often it was looked into; something is there from the ``at``-th time on."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.looks = 0

    def look(self) -> bool:
        self.looks += 1
        return self.at is not None and self.looks >= self.at


FOREVER_S, AT_ONCE_S = 1_000.0, 0.0


@pytest.fixture
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which looking does not end by itself, however slow they are."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(eager, "EAGER_S", FOREVER_S)


async def until_given_up(looking: Eager) -> int:
    """Returns how many turns the event loop had meanwhile."""
    turns = 0
    async with asyncio.timeout(5):
        while looking.looking:
            await asyncio.sleep(0)
            turns += 1
    return turns


@pytest.mark.usefixtures("two_processors")
async def test_it_looks_until_something_has_come_and_then_no_more() -> None:
    box = Letterbox(at=3)
    looking = Eager(asyncio.get_running_loop(), box.look)
    assert box.looks == 0  # nothing is expected
    looking.expect()
    await until_given_up(looking)
    await asyncio.sleep(0.01)
    assert box.looks == 3


@pytest.mark.usefixtures("two_processors")
async def test_it_gives_up_after_a_while_and_lets_others_run_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "EAGER_S", 0.2)
    box = Letterbox(at=None)
    looking = Eager(asyncio.get_running_loop(), box.look)
    start = time.perf_counter()
    looking.expect()
    assert await until_given_up(looking) > 1
    assert time.perf_counter() - start >= 0.2
    looks = box.looks
    await asyncio.sleep(0.01)
    assert box.looks == looks


@pytest.mark.usefixtures("two_processors")
async def test_where_answers_take_long_hardly_any_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "EAGER_S", AT_ONCE_S)
    box = Letterbox(at=None)
    looking = Eager(asyncio.get_running_loop(), box.look)
    looked_for = 0
    for _ in range(10 * SKIPPED):
        looking.expect()
        looked_for += looking.looking
        await until_given_up(looking)
    assert 2 <= looked_for <= 12  # two to find out, then one in 65


@pytest.mark.usefixtures("two_processors")
async def test_where_they_are_quick_again_every_one_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "EAGER_S", AT_ONCE_S)
    box = Letterbox(at=None)
    looking = Eager(asyncio.get_running_loop(), box.look)
    for _ in range(2):
        looking.expect()
        await until_given_up(looking)
    box.at = 0
    looked_for = 0
    for _ in range(2 * SKIPPED):
        looking.expect()
        looked_for += looking.looking
        await until_given_up(looking)
    assert looked_for == SKIPPED


async def test_with_one_processor_whoever_looks_would_hold_up_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    box = Letterbox(at=1)
    looking = Eager(asyncio.get_running_loop(), box.look)
    looking.expect()
    await asyncio.sleep(0.01)
    assert box.looks == 0


@pytest.mark.usefixtures("two_processors")
async def test_it_ends_with_its_node() -> None:
    box = Letterbox(at=None)
    looking = Eager(asyncio.get_running_loop(), box.look)
    looking.expect()
    looking.close()
    looking.close()
    looking.expect()
    await asyncio.sleep(0.01)
    assert box.looks == 0
