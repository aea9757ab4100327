"""Whatever arrives, a node goes on and no handler sees a message of another type than its own."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from actors.core import Actor, Node, Ref, handler
from actors.tensors import Tensor
from bus.codec import Decoder, Encoder
from bus.message import BusError, Failure, Header, Kind, Lane, NodeAddress
from bus.packing import PACKED_FRAMES, packed, unpacked
from tests.bus.hands import HandTransport, settle

pytestmark = pytest.mark.virtual_time  # a busy machine takes long over so many, and nothing here waits

SENDER = NodeAddress("a", "tcp://a:1", "tcp://a:2", 1)


GROWTH_BYTES = 100 << 20
"""No frame of a fuzzer's is larger than 12 kB, whatever it claims to hold."""


class Part(msgspec.Struct):
    name: str
    weight: float


class Order(msgspec.Struct):
    number: int
    parts: list[Part]
    data: np.ndarray
    note: str | None = None
    weights: Tensor | None = None


class Stream(msgspec.Struct):
    upto: int


class Reply(msgspec.Struct):
    text: str


class Strict(Actor):
    """Checks, by hand, that what it gets is what it declared."""

    def __init__(self) -> None:
        self.orders = 0
        self.wrong: list[Any] = []

    @handler
    async def order(self, message: Order) -> Reply:
        self.orders += 1
        fits = (
            type(message) is Order
            and type(message.number) is int
            and all(type(p) is Part and type(p.name) is str and type(p.weight) is float for p in message.parts)
            and type(message.data) is np.ndarray
            and message.data.dtype.kind in "biuf"
            and (message.note is None or type(message.note) is str)
            and (message.weights is None or _is_tensor(message.weights))
        )
        if not fits:
            self.wrong.append(message)
        return Reply("done")

    @handler
    async def stream(self, message: Stream) -> Any:
        if type(message.upto) is not int:
            self.wrong.append(message)
        yield Reply("item")


def _is_tensor(found: Any) -> bool:
    """Of a type that travels, and all of its elements are there."""
    if type(found) is not torch.Tensor or found.dtype.is_complex:
        return False
    return found.is_contiguous() and found.untyped_storage().nbytes() == found.nbytes


def header(kind: Kind, type_: str, sender: NodeAddress) -> Header:
    return Header(kind=kind, to="strict", sender=sender, to_epoch=2, id=7, type=type_, budget_s=1.0, oldest=1)


def bodies() -> list[tuple[Kind, str, list[bytes]]]:
    """Well-formed messages of every kind."""
    encode = Encoder().encode
    small = Order(1, [Part("bolt", 0.5), Part("nut", 0.25)], np.arange(6, dtype=np.int32).reshape(2, 3), "soon")
    large = Order(2, [], np.zeros(3000, np.float32))
    bits = Order(3, [], np.zeros(1), weights=torch.ones(2, 3, dtype=torch.bfloat16))
    many = Order(4, [], np.zeros(1), weights=torch.ones(50, 60).to(torch.float8_e4m3fn))
    known: dict[Kind, list[Any]] = {
        Kind.TELL: [small, large, bits, many],
        Kind.ASK: [small, large, bits, many],
        Kind.STREAM: [Stream(3)],
        Kind.REPLY: [Reply("x")],
        Kind.ITEM: [Reply("x")],
    }
    messages = [
        (kind, type(body).__name__, [bytes(frame) for frame in encode(body)])
        for kind, samples in known.items()
        for body in samples
    ]
    return messages + [(kind, "", []) for kind in Kind if kind not in known]


def flip(rng: random.Random, frame: bytes) -> bytes:
    changed = bytearray(frame or b"\0")
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def cut(rng: random.Random, frame: bytes) -> bytes:
    return frame[: rng.randrange(len(frame) + 1)]


def insert(rng: random.Random, frame: bytes) -> bytes:
    at = rng.randrange(len(frame) + 1)
    return frame[:at] + rng.randbytes(rng.randint(1, 8)) + frame[at:]


def swap_value(rng: random.Random, frame: bytes) -> bytes:
    """Well-formed msgpack with a value of another type, or a key of another name, somewhere inside."""
    try:
        value = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, RecursionError):
        return frame
    odd: list[Any] = [
        None,
        True,
        -1,
        2**63,
        1.5,
        "x",
        b"x",
        [],
        {},
        [[[]]],
        ["|O", [1], b"12345678"],
        ["<f4", [2**62], b"1234"],
        ["bfloat16", [2], b"1234"],
        ["|b1", [4], b"1234"],
    ]
    return msgspec.msgpack.encode(_replace_one(rng, value, rng.choice(odd)))


