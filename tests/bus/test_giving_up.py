"""What an asker gives up is cancelled where it runs, once, and nothing else is."""

import asyncio

import pytest

from bus.message import DeadlineExceeded, Kind, Lane, Overloaded
from tests.bus.asks import Counter, Total, ask
from tests.bus.hands import Hand, carry, settle

pytestmark = pytest.mark.virtual_time


async def test_a_cancelled_ask_leaves_nothing_behind() -> None:
    a, b = Hand("a"), Hand("b")
    waiting = ask(a, b)
    await settle()
    waiting.cancel()
    await settle()
    carry(a, b)
    b.requests[0].reply(Total(1))
    assert b.sent() == []
    assert (a.courier.counters, b.courier.counters) == ({}, {"cancelled": 1})


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize("lane", Lane)
async def test_a_cancelled_ask_cancels_what_it_caused_once_and_only_that(lane: Lane, retries: int) -> None:
    a, b = Hand("a"), Hand("b")
    cancelled: list[int] = []
    waiting, other = (ask(a, b, lane=lane, retries=retries) for _ in range(2))
    await settle()
    carry(a, b)
    for number, request in enumerate(b.requests):
        request.on_cancel = lambda number=number: cancelled.append(number)
    waiting.cancel()
    await settle()
    (message,) = carry(a, b)
    assert (message.kind, message.lane) == (Kind.CANCEL, lane)
    b.take(message)
    assert cancelled == [0]
    b.requests[1].reply(Total(1))
    carry(b, a)
    assert await other == Total(1)


async def test_an_ask_past_its_deadline_cancels_what_it_caused() -> None:
    a, b = Hand("a"), Hand("b")
    cancelled = asyncio.Event()
    waiting = ask(a, b, timeout_s=0.05)
    await settle()
    carry(a, b)
    b.requests[0].on_cancel = cancelled.set
    with pytest.raises(DeadlineExceeded):
        await waiting
    carry(a, b)
    assert cancelled.is_set()


async def test_a_cancelled_ask_that_arrives_again_is_not_begun_again() -> None:
    a, b = Hand("a"), Hand("b")
    waiting = ask(a, b, retries=3)
    await settle()
    (message,) = carry(a, b)
    waiting.cancel()
    await settle()
    carry(a, b)
    b.take(message)
    assert len(b.requests) == 1
    assert b.courier.counters == {"cancelled": 1, "duplicates": 1}


@pytest.mark.parametrize("how", ["lost", "restarted"])
async def test_what_a_node_that_is_gone_had_asked_for_is_cancelled(how: str) -> None:
    a, a2, b = Hand("a"), Hand("a", 2), Hand("b")
    cancelled = asyncio.Event()
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    b.requests[0].on_cancel = cancelled.set
    if how == "lost":
        b.courier.lose(a.address, "gone")
    else:
        a2.courier.ping(b.address)
        carry(a2, b)
    assert cancelled.is_set()
    waiting.cancel()


async def test_an_ask_that_was_answered_or_never_sent_is_not_cancelled() -> None:
    a, b = Hand("a"), Hand("b", serve=Counter())
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    carry(b, a)
    await waiting
    a.transport.full = True
    with pytest.raises(Overloaded):
        await ask(a, b)
    assert a.sent() == []
    assert a.courier.counters == {}


async def test_an_ask_without_retries_is_forgotten_once_it_is_answered() -> None:
    a, b = Hand("a"), Hand("b", serve=Counter())
    for _ in range(100):
        waiting = ask(a, b)
        await settle()
        carry(a, b)
        carry(b, a)
        await waiting
    assert len(b.courier._answering._asks) == 0


async def test_an_ask_cancelled_in_the_moment_of_its_failure_leaves_no_unseen_error() -> None:
    a, b = Hand("a"), Hand("b")
    waiting = ask(a, b)
    await settle()
    a.courier.lose(b.address, "gone")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
