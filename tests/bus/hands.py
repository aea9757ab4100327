"""A network carried by hand: couriers whose messages go where, and when, a test takes them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from bus.codec import Frame
from bus.delivery import Courier, Request
from bus.message import Header, Kind, Lane, NodeAddress, Overloaded
from bus.transport import Receive


class Message(msgspec.Struct, array_like=True):
    """What a node handed to its transport."""

    to: NodeAddress
    lane: Lane
    frames: list[bytes]

    @property
    def header(self) -> Header:
        return msgspec.msgpack.decode(self.frames[0], type=Header)

    @property
    def kind(self) -> Kind:
        return self.header.kind


class HandTransport:
    """Keeps what is sent; hands over what it is given."""

    def __init__(self, name: str, epoch: int) -> None:
        self.address = NodeAddress(name, f"tcp://{name}:1", f"tcp://{name}:2", epoch)
        self.sent: list[Message] = []
        self.disconnected: list[NodeAddress] = []
        self.kept: dict[str, set[str]] = {}
        self.counters: Counter[str] = Counter()
        self.full = False
        self.receive: Receive | None = None

    def start(self, receive: Receive) -> None:
        self.receive = receive

    def send(self, to: NodeAddress, lane: Lane, frames: Sequence[Frame]) -> None:
        if self.full:
            raise Overloaded(f"too much waits for {to.name}")
        self.sent.append(Message(to, lane, [bytes(frame) for frame in frames]))

    def disconnect(self, peer: NodeAddress) -> None:
        self.disconnected.append(peer)

    def expect(self) -> None:
        """Whoever is driven by hand does not look for anything."""

    def news(self) -> bool:
        return False

    def keep(self, name: str, endpoints: Collection[str]) -> None:
        self.kept[name] = set(endpoints)

    def close(self) -> None:
        self.receive = None


class Hand:
    """A courier on such a transport; what it is asked lands in ``requests``."""

    def __init__(
        self, name: str, epoch: int = 1, serve: Callable[[Request], None] | None = None, **options: Any
    ) -> None:
        self.requests: list[Request] = []
        self.transport = HandTransport(name, epoch)
        self.address = self.transport.address
        self.courier = Courier(self.transport, serve or self.requests.append, **options)

    def sent(self) -> list[Message]:
        """Take what was sent since the last call."""
        taken = list(self.transport.sent)
        self.transport.sent.clear()
        return taken

    def take(self, message: Message, *, routing_id: bytes | None = None) -> None:
        """Let a message arrive here."""
        if routing_id is None:
            sender = message.header.sender
            routing_id = f"{sender.name}/{sender.epoch}".encode()
        assert self.transport.receive is not None
        self.transport.receive(message.lane, routing_id, message.frames)


def carry(source: Hand, target: Hand) -> list[Message]:
    """All that one sent goes to the other; returns it."""
    messages = source.sent()
    for message in messages:
        target.take(message)
    return messages


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)
