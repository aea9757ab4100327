"""Asks, tells and streams between nodes: deadlines, retries, duplicate suppression, incarnations.

Invariants:

- every ask ends, by its deadline at the latest, in a reply or in an exception that names who waited for whom;
- an ask takes effect at most once per incarnation of its receiver, however often it is sent: a repeated id gets the
  recorded answer. Across a restart the asker gets ``PeerRestarted`` and decides;
- a message whose sender, incarnation or protocol does not fit is counted and dropped, never handled.

``Courier`` knows nodes, not actors: what to do with a request is the ``Serve`` callback's business.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from bus.codec import Decoder, Encoder, Frame
from bus.message import (
    PROTOCOL_VERSION,
    DeadlineExceeded,
    DecodeError,
    Failure,
    Header,
    Kind,
    Lane,
    NodeAddress,
    NoSuchActor,
    Overloaded,
    PeerLost,
    PeerRestarted,
    RemoteError,
)
from bus.transport import Transport

T = TypeVar("T")

WINDOW = 16
"""Items of a stream in flight before the sender waits for credit."""

REMEMBERED = 4096
"""Answers kept for duplicate suppression, per node."""

RESEND_AFTER_S = 2.0
"""An ask with retries is sent again after this long without an answer."""


class Request:
    """One arrived TELL, ASK or STREAM, to be answered through its methods (a TELL has no answer)."""

    def __init__(self, courier: Courier, header: Header, frames: Sequence[Frame], lane: Lane) -> None:
        self.header = header
        self.frames = frames
        self.lane = lane
        self._courier = courier

    def decode(self, decoder: Decoder[T]) -> T:
        """The body; raises ``DecodeError``."""
        return decoder.decode(self.frames)

    def reply(self, value: Any) -> None:
        self._courier.answer(self, Kind.REPLY, value)

    def fail(self, error: Failure) -> None:
        self._courier.answer(self, Kind.ERROR, error)

    async def stream(self, items: AsyncIterator[Any]) -> None:
        """Send every item as the asker grants credit, then the end."""
        await self._courier.feed(self, items)


class Serve(Protocol):
    """What a node does with a request."""

    def __call__(self, request: Request) -> None: ...


class _Asked:
    """An ask of ours that waits for its answer."""

    __slots__ = ("decoder", "future", "resend", "timer", "to", "what")

    def __init__(self, to: NodeAddress, what: str, decoder: Decoder[Any], future: asyncio.Future[Any]) -> None:
        self.to = to
        self.what = what
        self.decoder = decoder
        self.future = future
        self.timer: asyncio.TimerHandle | None = None
        self.resend: asyncio.TimerHandle | None = None


class _Reading:
    """A stream that we read."""

    def __init__(self, to: NodeAddress, what: str, decoder: Decoder[Any]) -> None:
        self.to = to
        self.what = what
        self.decoder = decoder
        self.items: asyncio.Queue[Any] = asyncio.Queue()  # bounded by the credit we grant


class _End(msgspec.Struct, frozen=True):
    error: BaseException | None = None


class Courier:
    """See the module docstring."""

    def __init__(self, transport: Transport, serve: Serve) -> None:
        self.address = transport.address
        self.counters: Counter[str] = Counter()
        self._transport = transport
        self._serve = serve
        self._encoder = Encoder()
        self._headers = msgspec.msgpack.Encoder()
        self._header_decoder = msgspec.msgpack.Decoder(Header)
        self._failures: Decoder[Failure] = Decoder(Failure)
        self._hello: Decoder[NodeAddress] = Decoder(NodeAddress)
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._reading: dict[int, _Reading] = {}
        self._peers: dict[str, NodeAddress] = {}
        self._last_seen: dict[str, float] = {}
        self._greeted: set[tuple[str, int]] = set()
        self._answers: OrderedDict[tuple[str, int, int], list[Frame] | None] = OrderedDict()
        self._credits: dict[tuple[str, int, int], asyncio.Semaphore] = {}
        self._feeding: dict[tuple[str, int, int], asyncio.Task[Any]] = {}
        self._lost: dict[str, str] = {}
        transport.start(self._arrive)

    # ---- sending -------------------------------------------------------------------------------------------------

    def tell(self, to: NodeAddress, actor: str, message: Any, *, lane: Lane = Lane.CONTROL) -> None:
        """At most once, in order with what this node sent there on this lane. Raises ``Overloaded``."""
        self._send(to, lane, self._header(Kind.TELL, to, actor, 0, message), message)

    async def ask(
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
    ) -> T:
        """Send and wait for the answer. Raises ``DeadlineExceeded``, ``PeerLost``, ``PeerRestarted``,
        ``NoSuchActor``, ``Overloaded`` or ``RemoteError``."""
        what = f"{type(message).__name__} to {actor}@{to.name}" + (f" ({about})" if about else "")
        if to.name in self._lost:
            raise PeerLost(f"{what}: {self._lost[to.name]}")
        id_ = next(self._ids)
        asked = _Asked(to, what, reply, self._loop.create_future())
        self._asked[id_] = asked
        deadline = self._loop.time() + timeout_s
        asked.timer = self._loop.call_at(deadline, self._expire, id_, timeout_s)
        try:
            header = self._header(Kind.ASK, to, actor, id_, message, budget_s=timeout_s)
            frames = self._send(to, lane, header, message)
            if retries:
                again = self._loop.call_later(RESEND_AFTER_S, self._resend, id_, frames, lane, retries)
                asked.resend = again
            result: T = await asked.future
            return result
        except asyncio.CancelledError:
            self._control(to, Kind.CANCEL, actor, id_)
            raise
        finally:
            del self._asked[id_]
            asked.timer.cancel()
            if asked.resend is not None:
                asked.resend.cancel()

    async def stream(
        self,
        to: NodeAddress,
        actor: str,
        message: Any,
        item: Decoder[T],
        *,
        timeout_s: float,
        lane: Lane = Lane.CONTROL,
        about: str = "",
    ) -> AsyncIterator[T]:
        """Yield the receiver's items; ``timeout_s`` bounds the wait for each one. Closing the iterator cancels the
        sender."""
        what = f"{type(message).__name__} stream from {actor}@{to.name}" + (f" ({about})" if about else "")
        if to.name in self._lost:
            raise PeerLost(f"{what}: {self._lost[to.name]}")
        id_ = next(self._ids)
        reading = _Reading(to, what, item)
        self._reading[id_] = reading
        ended = False
        try:
            self._send(to, lane, self._header(Kind.STREAM, to, actor, id_, message, budget_s=timeout_s), message)
            taken = 0
            while True:
                try:
                    value = await asyncio.wait_for(reading.items.get(), timeout_s)
                except TimeoutError:
                    raise DeadlineExceeded(f"{what}: no item within {timeout_s:g} s, after {taken}") from None
                if isinstance(value, _End):
                    ended = True
                    if value.error is not None:
                        raise value.error
                    return
                taken += 1
                if taken % (WINDOW // 2) == 0:
                    self._control(to, Kind.CREDIT, actor, id_, sequence=WINDOW // 2)
                yield value
        finally:
            del self._reading[id_]
            if not ended:
                self._control(to, Kind.CANCEL, actor, id_)

    def _header(
        self,
        kind: Kind,
        to: NodeAddress,
        actor: str,
        id_: int,
        message: Any,
        *,
        budget_s: float = 0.0,
        sequence: int = 0,
    ) -> Header:
        return Header(
            kind,
            actor,
            self.address.name,
            self.address.epoch,
            to.epoch,
            id_,
            type(message).__name__,
            budget_s,
            sequence,
        )

    def _send(self, to: NodeAddress, lane: Lane, header: Header, message: Any) -> list[Frame]:
        frames: list[Frame] = [self._headers.encode(header), *self._encoder.encode(message)]
        self._greet(to)
        self._transport.send(to, lane, frames)
        return frames

    def _control(self, to: NodeAddress, kind: Kind, actor: str, id_: int, *, sequence: int = 0) -> None:
        """A message without a body; where it cannot be sent the deadline of what it concerns still holds."""
        header = Header(kind, actor, self.address.name, self.address.epoch, to.epoch, id_, "", 0.0, sequence)
        try:
            self._greet(to)
            self._transport.send(to, Lane.CONTROL, [self._headers.encode(header), b""])
        except Overloaded:
            self.counters["control_dropped"] += 1

    def _greet(self, to: NodeAddress) -> None:
        """Before anything else on a connection, say where we listen, so that the peer can answer."""
        if (to.control, to.epoch) in self._greeted:
            return
        self._greeted.add((to.control, to.epoch))
        header = Header(Kind.HELLO, "", self.address.name, self.address.epoch, 0, 0, "")
        frames = [self._headers.encode(header), *self._encoder.encode(self.address)]
        for lane in Lane:
            if lane is Lane.CONTROL or to.bulk:  # a node known only by the address to join has no bulk endpoint yet
                self._transport.send(to, lane, frames)

    def _resend(self, id_: int, frames: list[Frame], lane: Lane, left: int) -> None:
        asked = self._asked.get(id_)
        if asked is None or asked.future.done():
            return
        self.counters["resent"] += 1
        try:
            self._transport.send(asked.to, lane, frames)
        except Overloaded:
            self.counters["resend_dropped"] += 1
        if left > 1:
            asked.resend = self._loop.call_later(RESEND_AFTER_S, self._resend, id_, frames, lane, left - 1)

    def _expire(self, id_: int, timeout_s: float) -> None:
        asked = self._asked.get(id_)
        if asked is not None and not asked.future.done():
            self.counters["deadlines"] += 1
            who = f"{self.address.name} waited for {asked.what}"
            asked.future.set_exception(DeadlineExceeded(f"{who}: no answer within {timeout_s:g} s"))
            self._control(asked.to, Kind.CANCEL, "", id_)

    # ---- answering -----------------------------------------------------------------------------------------------

    def answer(self, request: Request, kind: Kind, value: Any) -> None:
        """Send and remember the answer to an ask."""
        header = request.header
        if header.kind is Kind.TELL:
            return
        to = self._peers.get(header.sender)
        if to is None or to.epoch != header.epoch:
            self.counters["answers_to_gone"] += 1
            return
        if header.kind is Kind.STREAM and kind is Kind.ERROR:
            self._credits.pop((header.sender, header.epoch, header.id), None)
        out = Header(kind, "", self.address.name, self.address.epoch, header.epoch, header.id, type(value).__name__)
        frames: list[Frame] = [self._headers.encode(out), *self._encoder.encode(value)]
        key = (header.sender, header.epoch, header.id)
        if key in self._answers:
            self._answers[key] = frames if request.lane is Lane.CONTROL else None
        self._transport.send(to, request.lane, frames)

    async def feed(self, request: Request, items: AsyncIterator[Any]) -> None:
        """Send a stream's items within the reader's credit; a CANCEL ends it."""
        header = request.header
        key = (header.sender, header.epoch, header.id)
        credit = self._credits.setdefault(key, asyncio.Semaphore(WINDOW))
        task = asyncio.current_task()
        if task is not None:
            self._feeding[key] = task
        sequence = 0
        try:
            async for item in items:
                try:
                    await asyncio.wait_for(credit.acquire(), max(header.budget_s, 1.0))
                except TimeoutError:
                    self.counters["streams_abandoned"] += 1
                    return
                self._item(request, Kind.ITEM, item, sequence)
                sequence += 1
            self._item(request, Kind.END, None, sequence)
        finally:
            self._feeding.pop(key, None)
            self._credits.pop(key, None)

    def _item(self, request: Request, kind: Kind, item: Any, sequence: int) -> None:
        header = request.header
        to = self._peers.get(header.sender)
        if to is None or to.epoch != header.epoch:
            raise PeerLost(f"the reader of a stream, node {header.sender}, is gone")
        out = Header(
            kind, "", self.address.name, self.address.epoch, header.epoch, header.id, type(item).__name__, 0.0, sequence
        )
        self._transport.send(to, request.lane, [self._headers.encode(out), *self._encoder.encode(item)])

    # ---- receiving -----------------------------------------------------------------------------------------------

    def _arrive(self, lane: Lane, routing_id: bytes, frames: list[memoryview]) -> None:
        try:
            header = self._header_decoder.decode(frames[0])
        except (msgspec.MsgspecError, IndexError):
            self.counters["malformed"] += 1
            return
        if header.protocol != PROTOCOL_VERSION:
            self.counters["wrong_protocol"] += 1
            return
        if routing_id != f"{header.sender}/{header.epoch}".encode() or len(frames) < 2:
            self.counters["malformed"] += 1
            return
        if header.to_epoch not in (0, self.address.epoch):
            self._misdirected(header)
            return
        known = self._peers.get(header.sender)
        if known is not None and header.epoch < known.epoch:
            self.counters["stale_epoch"] += 1
            return
        self._last_seen[header.sender] = self._loop.time()
        handle = _HANDLERS[header.kind]
        handle(self, header, frames[1:], lane)

    def _misdirected(self, header: Header) -> None:
        """Meant for an earlier incarnation of this node."""
        self.counters["for_earlier_incarnation"] += 1
        peer = self._peers.get(header.sender)
        if header.kind in (Kind.ASK, Kind.STREAM) and peer is not None:
            out = Header(Kind.ERROR, "", self.address.name, self.address.epoch, header.epoch, header.id, "Failure")
            failure = Failure("PeerRestarted", f"node {self.address.name} restarted since it was addressed")
            self._transport.send(peer, Lane.CONTROL, [self._headers.encode(out), *self._encoder.encode(failure)])

    def _on_hello(self, header: Header, frames: Sequence[Frame], lane: Lane) -> None:
        try:
            address = self._hello.decode(frames)
        except DecodeError:
            self.counters["malformed"] += 1
            return
        if (address.name, address.epoch) != (header.sender, header.epoch):
            self.counters["malformed"] += 1
            return
        known = self._peers.get(address.name)
        if known is not None and known.epoch < address.epoch:
            self._fail_asks(known, PeerRestarted(f"node {known.name} restarted"))
            self._transport.disconnect(known)
            self._greeted.discard((known.control, known.epoch))
        self._peers[address.name] = address
        self._lost.pop(address.name, None)

    def _on_request(self, header: Header, frames: Sequence[Frame], lane: Lane) -> None:
        if header.kind is Kind.ASK:
            key = (header.sender, header.epoch, header.id)
            if key in self._answers:
                self.counters["duplicates"] += 1
                answer, peer = self._answers[key], self._peers.get(header.sender)
                if answer is not None and peer is not None:
                    self._transport.send(peer, lane, answer)
                return
            self._answers[key] = None
            if len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        elif header.kind is Kind.STREAM:
            self._credits[header.sender, header.epoch, header.id] = asyncio.Semaphore(WINDOW)
        self._serve(Request(self, header, frames, lane))

    def _on_answer(self, header: Header, frames: Sequence[Frame], lane: Lane) -> None:
        asked = self._asked.get(header.id)
        if asked is not None:
            if not asked.future.done() and asked.to.name in (header.sender, ""):
                self._settle(asked, header, frames)
            return
        reading = self._reading.get(header.id)
        if reading is not None and header.kind is Kind.ERROR:
            reading.items.put_nowait(_End(self._error(reading.to, reading.what, frames)))
            return
        self.counters["late_answers"] += 1

    def _settle(self, asked: _Asked, header: Header, frames: Sequence[Frame]) -> None:
        if header.kind is Kind.ERROR:
            asked.future.set_exception(self._error(asked.to, asked.what, frames))
            return
        try:
            asked.future.set_result(asked.decoder.decode(frames))
        except DecodeError as error:
            asked.future.set_exception(DecodeError(f"{asked.what}: answered with {header.type}: {error}"))

    def _error(self, to: NodeAddress, what: str, frames: Sequence[Frame]) -> Exception:
        try:
            failure = self._failures.decode(frames)
        except DecodeError as error:
            return error
        for kind in (PeerRestarted, NoSuchActor, Overloaded, DecodeError, DeadlineExceeded):
            if failure.kind == kind.__name__:
                return kind(f"{what}: {failure.message}")
        return RemoteError(what, failure)

    def _on_item(self, header: Header, frames: Sequence[Frame], lane: Lane) -> None:
        reading = self._reading.get(header.id)
        if reading is None:
            self.counters["late_items"] += 1
            return
        if header.kind is Kind.END:
            reading.items.put_nowait(_End())
            return
        try:
            reading.items.put_nowait(reading.decoder.decode(frames))
        except DecodeError as error:
            reading.items.put_nowait(_End(DecodeError(f"{reading.what}: {error}")))

    def _on_credit(self, header: Header, frames: Sequence[Frame], lane: Lane) -> None:
        credit = self._credits.get((header.sender, header.epoch, header.id))
        if credit is not None:
            for _ in range(min(max(header.sequence, 0), WINDOW)):
                credit.release()

    def _on_cancel(self, header: Header, frames: Sequence[Frame], lane: Lane) -> None:
        task = self._feeding.get((header.sender, header.epoch, header.id))
        if task is not None:
            task.cancel()

    def _on_ping(self, header: Header, frames: Sequence[Frame], lane: Lane) -> None:
        peer = self._peers.get(header.sender)
        if peer is not None:
            self._control(peer, Kind.PONG, "", header.id)

    def _on_pong(self, header: Header, frames: Sequence[Frame], lane: Lane) -> None:
        """Having been seen is all that matters."""

    # ---- peers ---------------------------------------------------------------------------------------------------

    def peer(self, name: str) -> NodeAddress | None:
        """The newest incarnation of a node that has greeted us."""
        return self._peers.get(name)

    def ping(self, to: NodeAddress) -> None:
        """Ask for a sign of life; ``silence_s`` tells when the last one came."""
        self._control(to, Kind.PING, "", 0)

    def silence_s(self, name: str) -> float:
        """Seconds since anything came from a node; counted from the first time of asking if nothing ever did."""
        now = self._loop.time()
        return now - self._last_seen.setdefault(name, now)

    def lose(self, address: NodeAddress, reason: str) -> None:
        """Declare an incarnation dead: whatever waits for it fails at once, and so does what is asked of it later,
        until a newer incarnation greets us."""
        known = self._peers.get(address.name)
        if known is not None and address.epoch and known.epoch > address.epoch:
            return
        self._lost[address.name] = reason
        self._fail_asks(address, PeerLost(f"node {address.name} is lost: {reason}"))
        self._transport.disconnect(known or address)
        self._peers.pop(address.name, None)
        self._greeted = {pair for pair in self._greeted if pair[0] != address.control}
        self._last_seen.pop(address.name, None)
        for key, task in list(self._feeding.items()):
            if key[0] == address.name:
                task.cancel()

    def _fail_asks(self, address: NodeAddress, error: Exception) -> None:
        for asked in self._asked.values():
            if asked.to.name == address.name and not asked.future.done():
                asked.future.set_exception(type(error)(f"{asked.what}: {error}"))
        for reading in self._reading.values():
            if reading.to.name == address.name:
                reading.items.put_nowait(_End(type(error)(f"{reading.what}: {error}")))

    def close(self) -> None:
        """Fail what still waits and close the transport."""
        for asked in self._asked.values():
            if not asked.future.done():
                asked.future.set_exception(PeerLost(f"{asked.what}: this node is closing"))
        for task in list(self._feeding.values()):
            task.cancel()
        self._transport.close()


_Handle = Callable[[Courier, Header, Sequence[Frame], Lane], None]
_HANDLERS: dict[Kind, _Handle] = {
    Kind.TELL: Courier._on_request,
    Kind.ASK: Courier._on_request,
    Kind.STREAM: Courier._on_request,
    Kind.REPLY: Courier._on_answer,
    Kind.ERROR: Courier._on_answer,
    Kind.ITEM: Courier._on_item,
    Kind.END: Courier._on_item,
    Kind.CREDIT: Courier._on_credit,
    Kind.CANCEL: Courier._on_cancel,
    Kind.HELLO: Courier._on_hello,
    Kind.PING: Courier._on_ping,
    Kind.PONG: Courier._on_pong,
}
