"""What one peer may put on a node, and that the others go on beside it."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import bus.bounds
import bus.codec
from actors.core import Actor, Node, handler
from bus.bounds import Account, Bounds, Bucket, Mutes
from bus.codec import Decoder, Encoder
from bus.message import DecodeError, Failure, Header, Kind, Lane, NodeAddress, Overloaded
from tests.bus.asks import Add, Counter, Total, ask
from tests.bus.hands import Hand, Message, carry, settle
from tests.bus.test_zeromq import until

FAILURES: Decoder[Failure] = Decoder(Failure)


class Load(msgspec.Struct):
    data: np.ndarray


class Tree(msgspec.Struct):
    root: Any


# ---- the bookkeeping -------------------------------------------------------------------------------------------------


def test_a_bucket_gives_its_burst_at_once_and_then_its_rate() -> None:
    bucket = Bucket(rate=2.0, burst=3.0)
    assert [bucket.take(100.0) for _ in range(5)] == [True, True, True, False, False]
    assert [bucket.take(100.5) for _ in range(2)] == [True, False]
    assert [bucket.take(1000.0) for _ in range(4)] == [True, True, True, False], "no more is saved than the burst"


def test_messages_are_counted_by_stretches_of_time() -> None:
    account = Account(Bounds(messages_per_stretch=2, stretch_s=10.0))
    came = [(now, account.add(1, now)) for now in (100.0, 105.0, 109.9, 110.0, 110.0, 110.0)]
    refused = "more than 2 messages came in 10 s"
    assert [text for _, text in came] == ["", "", refused, "", "", refused]


def test_a_message_of_any_size_gets_in_alone() -> None:
    account = Account(Bounds(queued_bytes=100))
    assert account.add(1000, 0.0) == ""
    assert account.add(1, 0.0) == "messages of 100 bytes wait already"
    account.messages, account.bytes = account.messages - 1, account.bytes - 1000
    assert [account.add(size, 0.0) for size in (60, 40)] == ["", ""]
    assert account.add(1, 0.0) != ""


def test_who_sends_what_cannot_be_read_is_muted_for_a_while() -> None:
    mutes = Mutes(Bounds(unreadable_per_s=1.0, muted_s=5.0))
    assert [mutes.unreadable(b"a", 0.0) for _ in range(11)] == [False] * 10 + [True]
    assert [mutes.muted(b"a", now) for now in (0.0, 4.9, 5.0)] == [True, True, False]
    assert not mutes.muted(b"b", 0.0)


def test_what_is_known_of_the_muted_is_bounded() -> None:
    mutes = Mutes(Bounds(unreadable_per_s=0.01))
    for number in range(3 * bus.bounds.ACCOUNTS_AT_MOST):
        for _ in range(2):
            mutes.unreadable(b"%d" % number, 0.0)
    assert len(mutes._buckets) == len(mutes.until) == bus.bounds.ACCOUNTS_AT_MOST


# ---- what waits ------------------------------------------------------------------------------------------------------


def failure(message: Message) -> Failure:
    assert message.kind is Kind.ERROR
    return FAILURES.decode(message.frames[1:])


async def test_a_peer_with_too_much_waiting_is_told_and_others_are_served(caplog: pytest.LogCaptureFixture) -> None:
    a, c, b = Hand("a"), Hand("c"), Hand("b", bounds=Bounds(queued_messages=3))
    asking = [ask(a, b) for _ in range(5)] + [ask(c, b)]
    await settle()
    for source in (a, c):
        carry(source, b)
    assert [request.header.sender.name for request in b.requests] == ["a", "a", "a", "c"]
    carry(b, a)
    for refused in asking[3:5]:
        with pytest.raises(Overloaded, match="Add to counter@b: node b refuses it: 3 messages wait already"):
            await refused
    assert b.courier.counters["over_bounds"] == 2
    assert [record.getMessage() for record in caplog.records] == [
        "node b refuses messages of node a: 3 messages wait already (over_bounds counts it)"
    ]
    b.requests[0].taken()  # a handler has it
    again = ask(a, b)
    await settle()
    carry(a, b)
    assert len(b.requests) == 5
    for waiting in (*asking, again):
        waiting.cancel()


async def test_what_is_refused_further_on_does_not_wait() -> None:
    a, b = Hand("a"), Hand("b", serve=lambda request: None, bounds=Bounds(queued_messages=1))
    for _ in range(10):
        a.courier.tell(b.address, "x", Add(1))
        carry(a, b)
    assert b.courier.counters["over_bounds"] == 0


async def test_a_new_incarnation_does_not_shed_what_waits() -> None:
    b = Hand("b", bounds=Bounds(queued_messages=2))
    for epoch in (1, 2, 3):
        a = Hand("a", epoch)
        a.courier.tell(b.address, "x", Add(1))
        carry(a, b)
    assert len(b.requests) == 2
    assert b.courier.counters["over_bounds"] == 1


async def test_bytes_that_wait_are_bounded_as_well() -> None:
    a, b = Hand("a"), Hand("b", bounds=Bounds(queued_bytes=3 << 20))
    for _ in range(5):
        a.courier.tell(b.address, "x", Load(np.zeros(1 << 20, np.uint8)))
    carry(a, b)
    assert len(b.requests) == 2, "a third one would be more than 3 MiB, with its header"
    assert b.courier.counters["over_bounds"] == 3


async def test_more_messages_a_second_than_allowed_are_refused() -> None:
    a, b = Hand("a"), Hand("b", serve=Counter(), bounds=Bounds(messages_per_stretch=1, stretch_s=1000.0))
    first, second = ask(a, b), ask(a, b)
    await settle()
    carry(a, b)
    carry(b, a)
    assert await first == Total(1)
    with pytest.raises(Overloaded, match=r"node b refuses it: more than 1 messages came in 1000 s"):
        await second


async def test_answers_that_are_kept_are_bounded_in_number() -> None:
    """A peer that says of every ask that it still waits for the first one."""
    b = Hand("b", serve=Counter(), bounds=Bounds(kept_answers=3))
    sender = NodeAddress("a", "tcp://a:1", "tcp://a:2", 1)
    body = [bytes(frame) for frame in Encoder().encode(Add(1))]
    for id_ in range(1, 6):
        header = Header(kind=Kind.ASK, to="x", sender=sender, to_epoch=1, id=id_, type="Add", oldest=1)
        b.take(Message(b.address, Lane.CONTROL, [msgspec.msgpack.encode(header), *body]))
    answers = b.sent()
    assert [answer.kind for answer in answers] == [Kind.REPLY] * 3 + [Kind.ERROR] * 2
    assert failure(answers[3]) == Failure("Overloaded", "it waits for 3 asks with retries already")


async def test_answers_that_are_kept_are_bounded_in_bytes() -> None:
    size = 100_000
    b = Hand(
        "b", serve=lambda request: request.reply(Load(np.zeros(size, np.uint8))), bounds=Bounds(kept_bytes=250_000)
    )
    a = Hand("a")
    asking = [ask(a, b, retries=1, reply=Load) for _ in range(3)]
    await settle()
    asked = carry(a, b)
    assert [answer.kind for answer in b.sent()] == [Kind.REPLY] * 3
    for message in asked:  # as if the answers were lost
        b.take(message)
    again = b.sent()
    assert [answer.kind for answer in again] == [Kind.REPLY, Kind.REPLY, Kind.ERROR]
    assert "got lost and too much was kept already" in failure(again[2]).message
    for waiting in asking:
        waiting.cancel()


async def test_nodes_that_are_known_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    b = Hand("b", bounds=Bounds(peers=2))
    for name in ("a", "c", "d", "a", "d"):
        source = Hand(name)
        source.courier.tell(b.address, "x", Add(1))
        carry(source, b)
    assert [request.header.sender.name for request in b.requests] == ["a", "c", "a"]
    assert b.courier.counters["too_many_peers"] == 2
    assert len(caplog.records) == 1


async def test_a_peer_that_sends_garbage_is_muted_and_others_are_served(caplog: pytest.LogCaptureFixture) -> None:
    a, b = Hand("a"), Hand("b", serve=Counter())
    assert b.transport.receive is not None
    for _ in range(5000):
        b.transport.receive(Lane.CONTROL, b"garbage/1", [b"\xc1"])
    assert b.courier.counters["muted"] > 3000
    assert b.courier.counters["malformed"] + b.courier.counters["muted"] == 5000
    assert [record.getMessage() for record in caplog.records] == [
        "node b refuses to hear 'garbage/1' for 5 s: too much cannot be read (mutes counts it)"
    ]
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    carry(b, a)
    assert await waiting == Total(1)


# ---- sizes and depth -------------------------------------------------------------------------------------------------


async def test_too_many_arrays_are_refused_where_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus.bounds, "MAX_FRAMES", 4)
    a, b = Hand("a"), Hand("b")
    large = np.zeros(3000, np.uint8)
    a.courier.tell(b.address, "x", Tree([large] * 2))
    with pytest.raises(ValueError, match="a message with 5 frames: at most 4 travel in one"):
        a.courier.tell(b.address, "x", Tree([large] * 3))


async def test_a_message_that_is_too_large_as_a_whole_is_refused_where_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bus.bounds, "MAX_MESSAGE_BYTES", 10_000)
    a, b = Hand("a"), Hand("b")
    a.courier.tell(b.address, "x", Tree([np.zeros(3000, np.uint8)] * 3))
    with pytest.raises(ValueError, match=r"a message of 1\d{4} bytes: at most 10000 travel in one"):
        a.courier.tell(b.address, "x", Tree([np.zeros(3000, np.uint8)] * 4))


def test_a_large_body_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = Encoder().encode(Tree("x" * 1001))
    monkeypatch.setattr(bus.codec, "MAX_BODY_BYTES", 1000)
    with pytest.raises(ValueError, match="a Tree of 1010 bytes besides its large arrays: at most 1000 travel"):
        Encoder().encode(Tree("x" * 1001))
    with pytest.raises(DecodeError, match="1010 bytes, expected at most 1000"):
        Decoder(Tree).decode(frames)


def test_what_is_nested_too_deeply_is_refused_on_both_sides() -> None:
    root: list[Any] = []
    for _ in range(100_000):
        root = [root]
    with pytest.raises(TypeError, match="cannot put a Tree in a message: it is nested too deeply"):
        Encoder().encode(Tree(root))
    with pytest.raises(DecodeError):
        Decoder(Tree).decode([b"\x81\xa4root" + b"\x91" * 100_000 + b"\x90"])
    while root:  # or taking it down would be as deep
        root = root.pop()


# ---- a flood over sockets --------------------------------------------------------------------------------------------


class Job(msgspec.Struct):
    number: int


class Done(msgspec.Struct):
    number: int


class Slow(Actor):
    @handler
    async def job(self, message: Job) -> Done:
        await asyncio.sleep(0.001)
        return Done(message.number)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("what", ["garbage", "jobs", "loads"])
async def test_a_flood_of_one_peer_neither_starves_nor_swells_a_node(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    bounds = Bounds(queued_messages=10, queued_bytes=20 << 20)
    async with Node("host", bounds=bounds) as host, Node("honest") as honest:
        ref = await host.spawn(Slow, "slow")
        assert (await honest.ask(ref, Job(-1), Done, timeout_s=10)).number == -1
        words = [sys.executable, "-m", "tests.bus.flooder", host.address.control, what]
        flooder = await asyncio.create_subprocess_exec(*words)
        try:
            counters = {"garbage": "muted", "jobs": "over_bounds", "loads": "over_bounds"}
            await until(lambda: host.describe()["counters"].get(counters[what], 0) > 500)
            before, begun = resident_bytes(), host.describe()["counters"][counters[what]]
            for number in range(10):
                assert (await honest.ask(ref, Job(number), Done, timeout_s=10)).number == number
            grown = resident_bytes() - before
            refused = host.describe()["counters"][counters[what]]
        finally:
            flooder.kill()
            await flooder.wait()
    assert refused > begun, "it went on all the time"
    assert grown < 200 << 20
    assert len(caplog.records) < 1500, "not a line for every message"
