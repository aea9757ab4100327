"""The seam between delivery and the network: real sockets here, a simulated network behind the same protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

from bus.codec import Frame
from bus.message import Lane, NodeAddress


class Receive(Protocol):
    """Called on the event loop, while no task runs, with the lane, the sender's routing id and the frames of one
    message. ``more``: the next one has come already."""

    def __call__(self, lane: Lane, routing_id: bytes, frames: Sequence[Frame], *, more: bool = False) -> None: ...


class Transport(Protocol):
    """Moves lists of frames between nodes; ordered per sender and lane, at most once."""

    @property
    def address(self) -> NodeAddress:
        """Where this node listens."""

    @property
    def counters(self) -> Counter[str]:
        """What happened on the way in and out, by name."""

    def start(self, receive: Receive) -> None:
        """Begin to deliver what arrives."""

    def send(self, to: NodeAddress, lane: Lane, frames: Sequence[Frame]) -> None:
        """Queue a message for a peer, connecting to it where needed. Raises ``Overloaded`` when the connection's
        queue is full, ``PeerLost`` where none can be made, ``ValueError`` for a frame that is too large; never
        blocks."""

    def expect(self) -> None:
        """Called behind a message that will be answered: to hear of the answer soon is worth a little waste."""

    def news(self) -> bool:
        """Whether something has come that was not delivered yet; called from one thread, whichever it is."""

    def disconnect(self, peer: NodeAddress) -> None:
        """Drop what is queued for a peer, and the connections; an empty endpoint stands for none."""

    def keep(self, name: str, endpoints: Collection[str]) -> None:
        """Disconnect from a node, by the name under which it was addressed, anywhere but where it can be reached at
        these endpoints."""

    def close(self) -> None:
        """Close all connections; what is queued gets a short, bounded time to leave. Idempotent."""
