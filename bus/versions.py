"""What nodes of different protocol versions understand of each other: enough to refuse each other by name.

Invariant, of every version: a header is a msgpack array that begins with the protocol, the kind, the actor's name, the
sender's address (an array that begins with name, control, bulk and epoch), the incarnation meant, and the id; ASK,
ERROR and STREAM keep their numbers. An ask or a stream of another version is answered with an ERROR of one's own, which
its asker cannot read, but understands.
"""

from __future__ import annotations

import msgspec

from bus.codec import Frame
from bus.message import Kind, NodeAddress

ANSWERED = frozenset([Kind.ASK, Kind.STREAM])
"""Kinds of which somebody waits for the answer. Nothing else is answered: two nodes must not refuse each other in a
circle."""


class Preamble(msgspec.Struct, frozen=True, array_like=True):
    """What a header of any version begins with."""

    protocol: int
    kind: int
    to: str
    sender: NodeAddress
    to_epoch: int
    id: int


_decoder = msgspec.msgpack.Decoder(Preamble)


def preamble(header: Frame) -> Preamble | None:
    """None for what is a header of no version."""
    try:
        return _decoder.decode(header)
    except (msgspec.MsgspecError, RecursionError):
        return None


def mismatch(theirs: int, other: str, ours: int, this: str) -> str:
    """What to tell people."""
    return (
        f"node {other} speaks version {theirs} of the bus protocol, node {this} version {ours}: "
        "install the same version of the library for both"
    )
