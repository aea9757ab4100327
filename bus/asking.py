"""The asking side of delivery: asks and streams of this node that wait for their answers.

Invariant: every ask ends, by its deadline at the latest, in a reply of the declared type or in an exception that
names who waited for whom; every stream ends in all of its items, in order, or in such an exception.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, TypeVar

from bus.codec import Decoder, Frame
from bus.deadlines import Deadlines
from bus.message import (
    ASK,
    CONTROL,
    ERROR,
    MAX_BUDGET_S,
    ActorStopped,
    BusError,
    DeadlineExceeded,
    DecodeError,
    Failure,
    Header,
    Kind,
    Lane,
    NodeAddress,
    NoSuchActor,
    NotBegun,
    Overloaded,
    PeerLost,
    PeerRestarted,
    ProtocolMismatch,
    RemoteError,
    Superseded,
)
from bus.waiting import Asked, End, Reading
from bus.wire import Wire

T = TypeVar("T")

WINDOW = 16
"""Items of a stream in flight before the sender waits for credit."""

RESEND_AFTER_S = 2.0
"""An ask with retries is sent again after this long without an answer."""

_AS_THEMSELVES = {
    kind.__name__: kind
    for kind in (NoSuchActor, NotBegun, ActorStopped, Overloaded, DecodeError, DeadlineExceeded, Superseded)
}


class Asking:
    """See the module docstring."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._failures: Decoder[Failure] = Decoder(Failure)
        self._ids = itertools.count(1)
        self._asked: dict[int, Asked] = {}
        self._deadlines = Deadlines(self._loop)
        self._reading: dict[int, Reading] = {}
        self._repeated: dict[str, dict[int, None]] = {}  # node -> asks with retries that wait, oldest first

    # ---- asks ----------------------------------------------------------------------------------------------------

    async def ask(
        self,
        to: NodeAddress,
        actor: str,
        message: Any,
        reply: Decoder[T],
        *,
        timeout_s: float,
        retries: int,
        lane: Lane,
        about: str,
    ) -> T:
        """See ``Courier.ask``."""
        body = self._wire.encode(message)
        deadline = self._loop.time() + timeout_s
        asked = Asked(
            self._loop,
            to,
            actor,
            type_=type(message).__name__,
            lane=lane,
            decoder=reply,
            body=body,
            deadline=deadline,
            retries=retries,
            about=about,
        )
        id_ = next(self._ids)
        self._asked[id_] = asked
        if retries:
            self._repeated.setdefault(to.name, {})[id_] = None
        number = self._deadlines.add(deadline, partial(self._expire, asked, timeout_s))
        try:
            try:
                self._send(id_, asked)
            except (PeerLost, PeerRestarted, Overloaded) as error:
                raise type(error)(f"{asked.what}: {error}") from None
            if lane is CONTROL:
                self._wire.expect()
            try:
                result: T = await asked
            finally:
                if asked.expired or asked.cancelled:
                    self._wire.try_send(Kind.CANCEL, to, lane, id_=id_)  # behind the ask, never before it
            return result
        finally:
            self._deadlines.over(number)
            self._forget(id_, asked)

    def _forget(self, id_: int, asked: Asked) -> None:
        del self._asked[id_]
        if asked.resend is not None:
            asked.resend.cancel()
        if asked.retries:
            waiting = self._repeated[asked.to.name]
            del waiting[id_]
            if not waiting:
                del self._repeated[asked.to.name]

    def _send(self, id_: int, asked: Asked, sent: int = 0) -> None:
        """Send an ask, for the first time or again, with what is left of its time."""
        if sent < asked.retries:
            asked.resend = self._loop.call_later(RESEND_AFTER_S, self._resend, id_, asked, sent + 1)
        self._wire.send(
            ASK,
            asked.to,
            asked.lane,
            body=asked.body,
            type_=asked.type,
            actor=asked.actor,
            id_=id_,
            budget_s=_budget(asked.deadline - self._loop.time()),
            oldest=next(iter(self._repeated[asked.to.name])) if asked.retries else 0,
        )

    def _resend(self, id_: int, asked: Asked, sent: int) -> None:
        if asked.settled:
            return
        self._wire.counters["resent"] += 1
        asked.again = True
        try:
            self._send(id_, asked, sent)
        except BusError:
            self._wire.counters["unsent_ask"] += 1

    def _expire(self, asked: Asked, timeout_s: float) -> None:
        if not asked.settled:
            self._wire.counters["deadlines"] += 1
            asked.expired = True
            who = f"{self._wire.address.name} waited for {asked.what}"
            asked.fail(DeadlineExceeded(f"{who}: no answer within {timeout_s:g} s"))

    # ---- streams -------------------------------------------------------------------------------------------------

    async def stream(
        self, to: NodeAddress, actor: str, message: Any, item: Decoder[T], *, timeout_s: float, lane: Lane, about: str
    ) -> AsyncGenerator[T, None]:
        """See ``Courier.stream``."""
        type_ = type(message).__name__
        what = f"{type_} stream from {actor}@{to.name}" + (f" ({about})" if about else "")
        id_ = next(self._ids)
        reading = self._reading[id_] = Reading(to, item, what)
        over = True
        try:
            body = self._wire.encode(message)
            try:
                self._wire.send(
                    Kind.STREAM, to, lane, body=body, type_=type_, actor=actor, id_=id_, budget_s=_budget(timeout_s)
                )
            except (PeerLost, PeerRestarted, Overloaded) as error:
                raise type(error)(f"{what}: {error}") from None
            over = False
            for taken in itertools.count(1):
                value = await self._next(reading, timeout_s, taken - 1)
                if isinstance(value, End):
                    over = True
                    if value.error is not None:
                        raise value.error
                    return
                if taken % (WINDOW // 2) == 0:
                    self._wire.try_send(Kind.CREDIT, to, id_=id_, sequence=taken + WINDOW)
                yield value
        finally:
            del self._reading[id_]
            if not over:
                self._wire.try_send(Kind.CANCEL, to, id_=id_)

    async def _next(self, reading: Reading, timeout_s: float, taken: int) -> Any:
        try:
            return await reading.next(timeout_s)
        except TimeoutError:
            self._wire.counters["deadlines"] += 1
            who = f"{self._wire.address.name} waited for {reading.what}"
            raise DeadlineExceeded(f"{who}: no item within {timeout_s:g} s, after {taken}") from None

    # ---- what arrives --------------------------------------------------------------------------------------------

    def on_answer(self, header: Header, frames: Sequence[Frame], at_once: bool) -> None:
        """A REPLY or an ERROR; whoever waits for a reply goes on within this call (``at_once``)."""
        asked = self._asked.get(header.id)
        if asked is not None and asked.to.name == header.sender.name and not asked.settled:
            self._settle(asked, header, frames, at_once)
            return
        reading = self._reading.get(header.id)
        if reading is not None and reading.to.name == header.sender.name and header.kind is Kind.ERROR:
            reading.end(self._error(reading.what, frames))
            return
        self._wire.counters["late_answers"] += 1

    def on_mismatch(self, name: str, id_: int, text: str) -> None:
        """What was asked of a node reached one of another version."""
        asked, reading = self._asked.get(id_), self._reading.get(id_)
        if asked is not None and asked.to.name == name and not asked.settled:
            asked.fail(ProtocolMismatch(f"{asked.what}: {text}"))
        elif reading is not None and reading.to.name == name:
            reading.end(ProtocolMismatch(f"{reading.what}: {text}"))

    def _settle(self, asked: Asked, header: Header, frames: Sequence[Frame], at_once: bool) -> None:
        if header.kind is ERROR:
            asked.fail(self._refusal(asked, frames))
            return
        try:
            answer = _decode(asked.decoder, header, frames)
        except DecodeError as error:
            asked.fail(DecodeError(f"{asked.what}: {error}"))
        else:
            asked.settle(answer, at_once=at_once)

    def _refusal(self, asked: Asked, frames: Sequence[Frame]) -> BusError:
        """An incarnation can say that it did not begin an ask, but not that an earlier one did not."""
        error = self._error(asked.what, frames)
        if isinstance(error, NotBegun) and asked.again and asked.to.epoch == 0:
            return NoSuchActor(f"{error} (it was sent before, perhaps to an earlier incarnation)")
        return error

    def _error(self, what: str, frames: Sequence[Frame]) -> BusError:
        try:
            failure = self._failures.decode(frames)
        except DecodeError as error:
            return DecodeError(f"{what}: {error}")
        kind = _AS_THEMSELVES.get(failure.kind)
        return RemoteError(what, failure) if kind is None else kind(f"{what}: {failure.message}")

    def on_item(self, header: Header, frames: Sequence[Frame]) -> None:
        """An ITEM or the END of a stream."""
        reading = self._reading.get(header.id)
        if reading is None or reading.to.name != header.sender.name:
            self._wire.counters["late_items"] += 1
            return
        if header.sequence != reading.expected:
            lost = f"item {reading.expected} was lost on the way (the next to arrive is {header.sequence})"
            reading.end(PeerLost(f"{reading.what}: {lost}"))
        elif header.kind is Kind.END:
            reading.end()
        elif reading.items.qsize() >= WINDOW:
            reading.end(Overloaded(f"{reading.what}: more than {WINDOW} items came without credit"))
        else:
            reading.expected += 1
            try:
                reading.items.put_nowait(_decode(reading.decoder, header, frames))
            except DecodeError as error:
                reading.end(DecodeError(f"{reading.what}: {error}"))

    # ---- ends ----------------------------------------------------------------------------------------------------

    def fail(self, name: str, epochs: range, kind: type[BusError], why: str) -> None:
        """End what waits for some incarnations of a node (0 stands for what was sent to whichever answers)."""
        for asked in self._asked.values():
            if asked.to.name == name and asked.to.epoch in epochs and not asked.settled:
                asked.fail(kind(f"{asked.what}: {why}"))
        for reading in self._reading.values():
            if reading.to.name == name and reading.to.epoch in epochs:
                reading.end(kind(f"{reading.what}: {why}"))

    def unfinished(self) -> dict[str, int]:
        """What waits for an answer."""
        repeated = sum(map(len, self._repeated.values()))
        return {"asks": len(self._asked), "asks_with_retries": repeated, "streams_read": len(self._reading)}

    def close(self, why: str) -> None:
        """End everything that waits."""
        self._deadlines.close()
        for asked in self._asked.values():
            if not asked.settled:
                asked.fail(PeerLost(f"{asked.what}: {why}"))
        for reading in self._reading.values():
            reading.end(PeerLost(f"{reading.what}: {why}"))


def _decode(decoder: Decoder[T], header: Header, frames: Sequence[Frame]) -> T:
    """A body of the declared type; one of another type does not pass because its fields happen to fit."""
    expected = decoder.type
    if isinstance(expected, type) and expected.__name__ != header.type:
        raise DecodeError(f"answered with {header.type}, expected {expected.__name__}")
    try:
        return decoder.decode(frames)
    except DecodeError as error:
        raise DecodeError(f"answered with {header.type}: {error}") from None


def _budget(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_BUDGET_S)
