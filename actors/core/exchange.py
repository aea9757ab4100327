"""How messages leave and reach the actors of one node.

Messages between actors of one node are handed over directly, as objects; between nodes they are encoded. Both ways
have the same semantics: an ``ask`` ends by its deadline, a ``tell`` that cannot be delivered is counted.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar, overload

from actors.core.actor import HandlerFacts
from actors.core.cell import Cell
from actors.core.dead_letters import DeadLetter, DeadLetters
from actors.core.envelope import Envelope, LocalAsk, LocalStream, Remote
from actors.core.names import Named, Names
from actors.core.ref import Ref
from actors.core.typed import Message, reply_type
from actors.core.watching import NODE_ACTOR
from bus.bounds import Bounds
from bus.codec import Decoder
from bus.deadlines import Deadlines
from bus.delivery import Courier, Gone, Request
from bus.message import (
    STREAM,
    BusError,
    DeadlineExceeded,
    DecodeError,
    Failure,
    Lane,
    NoSuchActor,
    NotBegun,
    Overloaded,
)
from bus.transport import Transport

R = TypeVar("R")
T = TypeVar("T")
log = logging.getLogger(__name__)


class Exchange(ABC):
    """The part of a node that messages pass through."""

    _names: Names

    def __init__(self, transport: Transport, on_gone: Gone, bounds: Bounds | None) -> None:
        self.address = transport.address
        self.loop = asyncio.get_running_loop()
        self.counters: Counter[str] = Counter()
        self._dead_letters = DeadLetters()
        self._cells: dict[str, Cell] = {}
        self._decoders: dict[Any, Decoder[Any]] = {}
        self._closed = False
        self._deadlines = Deadlines(self.loop)
        self._courier = Courier(transport, self._serve, on_gone, bounds=bounds)
        self.traces = self._courier.traces

    @abstractmethod
    def _spokesman(self) -> Cell:
        """The actor that speaks for this node; it begins with the first message to it."""

    # ---- sending -------------------------------------------------------------------------------------------------

    def tell(self, to: Ref | Named, message: Any, *, lane: Lane = Lane.CONTROL) -> None:
        """At most once, no answer. What cannot be delivered is counted under ``dead_letters``."""
        if isinstance(to, Named):
            self._names.tell(to, message, lambda ref, message: self.tell(ref, message, lane=lane))
            return
        try:
            if self.hosts(to):
                cell, facts = self._find(to.actor, type(message), streams=False)
                cell.offer(Envelope(facts, message, self.traces.current()))
            else:
                self._courier.tell(to.node, to.actor, message, lane=lane)
        except BusError as error:
            self.dead_letter(str(to), message, error)

    @overload
    async def ask(
        self,
        to: Ref | Named,
        message: Message[R],
        *,
        timeout_s: float,
        retries: int = 0,
        lane: Lane = Lane.CONTROL,
        about: str = "",
    ) -> R: ...
    @overload
    async def ask(
        self,
        to: Ref | Named,
        message: Any,
        reply: type[T],
        *,
        timeout_s: float,
        retries: int = 0,
        lane: Lane = Lane.CONTROL,
        about: str = "",
    ) -> T: ...
    async def ask(
        self,
        to: Ref | Named,
        message: Any,
        reply: Any = None,
        *,
        timeout_s: float,
        retries: int = 0,
        lane: Lane = Lane.CONTROL,
        about: str = "",
    ) -> Any:
        """Send and wait for the answer. Not to wait any more, by the deadline or a cancellation, cancels the handler.
        The reply is of the type that the message declares (``Message[Total]``), or of the one that is named here.
        Raises what ``bus.delivery.Courier.ask`` raises; a handler's own exception arrives as itself within a node and
        as ``RemoteError`` from another."""
        if reply is None:
            reply = reply_type(type(message))
        if isinstance(to, Named):
            again = partial(self.ask, retries=retries, lane=lane, about=about)
            return await self._ask_by_name(to, message, reply, timeout_s, again)
        if not self.hosts(to):
            decoder = self._decoder(reply)
            return await self._courier.ask(
                to.node, to.actor, message, decoder, timeout_s=timeout_s, retries=retries, lane=lane, about=about
            )
        cell, facts = self._find(to.actor, type(message), streams=False)
        future: asyncio.Future[Any] = self.loop.create_future()
        envelope = LocalAsk(facts, message, self.traces.current(), future)
        cell.offer(envelope)
        expire = partial(self._expire, future, envelope, to, timeout_s, about)
        late = self._deadlines.add(self.loop.time() + timeout_s, expire)
        try:
            answer = await future
        finally:
            self._deadlines.over(late)
            if future.cancelled():
                envelope.cancel()
            elif future.done():
                future.exception()  # seen, also where the asker was cancelled at the same time
        _check_type(answer, reply, to, message)
        return answer

    async def _ask_by_name(
        self, to: Named, message: Any, reply: Any, timeout_s: float, ask: Callable[..., Awaitable[Any]]
    ) -> Any:
        return await self._names.ask(to, timeout_s, lambda ref, left_s: ask(ref, message, reply, timeout_s=left_s))

    def _expire(self, future: asyncio.Future[Any], envelope: Envelope, to: Ref, timeout_s: float, about: str) -> None:
        if not future.done():
            what = f"{type(envelope.message).__name__} to {to}"
            future.set_exception(self._late(what, about, f"no answer within {timeout_s:g} s"))
            envelope.cancel()

    def _late(self, what: str, about: str, how: str) -> DeadlineExceeded:
        self.counters["deadlines"] += 1
        detail = f" ({about})" if about else ""
        return DeadlineExceeded(f"{self.address.name} waited for {what}{detail}: {how}")

    @overload
    def stream(
        self,
        to: Ref | Named,
        message: Message[R],
        *,
        timeout_s: float,
        lane: Lane = Lane.CONTROL,
        about: str = "",
    ) -> AsyncGenerator[R, None]: ...
    @overload
    def stream(
        self,
        to: Ref | Named,
        message: Any,
        item: type[T],
        *,
        timeout_s: float,
        lane: Lane = Lane.CONTROL,
        about: str = "",
    ) -> AsyncGenerator[T, None]: ...
    async def stream(
        self,
        to: Ref | Named,
        message: Any,
        item: Any = None,
        *,
        timeout_s: float,
        lane: Lane = Lane.CONTROL,
        about: str = "",
    ) -> AsyncGenerator[Any, None]:
        """Yield the handler's items; ``timeout_s`` bounds the wait for each. Closing the iterator cancels the handler
        (``contextlib.aclosing`` closes it at once where the loop is left early)."""
        if item is None:
            item = reply_type(type(message))
        if isinstance(to, Named):
            to = await self._names.find(to.name, timeout_s)
        if not self.hosts(to):
            remote = self._courier.stream(
                to.node, to.actor, message, self._decoder(item), timeout_s=timeout_s, lane=lane, about=about
            )
            async with aclosing(remote) as values:
                async for value in values:
                    yield value
            return
        cell, facts = self._find(to.actor, type(message), streams=True)
        stream = LocalStream(facts, message, self.traces.current(), timeout_s)
        cell.offer(stream)

        def late(taken: int) -> DeadlineExceeded:
            how = f"no item within {timeout_s:g} s, after {taken}"
            return self._late(f"{type(message).__name__} stream from {to}", about, how)

        async with aclosing(stream.read(timeout_s, late)) as values:
            async for value in values:
                _check_type(value, item, to, message)
                yield value

    def news(self) -> bool:
        """Whether messages wait that the event loop has not taken yet. One thread, whichever it is, may call this."""
        return self._courier.news()

    def has(self, actor: str) -> bool:
        """Whether an actor of that name lives here."""
        return actor in self._cells

    def hosts(self, to: Ref) -> bool:
        """Whether a ref is to this node."""
        return to.node.control == self.address.control and to.node.epoch in (0, self.address.epoch)

    def _find(self, actor: str, message: str | type, *, streams: bool) -> tuple[Cell, HandlerFacts]:
        """The actor that takes a message, and how. Raises ``NoSuchActor``."""
        cell = self._cells.get(actor)
        if cell is None:
            if actor != NODE_ACTOR or self._closed:
                raise NotBegun(f"there is no actor {actor!r} on node {self.address.name}")
            cell = self._spokesman()
        facts = cell.handlers.get(message if isinstance(message, str) else message.__name__)
        if facts is None or facts.streams is not streams or not (facts.message is message or isinstance(message, str)):
            raise self._unfit(cell, message, facts)
        return cell, facts

    def facts_for(self, cell: Cell, message: type) -> HandlerFacts:
        """How an actor handles what its own node, or a timer, tells it. Raises ``NoSuchActor``."""
        facts = cell.handlers.get(message.__name__)
        if facts is None or facts.streams or facts.message is not message:
            raise self._unfit(cell, message, facts)
        return facts

    def _unfit(self, cell: Cell, message: str | type, facts: HandlerFacts | None) -> NotBegun:
        name = message if isinstance(message, str) else message.__name__
        if facts is None or (facts.message is not message and message is not name):
            return NotBegun(f"{cell.ref} does not handle {name}")
        return NotBegun(f"{cell.ref} answers {name} with {'a stream' if facts.streams else 'one reply'}")

    def dead_letter(self, to: str, message: Any, error: BusError, *, sender: str = "") -> None:
        """Count and keep what cannot be delivered; ``message`` itself, or the name of its type."""
        type_ = message if isinstance(message, str) else type(message).__name__
        sender = sender or self.address.name
        self.counters["dead_letters"] += 1
        if (cell := self._cells.get(to.rpartition("@")[0])) is not None and to == str(cell.ref):
            cell.metrics.dead_letters += 1
        self._dead_letters.add(self.loop.time(), to, type_, sender, str(error))
        level = logging.DEBUG if self._closed else logging.WARNING
        log.log(level, "dead letter %s from %s to %s: %s", type_, sender, to, error)

    def dead_letters(self) -> list[DeadLetter]:
        """The newest messages that reached no handler."""
        return self._dead_letters.newest_first(self.loop.time())

    def _decoder(self, type_: Any) -> Decoder[Any]:
        decoder = self._decoders.get(type_)
        if decoder is None:
            decoder = self._decoders[type_] = Decoder(type_)
        return decoder

    # ---- receiving -----------------------------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        header = request.header
        try:
            cell = self._cells.get(header.to)
            facts = None if cell is None else cell.handlers.get(header.type)
            streams = header.kind is STREAM
            if cell is None or facts is None or facts.streams is not streams:
                cell, facts = self._find(header.to, header.type, streams=streams)
            message = request.decode(self._decoders.get(facts.message) or self._decoder(facts.message))
            cell.offer(Remote(facts, message, request), at_once=request.alone)
        except (NoSuchActor, DecodeError, Overloaded) as error:
            to = f"{header.to}@{self.address.name}"
            self.dead_letter(to, header.type, error, sender=header.sender.name)
            request.fail(Failure(type(error).__name__, str(error)))


def _check_type(answer: Any, expected: Any, to: Ref, message: Any) -> None:
    """What the bus refuses between nodes is refused within one."""
    if isinstance(expected, type) and type(answer) is not expected:
        found = type(answer).__name__
        raise DecodeError(f"{type(message).__name__} to {to}: answered with {found}, expected {expected.__name__}")
