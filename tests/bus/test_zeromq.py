"""Real sockets: lanes, bulk, connections that come and go, and what they leave behind."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

import bus.asking
import bus.ways
import bus.zeromq
from bus.answering import Request, Serve
from bus.codec import Decoder, Frame
from bus.delivery import Courier
from bus.message import PROTOCOL_VERSION, CannotListen, Lane, NodeAddress, Overloaded, PeerLost, PeerRestarted
from bus.packing import PACKED_BYTES, PACKED_FRAMES, packed, unpacked
from bus.zeromq import BATCH, ZeroMQTransport
from tests.support.ports import free_port


class Text(msgspec.Struct):
    text: str


class Bytes(msgspec.Struct):
    data: np.ndarray


TEXT: Decoder[Text] = Decoder(Text)
BYTES: Decoder[Bytes] = Decoder(Bytes)


def echo(request: Request) -> None:
    request.reply(request.decode(TEXT))


def ignore(request: Request) -> None:
    """Whatever it is."""


class Nodes:
    """Couriers over ZeroMQ, closed at the end."""

    def __init__(self) -> None:
        self.open: list[Courier] = []

    def __call__(
        self, name: str, serve: Serve = ignore, *, epoch: int = 1, protocol: int = PROTOCOL_VERSION, **options: Any
    ) -> Courier:
        courier = Courier(ZeroMQTransport(name, epoch, **options), serve, protocol=protocol)
        self.open.append(courier)
        return courier

    async def __aenter__(self) -> "Nodes":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for courier in self.open:
            courier.close()


async def ask(source: Courier, to: NodeAddress, text: str, **options: Any) -> str:
    options.setdefault("timeout_s", 10)
    return (await source.ask(to, "echo", Text(text), TEXT, **options)).text


async def until(condition: Callable[[], bool]) -> None:
    """Within 20 s."""
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError("it never came to be")


def nobody(port: int) -> NodeAddress:
    return NodeAddress("nobody", f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port}", 1)


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", Lane)
async def test_messages_arrive_in_the_order_in_which_they_were_sent_on_a_lane(lane: Lane) -> None:
    count = 5 * BATCH[Lane.CONTROL] // 2
    found: list[str] = []
    async with Nodes() as nodes:
        a, b = nodes("a"), nodes("b", lambda request: found.append(request.decode(TEXT).text))
        for number in range(count):
            a.tell(b.address, "x", Text(str(number)), lane=lane)
        await until(lambda: len(found) == count)
    assert found == [str(number) for number in range(count)]


async def test_control_overtakes_bulk_that_was_sent_before_it() -> None:
    found: list[str] = []
    async with Nodes() as nodes:
        a, b = nodes("a"), nodes("b", lambda request: found.append(request.header.type))
        await ask_once_on_both_lanes(a, b)
        found.clear()
        block = np.ones(8 << 20, np.uint8)
        for _ in range(40):
            a.tell(b.address, "x", Bytes(block), lane=Lane.BULK)
        a.tell(b.address, "x", Text("abort"))
        await until(lambda: len(found) == 41)
    assert found.index("Text") < 20, "control waits for no more than the bulk that was read already"


async def test_control_that_comes_while_bulk_is_taken_is_delivered_before_the_next_of_it() -> None:
    found: list[Lane] = []
    async with Nodes() as nodes:
        a = nodes("a")._transport
        b = ZeroMQTransport("b", 1)

        def receive(lane: Lane, routing_id: bytes, frames: Sequence[Frame], *, more: bool = False) -> None:
            found.append(lane)
            if len(found) == 3:
                a.send(b.address, Lane.CONTROL, [b"abort"])
                assert b._routers[Lane.CONTROL].poll(10_000)

        try:
            for _ in range(8):
                a.send(b.address, Lane.BULK, [b"block"])
            assert b._routers[Lane.BULK].poll(10_000)
            await asyncio.sleep(0.1)  # all of them are there
            b.start(receive)
            await until(lambda: len(found) == 9)
        finally:
            b.close()
    assert found.index(Lane.CONTROL) == 3


async def ask_once_on_both_lanes(a: Courier, b: Courier) -> None:
    """So that connections stand."""
    for lane in Lane:
        a.tell(b.address, "x", Text("hello"), lane=lane)
    await until(lambda: b.last_heard("a") is not None)
    await asyncio.sleep(0.1)


async def test_a_large_array_arrives_in_the_memory_into_which_zeromq_received_it() -> None:
    found: list[Any] = []
    async with Nodes() as nodes:
        a, b = nodes("a"), nodes("b", lambda request: found.append(request.decode(BYTES).data))
        bits = np.full(1 << 20, 0x3F80, np.uint16)  # bfloat16 ones
        a.tell(b.address, "x", Bytes(bits), lane=Lane.BULK)
        await until(lambda: bool(found))
        (data,) = found
        root = data
        while isinstance(root, np.ndarray):
            root = root.base
        assert isinstance(root.obj, zmq.Frame)
        assert not data.flags.writeable
        np.testing.assert_array_equal(data, bits)


async def test_a_large_array_is_sent_from_the_memory_in_which_it_lies() -> None:
    port = free_port()
    async with Nodes() as nodes:
        a = nodes("a")
        data = np.zeros(1 << 20, np.uint8)
        a.tell(nobody(port), "x", Bytes(data), lane=Lane.BULK)
        data[:] = 7  # what arrives shows that there was no copy (and why senders must not do this)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as late:
            late.rcvtimeo = 10_000
            late.bind(f"tcp://127.0.0.1:{port}")
            *_, frame = late.recv_multipart()
    assert frame == bytes([7]) * (1 << 20)


async def test_a_frame_beyond_the_bound_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus.zeromq, "MAX_FRAME_BYTES", 1 << 20)
    async with Nodes() as nodes:
        a, b = nodes("a"), nodes("b", echo)
        with pytest.raises(ValueError, match="array of 1048577 bytes: at most 1048576 travel"):
            a.tell(b.address, "x", Bytes(np.zeros((1 << 20) + 1, np.uint8)), lane=Lane.BULK)
        assert await ask(a, b.address, "still") == "still"


# ---- strangers -------------------------------------------------------------------------------------------------------


async def test_a_stranger_that_announces_too_large_a_frame_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus.zeromq, "MAX_FRAME_BYTES", 1 << 20)
    found: list[bytes] = []
    transport = ZeroMQTransport("b", 1)
    transport.start(lambda lane, routing_id, frames, *, more=False: found.append(bytes(frames[0])))
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(transport.address.control)
            stranger.send(b"x" * ((1 << 20) + 100))
            while not found:  # what it sends after it has connected again arrives
                stranger.send(packed([b"small"]) or b"")
                await asyncio.sleep(0.01)
    finally:
        transport.close()
    assert set(found) == {b"small"}


async def test_bytes_that_are_no_zeromq_disturb_nobody() -> None:
    async with Nodes() as nodes:
        a, b = nodes("a"), nodes("b", echo)
        port = int(b.address.control.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
            assert await ask(a, b.address, "still") == "still"


@pytest.mark.parametrize(
    "part",
    [b"", b"\0", b"\1", b"\1\2\0\0\0x", b"\1\1\0\0\0xy", b"\2\1\0\0\0\xff\xff\xff\xffx", b"\x09" + bytes(64)],
    ids=["empty", "no frames", "no size", "too short", "too long", "a huge size", "too many"],
)
def test_what_is_not_packed_is_no_message(part: bytes) -> None:
    assert unpacked(part) == []


def test_packed_frames_come_out_as_they_went_in() -> None:
    frames: list[Frame] = [b"head", b"", memoryview(b"body")]
    part = packed(frames) or b""
    assert part == b"\3\4\0\0\0\0\0\0\0\4\0\0\0headbody"
    assert unpacked(part) == [b"head", b"", b"body"]


def test_what_is_not_small_travels_as_it_is() -> None:
    assert packed([b"head", bytes(PACKED_BYTES)]) is None
    assert packed([b""] * (PACKED_FRAMES + 1)) is None
    assert packed([bytes(PACKED_BYTES + 1)]) is not None  # a message of one part is always packed


async def test_what_cannot_be_delivered_does_not_keep_back_what_follows() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context.get("exception")))
    found: list[bytes] = []

    def receive(lane: Lane, routing_id: bytes, frames: Sequence[Frame], *, more: bool = False) -> None:
        found.append(bytes(frames[0]))
        if frames[0] == b"1":
            raise ValueError("a fault of ours")

    transport = ZeroMQTransport("b", 1)
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
            sender.connect(transport.address.control)
            for number in range(5):
                sender.send(packed([str(number).encode()]) or b"")
            await asyncio.sleep(0.2)  # all of them wait: no new edge will come
            transport.start(receive)
            await until(lambda: len(found) == 5)
    finally:
        transport.close()
    assert [str(error) for error in reported] == ["a fault of ours"]


@pytest.mark.parametrize("lane", Lane)
async def test_a_thread_sees_what_has_come_before_the_event_loop_takes_it(lane: Lane) -> None:
    found: list[bytes] = []

    def receive(lane: Lane, routing_id: bytes, frames: Sequence[Frame], *, more: bool = False) -> None:
        found.append(bytes(frames[0]))

    transport = ZeroMQTransport("b", 1)
    try:
        transport.start(receive)
        with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
            sender.connect(transport.address.control if lane is Lane.CONTROL else transport.address.bulk)
            sender.send(packed([b"connected"]) or b"")
            await until(lambda: found == [b"connected"])
            await until(lambda: not transport.news())
            sender.send(packed([b"something"]) or b"")
            came_by = time.monotonic() + 5
            while not transport.news() and time.monotonic() < came_by:
                time.sleep(0.001)  # noqa: ASYNC251  (the loop is to take nothing meanwhile)
            assert found == [b"connected"]
            assert transport.news()
            await until(lambda: found == [b"connected", b"something"])
            await until(lambda: not transport.news())
    finally:
        transport.close()


async def test_messages_that_came_together_are_news_until_those_whom_they_woke_up_have_run() -> None:
    seen: list[bool] = []

    def receive(lane: Lane, routing_id: bytes, frames: Sequence[Frame], *, more: bool = False) -> None:
        asyncio.get_running_loop().call_soon(lambda: seen.append(transport.news()))

    transport = ZeroMQTransport("b", 1)
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
            sender.connect(transport.address.control)
            for _ in range(3):
                sender.send(packed([b"one of three"]) or b"")
            await asyncio.sleep(0.2)  # all of them wait
            transport.start(receive)
            await until(lambda: len(seen) == 3)
            assert seen == [True, True, True]
            await until(lambda: not transport.news())
    finally:
        transport.close()


# ---- connections -----------------------------------------------------------------------------------------------------


async def test_a_full_connection_pushes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bus.zeromq, bus.ways):
        monkeypatch.setattr(module, "QUEUED", {Lane.CONTROL: 10, Lane.BULK: 10})
    async with Nodes() as nodes:
        a = nodes("a")
        to = nobody(free_port())
        for _ in range(10):
            a.tell(to, "x", Text("more"))
        with pytest.raises(Overloaded, match="10 messages already wait for node nobody on the control lane"):
            a.tell(to, "x", Text("too much"))


async def test_what_waits_for_a_node_is_delivered_once_it_listens() -> None:
    port = free_port()
    async with Nodes() as nodes:
        a = nodes("a")
        waiting = asyncio.create_task(ask(a, NodeAddress("b", f"tcp://127.0.0.1:{port}", "", 0), "early"))
        await asyncio.sleep(0.05)
        nodes("b", echo, port=port)
        assert await waiting == "early"


async def test_a_restarted_node_is_reached_again_and_its_past_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus.asking, "RESEND_AFTER_S", 0.2)
    port = free_port()
    async with Nodes() as nodes:
        a, b1 = nodes("a"), nodes("b", echo, epoch=1, port=port)
        anyone = NodeAddress("b", b1.address.control, "", 0)
        assert await ask(a, anyone, "first") == "first"
        b1._transport.close()  # as if killed: it takes no leave
        nodes.open.remove(b1)
        nodes("b", echo, epoch=2, port=port)
        with pytest.raises(PeerRestarted):
            await ask(a, b1.address, "to the past", retries=20)
        assert await ask(a, anyone, "again", retries=20) == "again"


async def test_an_address_that_is_none_is_a_lost_peer() -> None:
    async with Nodes() as nodes:
        a = nodes("a")
        with pytest.raises(PeerLost, match="cannot connect to node b at 'garbage': Invalid argument"):
            a.tell(NodeAddress("b", "garbage", "", 0), "x", Text("?"))


async def test_a_taken_port_is_named() -> None:
    async with Nodes() as nodes:
        port = int(nodes("a").address.control.rsplit(":", 1)[1])
        with pytest.raises(CannotListen, match=f"127.0.0.1:{port}: Address already in use"):
            nodes("b", port=port)


def has_ipv6() -> bool:
    return os.path.exists("/proc/net/if_inet6")


async def test_both_lanes_listen_on_ipv6_as_well() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    async with Nodes() as nodes:
        a, b = nodes("a", host="::1"), nodes("b", echo, host="::1")
        assert await ask(a, b.address, "six") == "six"
        assert await ask(a, b.address, "six", lane=Lane.BULK) == "six"


async def test_a_closed_node_sends_nothing_and_says_so() -> None:
    async with Nodes() as nodes:
        a, b = nodes("a"), nodes("b", echo)
        a.close()
        a.close()
        with pytest.raises(PeerLost, match="node a has closed"):
            a.tell(b.address, "x", Text("?"))


async def test_closing_waits_only_a_bounded_time_for_who_does_not_listen() -> None:
    async with Nodes() as nodes:
        a = nodes("a")
        a.tell(nobody(free_port()), "x", Text("?"))
        start = time.monotonic()
        a.close()
        assert time.monotonic() - start < 5


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_nodes_that_came_and_went_leave_no_descriptor_and_no_thread() -> None:
    async def visit(number: int, host: Courier) -> None:
        async with Nodes() as nodes:
            guest = nodes(f"guest-{number}", echo)
            assert await ask(guest, host.address, "hello") == "hello"
            assert await ask(host, guest.address, "welcome") == "welcome"
            guest.tell(host.address, "x", Bytes(np.zeros(1 << 20, np.uint8)), lane=Lane.BULK)

    def serve(request: Request) -> None:
        if request.header.type == "Text":
            echo(request)

    async with Nodes() as nodes:
        host = nodes("host", serve)
        await visit(0, host)
        await until(lambda: host.peer("guest-0") is None)
        await asyncio.sleep(0.2)
        before, threads = descriptors(), threading.active_count()
        for number in range(1, 11):
            await visit(number, host)
            await until(lambda number=number: host.peer(f"guest-{number}") is None)  # type: ignore[misc]
        await until(lambda: descriptors() <= before)
        assert threading.active_count() == threads
