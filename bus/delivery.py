"""Asks, tells and streams between nodes: deadlines, retries, duplicate suppression, incarnations.

Invariants:

- every ask ends, by its deadline at the latest, in a reply or in an exception that names who waited for whom
  (``bus.asking``);
- an ask takes effect at most once per incarnation of its receiver, however often it is sent (``bus.answering``).
  Across a restart the asker gets ``PeerRestarted`` and decides (``bus.peers``);
- a message whose sender, incarnation or protocol does not fit is counted and dropped, never handled; who asks in
  another version of the protocol is told (``bus.versions``), and so is who asks as an incarnation that has a successor
  (``Superseded``).

``Courier`` knows nodes, not actors: what to do with a request is the ``Serve`` callback's business.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from bus.answering import Answering, Request, Serve
from bus.asking import Asking
from bus.bounds import MAX_FRAMES, Bounds, Mutes
from bus.codec import Decoder, Frame
from bus.message import (
    ERROR,
    PROTOCOL_VERSION,
    REPLY,
    STREAM,
    Failure,
    Header,
    Kind,
    Lane,
    NodeAddress,
    PeerLost,
    PeerRestarted,
    ProtocolMismatch,
    Superseded,
)
from bus.peers import Meeting, Peers, routing_id_of
from bus.refusals import Refusals
from bus.tracing import Traces
from bus.transport import Transport
from bus.versions import ANSWERED, mismatch, preamble
from bus.wire import Wire

__all__ = ["Courier", "Gone", "Request", "Serve"]

T = TypeVar("T")

_ANSWERS = (REPLY, ERROR)


class Gone(Protocol):
    """Called when an incarnation of a node, and with it all before, is known to be gone."""

    def __call__(self, name: str, epoch: int, why: str, *, restarted: bool) -> None: ...


class Courier:
    """See the module docstring."""

    def __init__(
        self,
        transport: Transport,
        serve: Serve,
        on_gone: Gone | None = None,
        *,
        protocol: int = PROTOCOL_VERSION,
        bounds: Bounds | None = None,
    ) -> None:
        """``protocol``: the version that this node speaks; ``bounds``: of what each peer may put on it."""
        self.address = transport.address
        self._on_gone = on_gone
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._peers = Peers()
        self._protocol = protocol
        self._wire = Wire(transport, self._peers, protocol)
        self._refusals = Refusals(self.address.name, self._wire.counters)
        self._asking = Asking(self._wire)
        self._bounds = bounds or Bounds()
        self._mutes = Mutes(self._bounds)
        self._answering = Answering(
            self._wire,
            serve,
            bounds=self._bounds,
            refusals=self._refusals,
            on_unreadable=lambda header: self._mute_too_often(routing_id_of(header.sender)),
        )
        self._decode_header = msgspec.msgpack.Decoder(Header).decode
        self._meant = (self.address.epoch, 0)  # incarnations that a message may be meant for
        transport.start(self._arrive)

    @property
    def traces(self) -> Traces:
        """Where a message that nothing caused gets its trace."""
        return self._wire.traces

    @property
    def counters(self) -> Counter[str]:
        """What happened, by name."""
        return self._wire.counters

    def unfinished(self) -> dict[str, int]:
        """What waits here for an answer, or for its end, by kind; nothing once the courier is closed."""
        return {**self._asking.unfinished(), **self._answering.unfinished()}

    def news(self) -> bool:
        """See ``Transport.news``."""
        return self._transport.news()

    # ---- sending -------------------------------------------------------------------------------------------------

    def tell(self, to: NodeAddress, actor: str, message: Any, *, lane: Lane = Lane.CONTROL) -> None:
        """At most once, in order with what this node sent there on this lane. Raises ``Overloaded``, ``PeerLost`` or
        ``PeerRestarted``."""
        body = self._wire.encode(message)
        self._wire.send(Kind.TELL, to, lane, body=body, type_=type(message).__name__, actor=actor)

    def ask(
        self,
        to: NodeAddress,
        actor: str,
        message: Any,
        reply: Decoder[T],
        *,
        timeout_s: float,
        retries: int = 0,
        lane: Lane = Lane.CONTROL,
        about: str = "",
    ) -> Coroutine[Any, Any, T]:
        """Send and wait for the answer; ``retries`` times it is sent again if none comes. Not to wait any more (by the
        deadline or a cancellation) cancels the handler. Raises ``DeadlineExceeded``, ``PeerLost``, ``PeerRestarted``,
        ``ProtocolMismatch``, ``NoSuchActor``, ``Overloaded``, ``DecodeError`` (the answer is of another type) or
        ``RemoteError`` (the handler raised)."""
        return self._asking.ask(to, actor, message, reply, timeout_s=timeout_s, retries=retries, lane=lane, about=about)

    def stream(
        self,
        to: NodeAddress,
        actor: str,
        message: Any,
        item: Decoder[T],
        *,
        timeout_s: float,
        lane: Lane = Lane.CONTROL,
        about: str = "",
    ) -> AsyncGenerator[T, None]:
        """Yield the receiver's items; ``timeout_s`` bounds the wait for each one. Closing the iterator cancels the
        sender. Raises what ``ask`` raises, and ``PeerLost`` where an item got lost."""
        return self._asking.stream(to, actor, message, item, timeout_s=timeout_s, lane=lane, about=about)

    # ---- receiving -----------------------------------------------------------------------------------------------

    def _arrive(self, lane: Lane, routing_id: bytes, frames: Sequence[Frame], *, more: bool = False) -> None:
        """On the way of every message, so written to be cheap."""
        now = self._loop.time()
        if self._mutes.until and self._mutes.muted(routing_id, now):
            self.counters["muted"] += 1
            return
        try:
            header = self._decode_header(frames[0])
        except (msgspec.MsgspecError, IndexError, RecursionError):
            self._unreadable(lane, routing_id, frames)
            return
        if header.protocol != self._protocol:
            self._unreadable(lane, routing_id, frames)
            return
        sender = header.sender
        if len(frames) > MAX_FRAMES:
            self._malformed(routing_id)
            return
        if not self._peers.hear(routing_id, sender, now) and not self._admits(routing_id, header, now):
            return
        if header.to_epoch not in self._meant:
            self._misdirected(header)
            return
        kind = header.kind
        if kind in _ANSWERS:
            self._asking.on_answer(header, frames[1:], not more)
        elif kind <= STREAM:
            self._answering.on_request(header, frames[1:], lane, now, not more)
        else:
            self._dispatch(header, frames[1:])

    def _admits(self, routing_id: bytes, header: Header, now: float) -> bool:
        """Whether a sender that is not known under this routing id is heard; it is known from then on."""
        sender = header.sender
        meeting = self._peers.meet(sender, now) if routing_id == routing_id_of(sender) else Meeting.FALSE
        match meeting:
            case Meeting.KNOWN:
                return True
            case Meeting.STALE:
                self._supersede(header)
            case Meeting.FALSE:
                self._malformed(routing_id)
            case Meeting.NEW if self._peers.newest(sender.name) is None and len(self._peers) >= self._bounds.peers:
                self._refusals.note("too_many_peers", f"node {sender.name}: {self._bounds.peers} others are known")
            case Meeting.NEW:
                self._admit(sender)
                return True
        return False

    def _supersede(self, header: Header) -> None:
        """Nothing that an incarnation says which has a successor, or is lost, has any effect; who waits is told so."""
        sender = header.sender
        newest = self._peers.newest(sender.name)
        why = "that one is lost here" if newest is None else f"a later one is known, {newest.epoch}"
        text = f"incarnation {sender.epoch} of node {sender.name}: {why}"
        self._refusals.note("stale_epoch", f"messages of {text}")
        if header.kind in ANSWERED:
            body = self._wire.encode(Failure(Superseded.__name__, f"node {self.address.name} refuses {text}"))
            self._wire.tell_superseded(sender, header.id, body)

    def _unreadable(self, lane: Lane, routing_id: bytes, frames: Sequence[Frame]) -> None:
        """No header of this node's protocol: another version's is refused by name, if somebody waits; all else is
        malformed."""
        found = preamble(frames[0]) if frames else None
        if found is None or found.protocol == self._protocol or routing_id != routing_id_of(found.sender):
            self._malformed(routing_id)
            return
        text = mismatch(found.protocol, found.sender.name, self._protocol, self.address.name)
        self._refusals.note("wrong_protocol", f"messages: {text}")
        if found.kind in ANSWERED:
            body = self._wire.encode(Failure(ProtocolMismatch.__name__, text))
            self._wire.try_send(Kind.ERROR, found.sender, lane, body=body, type_="Failure", id_=found.id)
        elif found.kind == Kind.ERROR:
            self._asking.on_mismatch(found.sender.name, found.id, text)

    def _malformed(self, routing_id: bytes) -> None:
        self.counters["malformed"] += 1
        self._mute_too_often(routing_id)

    def _mute_too_often(self, routing_id: bytes) -> None:
        """After another message that could not be read."""
        if self._mutes.unreadable(routing_id, self._loop.time()):
            name = routing_id.decode(errors="replace")[:100]
            self._refusals.note("mutes", f"to hear {name!r} for {self._bounds.muted_s:g} s: too much cannot be read")

    def _admit(self, newest: NodeAddress) -> None:
        """A node's first message: its earlier incarnations are history."""
        earlier = self._peers.admit(newest, self._loop.time())
        why = f"node {newest.name} restarted"
        self._asking.fail(newest.name, range(1, newest.epoch), PeerRestarted, why)
        self._answering.forget(newest.name, newest.epoch - 1)
        if earlier is not None:
            self._wire.leave(earlier)
        self._wire.stay_with(newest)
        if self._on_gone is not None:
            self._on_gone(newest.name, newest.epoch - 1, why, restarted=True)

    def _misdirected(self, header: Header) -> None:
        """Meant for an earlier incarnation of this node: any answer tells the sender that there is a newer one."""
        self.counters["for_earlier_incarnation"] += 1
        self._wire.try_send(Kind.PONG, header.sender)

    def _dispatch(self, header: Header, frames: Sequence[Frame]) -> None:
        match header.kind:
            case Kind.ITEM | Kind.END:
                self._asking.on_item(header, frames)
            case Kind.CREDIT:
                self._answering.on_credit(header)
            case Kind.CANCEL:
                self._answering.on_cancel(header)
            case Kind.PING:
                self._wire.try_send(Kind.PONG, header.sender)
            case Kind.PONG:
                pass  # having been heard is all that matters
            case Kind.BYE:
                self.lose(header.sender, "it has closed")

    # ---- peers ---------------------------------------------------------------------------------------------------

    def peer(self, name: str) -> NodeAddress | None:
        """The newest incarnation of a node that we have heard from."""
        return self._peers.newest(name)

    def is_gone(self, address: NodeAddress) -> bool:
        """Whether an incarnation is lost, or has a successor."""
        return self._peers.refusal(address) is not None

    def ping(self, to: NodeAddress) -> None:
        """Ask for a sign of life; ``last_heard`` tells when the last one came."""
        self._wire.try_send(Kind.PING, to)

    def last_heard(self, name: str) -> float | None:
        """Loop time of the newest message from a node; None if nothing ever came."""
        return self._peers.last_heard(name)

    def lose(self, address: NodeAddress, reason: str) -> None:
        """Declare an incarnation dead: whatever waits for it fails at once, and so does what is asked of it later."""
        gone = self._peers.lose(address, reason)
        if gone is None:
            return
        self._asking.fail(gone.name, range(gone.epoch + 1), PeerLost, f"node {gone.name} is lost: {reason}")
        self._answering.forget(gone.name, gone.epoch)
        self._wire.leave(gone)
        if self._on_gone is not None:
            self._on_gone(gone.name, gone.epoch, f"node {gone.name} is lost: {reason}", restarted=False)

    def close(self) -> None:
        """Fail what still waits, take leave of the peers, and close the transport."""
        self._asking.close("this node is closing")
        self._answering.close()
        for peer in self._peers.all():
            self._wire.try_send(Kind.BYE, peer)
        self._transport.close()