def _replace_one(rng: random.Random, value: Any, odd: Any) -> Any:
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], _replace_one(rng, value[at], odd), *value[at + 1 :]]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        if rng.random() < 0.2:
            return {(k if k != key else "other"): v for k, v in value.items()}
        return {k: (v if k != key else _replace_one(rng, v, odd)) for k, v in value.items()}
    return odd


def lie(rng: random.Random, frame: bytes) -> bytes:
    """Somewhere inside, a collection or text that claims to be far longer than the frame."""
    heads = [b"\xdc", b"\xde", b"\xda", b"\xc5", b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]
    head = rng.choice(heads)
    claim = b"\xff\xff" if head in heads[:4] else rng.choice([b"\xff\xff\xff\xff", b"\x10\x00\x00\x00"])
    at = rng.randrange(len(frame) + 1)
    return frame[:at] + head + claim + frame[at + rng.choice([0, 1]) :]


def deepen(rng: random.Random, frame: bytes) -> bytes:
    """Nested beyond all measure, from some place on."""
    at = rng.randrange(len(frame) + 1)
    return frame[:at] + rng.choice([b"\x91", b"\x81\x01", b"\x81\xa4data"]) * 5_000 + frame[at:]


def append_depth(rng: random.Random, frame: bytes) -> bytes:
    """More elements than expected at the end of an array, as later versions have, and those nested beyond all
    measure."""
    if not frame or not 0x90 <= frame[0] < 0x9F:
        return deepen(rng, frame)
    return bytes([frame[0] + 1]) + frame[1:] + rng.choice([b"\x91", b"\x81\x01"]) * 5_000 + b"\xc0"


def noise(rng: random.Random, frame: bytes) -> bytes:
    return rng.randbytes(rng.randrange(64))


MUTATIONS: list[Callable[[random.Random, bytes], bytes]] = [
    *[flip, cut, insert, swap_value, swap_value, noise, lie] * 3,
    deepen,
    append_depth,
]


def mutate(rng: random.Random, message: list[bytes]) -> list[bytes]:
    frames = list(message)
    for _ in range(rng.randint(1, 2)):
        choice = rng.random()
        if choice < 0.05 and frames:
            del frames[rng.randrange(len(frames))]
        elif choice < 0.1:
            frames.insert(rng.randrange(len(frames) + 1), rng.choice(frames or [b""]))
        elif frames:
            at = rng.randrange(len(frames))
            frames[at] = rng.choice(MUTATIONS)(rng, frames[at])
    return frames


