"""What travels between nodes: headers, addresses, and the errors that delivery can end in.

The bus knows nothing of reinforcement learning. A message on the wire is a list of frames: a ``Header``, the body
(msgpack of one struct), then one frame for every large array in the body.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

PROTOCOL_VERSION = 1

MAX_BUDGET_S = 1e9


class Kind(enum.IntEnum):
    """What a frame asks of its receiver."""

    TELL = 0
    ASK = 1
    REPLY = 2
    ERROR = 3
    STREAM = 4  # open a stream of replies
    ITEM = 5  # one item of a stream; ``sequence`` counts from 0
    END = 6  # the stream is complete; ``sequence`` is the number of its items
    CREDIT = 7  # ``sequence`` items may be sent in all: a total, so that one that is lost or doubled does no harm
    CANCEL = 8  # nobody reads the stream any more, or waits for the answer
    PING = 9
    PONG = 10
    BYE = 11  # this incarnation closes: nothing more will come of it


class Lane(enum.IntEnum):
    """Control and bulk travel on separate connections, so that a tensor never delays an ABORT. Order is kept per
    sender and lane."""

    CONTROL = 0
    BULK = 1


# On the way of every message these names are used: to look a member up in its enum takes fifteen times as long.
TELL, ASK, REPLY, ERROR, STREAM = Kind.TELL, Kind.ASK, Kind.REPLY, Kind.ERROR, Kind.STREAM
CONTROL, BULK = Lane.CONTROL, Lane.BULK


class NodeAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where one incarnation of a node listens. ``epoch`` 0 stands for whichever incarnation answers there."""

    name: str
    control: str  # ZeroMQ endpoint
    bulk: str
    epoch: int = 0


class Header(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """First frame of every message. It says where its sender listens, so that no message depends on an earlier one
    having arrived."""

    protocol: int = PROTOCOL_VERSION
    kind: Kind
    to: str  # actor name at the receiver
    sender: NodeAddress
    to_epoch: int  # incarnation meant; 0 is any
    id: int  # of the ask or stream, unique within the sender's incarnation; 0 for a tell
    type: str = ""  # name of the body's struct
    budget_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_BUDGET_S)] = 0.0  # what is left of the sender's deadline
    sequence: int = 0
    trace: Annotated[int, msgspec.Meta(ge=0)] = 0  # see bus.tracing; of a request
    oldest: int = 0  # of an ask with retries: the earliest one that the sender still waits for here; else 0


class Failure(msgspec.Struct, frozen=True):
    """Body of an ERROR: what a handler raised, or why the message reached none."""

    kind: str  # class name of the exception
    message: str
    traceback: str = ""


class BusError(RuntimeError):
    """Base of what delivery raises."""


class DeadlineExceeded(BusError):
    """Nobody answered in time; the message names who waited for whom, over what, and for how long."""


class PeerLost(BusError):
    """The node is gone: its process ended, it closed, it stopped answering heartbeats, or it cannot be reached."""


class PeerRestarted(PeerLost):
    """The incarnation that was addressed is gone and has a successor: the caller decides whether to ask that one."""


class Superseded(PeerLost):
    """For that node this one is gone: it has heard of a later incarnation, or has given this one up as lost, and does
    nothing that it says any more."""


class ProtocolMismatch(BusError):
    """The node is of another version; the message names both."""


class NoSuchActor(BusError):
    """The node answers, but no actor of that name accepts the message."""


class NotBegun(NoSuchActor):
    """The message reached no handler, and so had no effect."""


class ActorStopped(NoSuchActor):
    """The actor ended while it handled the message, which may have had its effect."""


class CannotListen(BusError):
    """The address that a node was to listen on is taken, or not one of this host's."""


class Overloaded(BusError):
    """The receiver's mailbox, or the connection to it, is full."""


class DecodeError(BusError):
    """Frames that are not a well-formed message."""


class RemoteError(BusError):
    """A handler raised; ``kind`` is the class name of its exception."""

    def __init__(self, where: str, failure: Failure) -> None:
        super().__init__(f"{where}: {failure.kind}: {failure.message}")
        self.kind = failure.kind
        self.remote_message = failure.message
        self.remote_traceback = failure.traceback
