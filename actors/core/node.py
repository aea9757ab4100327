"""One process's share of the system: its actors, its connections, and the watch over its peers.

Messages between actors of one node are handed over directly, as objects; between nodes they are encoded. Both ways
have the same semantics: an ``ask`` ends by its deadline, a ``tell`` that cannot be delivered is counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from actors.core.actor import Actor
from actors.core.cell import Cell, Delivery, StreamEnd
from actors.core.ref import Ref
from bus.codec import Decoder
from bus.delivery import Courier, Request
from bus.message import DeadlineExceeded, DecodeError, Failure, Kind, Lane, NodeAddress, NoSuchActor, Overloaded
from bus.security import ClusterKey
from bus.transport import Transport
from bus.zeromq import ZeroMQTransport

T = TypeVar("T")
log = logging.getLogger(__name__)

PING_EVERY_S = 1.0
MAILBOX_BOUND = 10_000


class Node:
    """Create inside a running event loop; use as ``async with Node("name") as node``."""

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: ClusterKey | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._transport = transport or ZeroMQTransport(name, time.time_ns(), host=host, port=port, key=key)
        self.address = self._transport.address
        self.counters: Counter[str] = Counter()
        self._cells: dict[str, Cell] = {}
        self._decoders: dict[Any, Decoder[Any]] = {}
        self._courier = Courier(self._transport, self._serve)
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._on_give_up: Callable[[Ref, BaseException], None] | None = None
        self._closed = False

    async def __aenter__(self) -> Node:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # ---- actors --------------------------------------------------------------------------------------------------

    async def spawn(
        self, factory: Callable[[], Actor], name: str, *, bound: int = MAILBOX_BOUND, restarts: int = 3
    ) -> Ref:
        """Start an actor under a name that is free on this node; returns once its ``on_start`` has run."""
        if name in self._cells:
            raise ValueError(f"node {self.address.name} has an actor {name!r} already")
        cell = Cell(self, Ref(self.address, name), factory, bound=bound, restarts=restarts)
        type(cell.actor).handlers()
        self._cells[name] = cell
        try:
            await cell.start()
        except BaseException:
            del self._cells[name]
            raise
        return cell.ref

    async def stop(self, ref: Ref) -> None:
        """Stop an actor of this node; unknown ones are ignored."""
        cell = self._cells.pop(ref.actor, None)
        if cell is not None:
            await cell.stop()

    def on_give_up(self, callback: Callable[[Ref, BaseException], None]) -> None:
        """What to do when an actor failed more often than it may be restarted (default: log it)."""
        self._on_give_up = callback

    def give_up(self, ref: Ref, error: BaseException) -> None:
        """Called by supervision: the actor is stopped and the owner of this node is told."""
        self.counters["actors_given_up"] += 1
        log.error("%s failed too often, last with %r: stopped", ref, error)
        self.background(self.stop(ref))
        if self._on_give_up is not None:
            self._on_give_up(ref, error)

    def background(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Run something beside the actors; its failure is logged, never lost."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("background work failed", exc_info=task.exception())

    # ---- sending -------------------------------------------------------------------------------------------------

    def tell(self, to: Ref, message: Any, *, lane: Lane = Lane.CONTROL) -> None:
        """At most once, no answer. What cannot be delivered is counted under ``dead_letters``."""
        try:
            if self._is_local(to):
                self._local(to, message)
            else:
                self._courier.tell(to.node, to.actor, message, lane=lane)
        except (NoSuchActor, Overloaded) as error:
            self.counters["dead_letters"] += 1
            log.warning("dead letter %s to %s: %s", type(message).__name__, to, error)

    async def ask(
        self,
        to: Ref,
        message: Any,
        reply: type[T],
        *,
        timeout_s: float,
        retries: int = 0,
        lane: Lane = Lane.CONTROL,
        about: str = "",
    ) -> T:
        """Send and wait for the answer. Raises what ``bus.delivery.Courier.ask`` raises; a handler's own exception
        arrives as itself within a node and as ``RemoteError`` from another."""
        if not self._is_local(to):
            return await self._courier.ask(
                to.node,
                to.actor,
                message,
                self._decoder(reply),
                timeout_s=timeout_s,
                retries=retries,
                lane=lane,
                about=about,
            )
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._local(to, message, future=future)
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, future, to, message, timeout_s, about)
        try:
            return await future
        finally:
            timer.cancel()

    def _expire(self, future: asyncio.Future[Any], to: Ref, message: Any, timeout_s: float, about: str) -> None:
        if not future.done():
            detail = f" ({about})" if about else ""
            text = f"{self.address.name} waited for {type(message).__name__} to {to}{detail}"
            future.set_exception(DeadlineExceeded(f"{text}: no answer within {timeout_s:g} s"))

    async def stream(
        self, to: Ref, message: Any, item: type[T], *, timeout_s: float, lane: Lane = Lane.CONTROL, about: str = ""
    ) -> AsyncIterator[T]:
        """Yield the handler's items; ``timeout_s`` bounds the wait for each."""
        if not self._is_local(to):
            async for value in self._courier.stream(
                to.node, to.actor, message, self._decoder(item), timeout_s=timeout_s, lane=lane, about=about
            ):
                yield value
            return
        sink: asyncio.Queue[Any] = asyncio.Queue()
        self._local(to, message, sink=sink)
        while True:
            try:
                value = await asyncio.wait_for(sink.get(), timeout_s)
            except TimeoutError:
                text = f"{self.address.name} waited for {type(message).__name__} stream from {to} ({about})"
                raise DeadlineExceeded(f"{text}: no item within {timeout_s:g} s") from None
            if isinstance(value, StreamEnd):
                if value.error is not None:
                    raise value.error
                return
            yield value

    def _is_local(self, to: Ref) -> bool:
        return to.node.control == self.address.control and to.node.epoch in (0, self.address.epoch)

    def _local(
        self,
        to: Ref,
        message: Any,
        *,
        future: asyncio.Future[Any] | None = None,
        sink: asyncio.Queue[Any] | None = None,
    ) -> None:
        cell = self._cells.get(to.actor)
        facts = cell.actor.handlers().get(type(message).__name__) if cell is not None else None
        if cell is None or facts is None or facts.message is not type(message):
            raise NoSuchActor(f"{to} does not handle {type(message).__name__}")
        cell.offer(Delivery(facts, message, future=future, sink=sink))

    def _decoder(self, type_: Any) -> Decoder[Any]:
        decoder = self._decoders.get(type_)
        if decoder is None:
            decoder = self._decoders[type_] = Decoder(type_)
        return decoder

    # ---- receiving -----------------------------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        header = request.header
        cell = self._cells.get(header.to)
        facts = cell.actor.handlers().get(header.type) if cell is not None else None
        try:
            if cell is None or facts is None or (header.kind is Kind.STREAM) is not facts.streams:
                raise NoSuchActor(f"{header.to}@{self.address.name} does not handle {header.type}")
            message = request.decode(cell.actor.decoder(header.type))
            cell.offer(Delivery(facts, message, request=request))
        except (NoSuchActor, DecodeError, Overloaded) as error:
            self.counters["dead_letters"] += 1
            level = logging.DEBUG if self._closed else logging.WARNING
            log.log(level, "dead letter %s from %s: %s", header.type, header.sender, error)
            request.fail(Failure(type(error).__name__, str(error)))

    # ---- peers ---------------------------------------------------------------------------------------------------

    def watch(self, peer: NodeAddress, *, silence_s: float, on_lost: Callable[[str], None]) -> None:
        """Ping a peer and, once it has been silent for ``silence_s``, declare it lost and say so."""
        self.unwatch(peer.name)
        self._watches[peer.name] = self.background(self._watch(peer, silence_s, on_lost))

    def unwatch(self, name: str) -> None:
        """No longer ping a peer."""
        task = self._watches.pop(name, None)
        if task is not None:
            task.cancel()

    async def _watch(self, peer: NodeAddress, silence_s: float, on_lost: Callable[[str], None]) -> None:
        while True:
            self._courier.ping(peer)
            await asyncio.sleep(PING_EVERY_S)
            silence = self._courier.silence_s(peer.name)
            if silence > silence_s:
                reason = f"no sign of life for {silence:.1f} s"
                self._watches.pop(peer.name, None)
                self.lose(peer, reason)
                on_lost(reason)
                return

    def lose(self, peer: NodeAddress, reason: str) -> None:
        """Declare a peer dead: whatever waits for it fails at once."""
        self._courier.lose(peer, reason)

    def describe(self) -> dict[str, Any]:
        """Counters of the node and its actors, for people and metrics."""
        return {
            "node": self.address.name,
            "counters": dict(self.counters + self._courier.counters),
            "actors": {
                name: {"handled": cell.handled, "failures": cell.failures} for name, cell in self._cells.items()
            },
        }

    async def close(self) -> None:
        """Stop all actors, newest first, then the connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for name in reversed(list(self._cells)):
            await self.stop(Ref(self.address, name))
        for task in [*self._watches.values(), *self._background]:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._courier.close()
