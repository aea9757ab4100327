"""Whatever arrives, a node goes on and no handler sees a message of another type than its own."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.core import Actor, Node, Ref, handler
from bus.codec import Decoder, Encoder
from bus.message import Header, Kind, Lane, NodeAddress
from tests.bus.hands import HandTransport, settle

SENDER = NodeAddress("a", "tcp://a:1", "tcp://a:2", 1)


class Part(msgspec.Struct):
    name: str
    weight: float


class Order(msgspec.Struct):
    number: int
    parts: list[Part]
    data: np.ndarray
    note: str | None = None


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
        )
        if not fits:
            self.wrong.append(message)
        return Reply("done")

    @handler
    async def stream(self, message: Stream) -> Any:
        if type(message.upto) is not int:
            self.wrong.append(message)
        yield Reply("item")


def header(kind: Kind, type_: str, sender: NodeAddress) -> Header:
    return Header(kind=kind, to="strict", sender=sender, to_epoch=2, id=7, type=type_, budget_s=1.0, oldest=1)


def bodies() -> list[tuple[Kind, str, list[bytes]]]:
    """Well-formed messages of every kind."""
    encode = Encoder().encode
    small = Order(1, [Part("bolt", 0.5), Part("nut", 0.25)], np.arange(6, dtype=np.int32).reshape(2, 3), "soon")
    large = Order(2, [], np.zeros(3000, np.float32))
    known: dict[Kind, list[Any]] = {
        Kind.TELL: [small, large],
        Kind.ASK: [small, large],
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
    except msgspec.MsgspecError:
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


def noise(rng: random.Random, frame: bytes) -> bytes:
    return rng.randbytes(rng.randrange(64))


MUTATIONS: list[Callable[[random.Random, bytes], bytes]] = [flip, cut, insert, swap_value, swap_value, noise]


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


async def bombard(count: int, seed: int) -> None:
    rng = random.Random(seed)
    transport = HandTransport("b", 2)
    async with Node("b", transport=transport) as node:
        actor = Strict()
        ref = await node.spawn(lambda: actor, "strict")
        assert transport.receive is not None
        messages = bodies()
        for number in range(1, count + 1):
            kind, type_, body = rng.choice(messages)
            sender = msgspec.structs.replace(SENDER, epoch=number)  # else one BYE would shut all others out
            frames = [msgspec.msgpack.encode(header(kind, type_, sender)), *body]
            transport.receive(rng.choice(list(Lane)), f"a/{number}".encode(), mutate(rng, frames))
            if number % 50 == 0:
                await settle()  # let the handlers run
                transport.sent.clear()
        await settle()
        assert actor.wrong == []
        assert actor.orders > count / 100, "mutations that are harmless must still be served, or nothing was tested"
        assert node.describe()["counters"]["malformed"] > count / 10
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


async def test_mutated_frames_never_crash_a_node_nor_reach_a_handler_as_something_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL")
    await bombard(20_000, seed=1)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(2, 52))
async def test_a_million_mutated_frames(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    await bombard(20_000, seed)
