"""Streams between nodes whose messages are carried by hand."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from bus.answering import LEAST_PATIENCE_S, Request
from bus.asking import WINDOW
from bus.codec import Decoder
from bus.message import DeadlineExceeded, DecodeError, Failure, Kind, Overloaded, PeerLost, RemoteError
from bus.virtual_time import run as run_in_virtual_time
from tests.bus.hands import Hand, carry, settle


class Count(msgspec.Struct):
    upto: int


class Number(msgspec.Struct):
    value: int


class Counting:
    """Serves streams of numbers and keeps count of how far each got."""

    def __init__(self) -> None:
        self.yielded = 0
        self.ended = ""
        self.task: asyncio.Task[None] | None = None

    def __call__(self, request: Request) -> None:
        self.task = asyncio.create_task(self._serve(request))

    async def _serve(self, request: Request) -> None:
        try:
            await request.stream(self._numbers(request.decode(Decoder(Count)).upto))
        except DeadlineExceeded as error:
            request.fail(Failure("DeadlineExceeded", str(error)))

    async def _numbers(self, upto: int) -> AsyncGenerator[Number, None]:
        try:
            for value in range(upto):
                self.yielded += 1
                yield Number(value)
            self.ended = "complete"
        finally:
            self.ended = self.ended or "closed"


def numbers(source: Hand, target: Hand, upto: int, **options: Any) -> AsyncGenerator[Number, None]:
    options.setdefault("timeout_s", 10.0)
    return source.courier.stream(target.address, "counter", Count(upto), Decoder(Number), **options)


async def exchange(a: Hand, b: Hand) -> None:
    """Carry until nothing is left to carry."""
    await settle()
    while carry(a, b) + carry(b, a):
        await settle()


async def collect(stream: AsyncGenerator[Number, None]) -> list[int]:
    return [number.value async for number in stream]


async def test_a_stream_yields_every_item_in_order_and_ends() -> None:
    counting = Counting()
    a, b = Hand("a"), Hand("b", serve=counting)
    reading = asyncio.create_task(collect(numbers(a, b, 100)))
    while not reading.done():
        await exchange(a, b)
    assert await reading == list(range(100))
    assert counting.ended == "complete"


async def test_an_empty_stream_just_ends() -> None:
    a, b = Hand("a"), Hand("b", serve=Counting())
    reading = asyncio.create_task(collect(numbers(a, b, 0)))
    await exchange(a, b)
    assert await reading == []


async def test_a_slow_reader_bounds_what_is_in_flight() -> None:
    counting = Counting()
    a, b = Hand("a"), Hand("b", serve=counting)
    async with aclosing(numbers(a, b, 1000)) as stream:
        first = asyncio.create_task(anext(stream))
        await exchange(a, b)
        assert (await first).value == 0
        assert counting.yielded == WINDOW + 1  # the last one waits at the sender
        for _ in range(20):
            await anext(stream)
            await exchange(a, b)
            assert counting.yielded <= WINDOW + 21
        assert counting.yielded >= WINDOW + 1 + 16
    await exchange(a, b)


async def test_a_cancelled_stream_stops_its_sender_and_closes_its_generator() -> None:
    counting = Counting()
    a, b = Hand("a"), Hand("b", serve=counting)
    async with aclosing(numbers(a, b, 1000)) as stream:
        first = asyncio.create_task(anext(stream))
        await exchange(a, b)
        await first
    await exchange(a, b)
    assert counting.ended == "closed"
    assert counting.task is not None
    assert counting.task.cancelled()


async def test_a_stream_cancelled_before_it_began_never_begins() -> None:
    a, b = Hand("a"), Hand("b")
    async with aclosing(numbers(a, b, 5)) as stream:
        first = asyncio.create_task(anext(stream))
        await settle()
        carry(a, b)
        first.cancel()
        await settle()
    assert [message.kind for message in carry(a, b)] == [Kind.CANCEL]
    counting = Counting()
    counting(b.requests[0])
    await settle()
    assert (counting.yielded, b.sent()) == (0, [])


async def test_a_request_that_is_doubled_on_the_way_begins_one_stream() -> None:
    a, b = Hand("a"), Hand("b")
    items = numbers(a, b, 3)
    reading = asyncio.ensure_future(anext(items))
    await settle()
    (request,) = a.sent()
    b.take(request)
    b.take(request)
    reading.cancel()
    await asyncio.wait([reading])
    await items.aclose()
    assert len(b.requests) == 1
    assert b.courier.counters["duplicates"] == 1


async def test_a_lost_item_ends_the_stream_instead_of_going_missing() -> None:
    a, b = Hand("a"), Hand("b", serve=Counting())
    reading = asyncio.create_task(collect(numbers(a, b, 5)))
    await settle()
    carry(a, b)
    await settle()
    for message in b.sent():
        if message.header.sequence != 2:
            a.take(message)
    with pytest.raises(PeerLost, match=r"Count stream from counter@b: item 2 was lost on the way"):
        await reading


async def test_a_lost_last_item_is_noticed_by_the_end() -> None:
    a, b = Hand("a"), Hand("b", serve=Counting())
    reading = asyncio.create_task(collect(numbers(a, b, 3)))
    await settle()
    carry(a, b)
    await settle()
    *items, _, end = b.sent()
    for message in [*items, end]:
        a.take(message)
    with pytest.raises(PeerLost, match="item 2 was lost"):
        await reading


async def test_a_sender_that_ignores_its_credit_is_cut_off() -> None:
    a, b = Hand("a"), Hand("b")
    reading = asyncio.create_task(collect(numbers(a, b, 0)))
    await settle()
    carry(a, b)
    send = b.courier._wire.send
    for sequence in range(WINDOW + 1):
        body = [msgspec.msgpack.encode(Number(sequence))]
        send(Kind.ITEM, a.address, b.requests[0].lane, body=body, type_="Number", id_=1, sequence=sequence)
    carry(b, a)
    with pytest.raises(Overloaded, match="more than 16 items came without credit"):
        await reading


async def test_credit_that_arrives_twice_or_not_at_all_does_no_harm() -> None:
    counting = Counting()
    a, b = Hand("a"), Hand("b", serve=counting)
    async with aclosing(numbers(a, b, 1000)) as stream:
        for taken in range(WINDOW // 2):
            reading = asyncio.create_task(anext(stream))
            if not taken:
                await exchange(a, b)
            await reading
        (first,) = [message for message in a.sent() if message.kind is Kind.CREDIT]
        for _ in range(3):
            b.take(first)
            await exchange(a, b)
        assert counting.yielded == WINDOW + WINDOW // 2 + 1, "and one that waits for credit"
        for _ in range(WINDOW // 2):
            await anext(stream)
        a.sent()  # the second grant, which never arrives
        for _ in range(WINDOW // 2):
            await anext(stream)
        await exchange(a, b)
        assert counting.yielded == 2 * WINDOW + WINDOW // 2 + 1
    await exchange(a, b)


async def test_an_error_of_the_handler_arrives_after_the_items_before_it() -> None:
    def serve(request: Request) -> None:
        async def failing() -> AsyncGenerator[Number, None]:
            yield Number(0)
            raise ValueError("no more")

        async def work() -> None:
            with pytest.raises(ValueError, match="no more"):
                await request.stream(failing())
            request.fail(Failure("ValueError", "no more"))

        tasks.append(asyncio.create_task(work()))

    tasks: list[asyncio.Task[None]] = []
    a, b = Hand("a"), Hand("b", serve=serve)
    async with aclosing(numbers(a, b, 0)) as stream:
        first = asyncio.create_task(anext(stream))
        await exchange(a, b)
        assert await first == Number(0)
        with pytest.raises(RemoteError, match="ValueError: no more"):
            await anext(stream)


async def test_items_of_another_type_end_the_stream() -> None:
    class Figure(msgspec.Struct):
        value: int

    a, b = Hand("a"), Hand("b", serve=Counting())
    stream: AsyncGenerator[Figure, None] = a.courier.stream(
        b.address, "counter", Count(1), Decoder(Figure), timeout_s=10
    )
    first = asyncio.create_task(anext(stream))
    await exchange(a, b)
    with pytest.raises(DecodeError, match="answered with Number, expected Figure"):
        await first


def test_the_wait_for_an_item_has_a_deadline() -> None:
    async def wait() -> None:
        a, b = Hand("a"), Hand("b")
        deadline = r"a waited for Count stream from counter@b \(version 3\): no item within 10 s, after 0"
        with pytest.raises(DeadlineExceeded, match=deadline):
            await anext(numbers(a, b, 1, about="version 3"))
        assert asyncio.get_running_loop().time() == 10.0

    run_in_virtual_time(wait())


def test_the_wait_for_credit_has_a_deadline_that_names_the_reader() -> None:
    async def wait() -> None:
        counting = Counting()
        a, b = Hand("a"), Hand("b", serve=counting)
        async with aclosing(numbers(a, b, 1000, timeout_s=2 * LEAST_PATIENCE_S)) as stream:
            first = asyncio.create_task(anext(stream))
            await exchange(a, b)
            await first
            assert counting.task is not None
            await counting.task
            assert asyncio.get_running_loop().time() == 2 * LEAST_PATIENCE_S
            carry(b, a)
            assert b.courier.counters == {"streams_abandoned": 1}
            with pytest.raises(DeadlineExceeded, match=r"b waited for a to read on: no credit within \d+ s"):
                await collect(stream)

    run_in_virtual_time(wait())


async def test_a_lost_sender_ends_the_stream() -> None:
    a, b = Hand("a"), Hand("b")
    first = asyncio.create_task(anext(numbers(a, b, 1)))
    await settle()
    a.courier.lose(b.address, "its process ended")
    with pytest.raises(PeerLost, match=r"Count stream from counter@b: node b is lost: its process ended"):
        await first


async def test_a_lost_reader_stops_its_senders() -> None:
    counting = Counting()
    a, b = Hand("a"), Hand("b", serve=counting)
    async with aclosing(numbers(a, b, 1000)) as stream:
        first = asyncio.create_task(anext(stream))
        await exchange(a, b)
        await first
        b.courier.lose(a.address, "gone")
        await settle()
        assert counting.ended == "closed"


async def test_closing_ends_streams_at_both_ends() -> None:
    counting = Counting()
    a, b = Hand("a"), Hand("b", serve=counting)
    async with aclosing(numbers(a, b, 1000)) as stream:
        first = asyncio.create_task(anext(stream))
        await exchange(a, b)
        await first
        b.courier.close()
        a.courier.close()
        await settle()
        assert counting.ended == "closed"
        with pytest.raises(PeerLost, match="this node is closing"):
            await collect(stream)
