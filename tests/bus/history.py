"""What nodes did, as a list of events: who sent what to whom, which incarnation handled it, and how it ended.

``tests.bus.semantics`` judges it, whether it comes of the simulated network or of processes over ZeroMQ.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["tell", "ask", "stream"]


class Life(msgspec.Struct, frozen=True, order=True):
    """An incarnation of a node."""

    node: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.node}/{self.epoch}"


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    at: float  # seconds on the one clock of all nodes
    life: Life  # where it happened


class Up(Event, frozen=True):
    """From now on it listens."""


class Staffed(Event, frozen=True):
    """Its actor is there."""


class Down(Event, frozen=True):
    """From now on it does nothing more (it was killed), or it begins to close."""

    killed: bool


class Lost(Event, frozen=True):
    """This incarnation was told, or concluded, that another one is gone."""

    other: Life


class Sent(Event, frozen=True):
    """About to send."""

    op: int
    kind: Kind
    to: str
    epoch: int  # of the receiver; 0 is whichever answers
    lane: int = 0
    retries: int = 0
    timeout_s: float = 0.0
    fails: bool = False  # its handler is to raise
    items: int = 0  # of a stream
    vanished: bool = False  # there is no such actor
    late: bool = False  # its handler takes longer than it has
    in_turn: bool = True  # its handler begins when its turn comes, not beside others
    lends: bool = False  # its handler fetches an object of the asker's
    named: bool = False  # to whatever a name stands for: at most once, wherever that is


class Dropped(Event, frozen=True):
    """The network, or the sender, says that this request was not delivered."""

    op: int


class Refused(Event, frozen=True):
    """There was no room for a tell, or nobody to take it; which one is not known."""


class Handled(Event, frozen=True):
    """A handler took it up."""

    op: int
    by: Life  # who says it sent it


class Yielded(Event, frozen=True):
    """An item of a stream was accepted for sending."""

    op: int
    index: int


class Finished(Event, frozen=True):
    """The handler of a stream ended, for whatever reason."""

    op: int


class Taken(Event, frozen=True):
    """A reader got an item."""

    op: int
    index: int


class Ended(Event, frozen=True):
    """An ask or a stream ended at its asker: "reply", "end", "left" (by its reader) or the name of an error."""

    op: int
    how: str
    answered: Life | None = None  # who handled it, as the reply says
    about: int = 0  # which op the reply answers
    remote: str = ""  # of a RemoteError: what the handler raised


class Watched(Event, frozen=True):
    """From now on it wants to be told when an actor ends."""

    watch: int
    to: str
    epoch: int
    vanished: bool = False


class Told(Event, frozen=True):
    """It is told."""

    watch: int
    kind: str


class Unwatched(Event, frozen=True):
    """It no longer wants to be."""

    watch: int


AnyEvent = (
    Up
    | Staffed
    | Down
    | Lost
    | Sent
    | Dropped
    | Refused
    | Handled
    | Yielded
    | Finished
    | Taken
    | Ended
    | Watched
    | Told
    | Unwatched
)


class History(msgspec.Struct):
    """All events in the order in which they happened."""

    events: list[AnyEvent]
    orderly: bool = True  # the network neither doubles nor overtakes, as TCP
    calm: bool = False  # nothing was lost, cut or killed: everything must succeed
    crowded: bool = False  # mailboxes and connections hold hardly anything
    left_over: list[str] = []
    slack_s: float = 0.0  # by which real time may be late
    over_at: float = 1e18  # when the last nodes begin to close: by then everything must have come to its end