class Peak:
    """How far the memory of this process has grown at most since the last call."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # sets the kernel's high-water mark to what is in use now
        self._before = self._high()

    def _high(self) -> int:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024

    def grown(self) -> int:
        return self._high() - self._before


async def bombard(count: int, seed: int) -> None:
    rng, peak = random.Random(seed), Peak()
    transport = HandTransport("b", 2)
    async with Node("b", transport=transport) as node:
        actor = Strict()
        ref = await node.spawn(lambda: actor, "strict")
        assert transport.receive is not None
        messages = bodies()
        for number in range(1, count + 1):
            kind, type_, body = rng.choice(messages)
            if rng.random() < 0.05:
                body = rng.choice(messages)[2]  # a well-formed body of another type
            sender = msgspec.structs.replace(SENDER, epoch=number)  # else one BYE would shut all others out
            frames = [msgspec.msgpack.encode(header(kind, type_, sender)), *body]
            transport.receive(rng.choice(list(Lane)), f"a/{number}".encode(), mutate(rng, frames))
            if number % 50 == 0:
                await settle()  # let the handlers run
                transport.sent.clear()
        await settle()
        assert actor.wrong == []
        assert actor.orders > count / 200, "mutations that are harmless must still be served, or nothing was tested"
        assert node.describe()["counters"]["malformed"] > count / 10
        assert peak.grown() < GROWTH_BYTES
        await serves_still(node, transport, ref)


async def serves_still(node: Node, transport: HandTransport, ref: Ref) -> None:
    transport.sent.clear()
    body = [bytes(frame) for frame in Encoder().encode(Order(1, [], np.zeros(1)))]
    assert transport.receive is not None
    sender = msgspec.structs.replace(SENDER, name="c")
    ask = header(Kind.ASK, "Order", sender)
    transport.receive(Lane.CONTROL, b"c/1", [msgspec.msgpack.encode(ask), *body])
    await settle()
    (answer,) = transport.sent
    assert answer.kind is Kind.REPLY
    assert Decoder(Reply).decode(answer.frames[1:]) == Reply("done")
    assert (await node.ask(ref, Order(1, [], np.zeros(1)), Reply, timeout_s=10)).text == "done"


async def deceive(count: int, seed: int) -> None:
    """The other way: mutated answers and items for what a node asked of another one."""
    rng, peak = random.Random(seed), Peak()
    transport = HandTransport("b", 2)
    outcomes: list[Any] = []
    served = {Kind.ASK: [(Kind.REPLY, 0)], Kind.STREAM: [(Kind.ITEM, 0), (Kind.ITEM, 1), (Kind.END, 2)]}
    answer = [bytes(frame) for frame in Encoder().encode(Reply("x"))]
    failure = [bytes(frame) for frame in Encoder().encode(Failure("ValueError", "no"))]
    async with Node("b", transport=transport) as node:
        assert transport.receive is not None
        for number in range(1, count + 1):
            sender = NodeAddress("a", "tcp://a:1", "tcp://a:2", number)  # the one that is asked, and no later one
            asking = asyncio.create_task(outcome(node, Ref(sender, "x"), stream=rng.random() < 0.5))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            (asked,) = [message.header for message in transport.sent if message.kind in served]
            transport.sent.clear()
            mistyped = False
            for kind, sequence in served[asked.kind]:
                head = Header(kind=kind, to="", sender=sender, to_epoch=2, id=asked.id, type="Reply", sequence=sequence)
                body = answer if kind is not Kind.END else []
                if strange := rng.random() < 0.05:
                    head = msgspec.structs.replace(head, type="Total")  # looks alike, and is another thing
                if rng.random() < 0.1:
                    head, body = msgspec.structs.replace(head, kind=Kind.ERROR, type="Failure"), failure
                frames = [msgspec.msgpack.encode(head), *body]
                frames = mutate(rng, frames) if not strange and rng.random() < 0.7 else frames
                mistyped = mistyped or (strange and head.type == "Total" and kind is not Kind.END)
                transport.receive(Lane.CONTROL, f"a/{number}".encode(), frames)
            node.lose(sender, "the test goes on")  # ends what still waits
            outcomes.append(await asking)
            assert not mistyped or isinstance(outcomes[-1], BusError)
            transport.sent.clear()
        kinds = {type(found).__name__ for found in outcomes}
        assert {"list", "Reply", "RemoteError", "DecodeError", "PeerLost"} <= kinds, "all ends of an ask were reached"
        assert [found for found in outcomes if not _is_well_typed(found)] == []
        assert peak.grown() < GROWTH_BYTES


async def outcome(node: Node, to: Ref, *, stream: bool) -> Any:
    """What an ask or a stream ends in."""
    try:
        if stream:
            return [item async for item in node.stream(to, Stream(2), Reply, timeout_s=10)]
        return await node.ask(to, Stream(1), Reply, timeout_s=10)
    except BusError as error:
        return error


def _is_well_typed(found: Any) -> bool:
    if isinstance(found, list):
        return all(_is_well_typed(item) and not isinstance(item, BusError) for item in found)
    return isinstance(found, BusError) or (type(found) is Reply and type(found.text) is str)


async def test_mutated_frames_never_crash_a_node_nor_reach_a_handler_as_something_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL")
    await bombard(20_000, seed=1)


async def test_mutated_answers_reach_nobody_as_something_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    await deceive(5_000, seed=1)


@pytest.mark.parametrize("part", range(2))
def test_mutated_parts_unpack_to_what_was_packed_or_to_nothing(part: int) -> None:
    """Small messages travel as one part; what is none is no message."""
    rng = random.Random(part)
    for _ in range(10_000):
        frames = [rng.randbytes(rng.randrange(40)) for _ in range(rng.randint(1, PACKED_FRAMES))]
        whole = packed(frames) or b""
        assert [bytes(frame) for frame in unpacked(whole)] == frames
        found = unpacked(rng.choice([flip, cut, insert, noise, lie])(rng, whole))
        assert sum(map(len, found)) <= len(whole) + 8
        assert len(found) <= PACKED_FRAMES


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(2, 52))
async def test_a_million_mutated_frames(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    await bombard(20_000, seed)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(2, 12))
async def test_a_hundred_thousand_asks_with_mutated_answers(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    await deceive(10_000, seed)
