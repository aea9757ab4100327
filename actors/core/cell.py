"""The life of one actor on its node: start, take messages one at a time, restart within bounds, stop.

    START -> RUNNING -> (handler of a tell raises) -> restart, at most `restarts` times -> RUNNING
                     -> (stop, or no restart left) -> STOPPED

Invariant: at most one handler that is not ``concurrent`` runs at any time, and every message that was accepted is
answered, if only with the error that ended the actor.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from actors.core.actor import Actor, HandlerFacts
from actors.core.mailbox import Mailbox
from bus.delivery import Request
from bus.message import BusError, Failure, NoSuchActor

if TYPE_CHECKING:
    from actors.core.node import Node
    from actors.core.ref import Ref

log = logging.getLogger(__name__)


class Delivery:
    """One message on its way to a handler, from this node (an object and a future) or another (a request)."""

    __slots__ = ("facts", "future", "message", "request", "sink")

    def __init__(
        self,
        facts: HandlerFacts,
        message: Any,
        *,
        future: asyncio.Future[Any] | None = None,
        request: Request | None = None,
        sink: asyncio.Queue[Any] | None = None,
    ) -> None:
        self.facts = facts
        self.message = message
        self.future = future
        self.request = request
        self.sink = sink

    @property
    def wants_answer(self) -> bool:
        return self.future is not None or self.sink is not None or bool(self.request and self.request.header.id)

    def reply(self, value: Any) -> None:
        if self.future is not None:
            if not self.future.done():
                self.future.set_result(value)
        elif self.request is not None:
            self.request.reply(value)

    def fail(self, error: BaseException) -> None:
        if self.future is not None:
            if not self.future.done():
                self.future.set_exception(error)
        elif self.sink is not None:
            self.sink.put_nowait(StreamEnd(error))
        elif self.request is not None:
            text = "".join(traceback.format_exception(error))
            self.request.fail(Failure(type(error).__name__, str(error), text[-4000:]))


class StreamEnd:
    """Last item of a stream inside a node."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Cell:
    """See the module docstring."""

    def __init__(self, node: Node, ref: Ref, factory: Callable[[], Actor], *, bound: int, restarts: int) -> None:
        self.ref = ref
        self.actor = factory()
        self.handled = 0
        self.failures = 0
        self._node = node
        self._factory = factory
        self._restarts_left = restarts
        self._mailbox = Mailbox(str(ref), bound)
        self._tasks: set[asyncio.Task[None]] = set()
        self._main: asyncio.Task[None] | None = None
        self._stopped = False

    async def start(self) -> None:
        """Run ``on_start``, then take messages. Raises what ``on_start`` raises."""
        self._adopt(self.actor)
        await self.actor.on_start()
        self._main = asyncio.create_task(self._run(), name=str(self.ref))

    def _adopt(self, actor: Actor) -> None:
        actor.node = self._node
        actor.ref = self.ref

    def offer(self, delivery: Delivery) -> None:
        """Queue a message. Raises ``Overloaded`` or, once stopped, ``NoSuchActor``."""
        if self._stopped:
            raise NoSuchActor(f"{self.ref} has stopped")
        self._mailbox.put(delivery, urgent=delivery.facts.urgent)

    async def _run(self) -> None:
        while True:
            delivery = await self._mailbox.get()
            self.handled += 1
            if delivery.facts.concurrent:
                task = asyncio.create_task(self._handle(delivery))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                await self._handle(delivery)

    async def _handle(self, delivery: Delivery) -> None:
        method = getattr(self.actor, delivery.facts.method)
        try:
            if delivery.facts.streams:
                await self._stream(delivery, method(delivery.message))
            else:
                delivery.reply(await method(delivery.message))
        except asyncio.CancelledError:
            delivery.fail(NoSuchActor(f"{self.ref} stopped while it handled {delivery.facts.message.__name__}"))
            raise
        except Exception as error:  # whatever user code raises ends here: with the asker, or with supervision
            self.failures += 1
            if delivery.wants_answer:
                if not isinstance(error, BusError):
                    log.warning("%s: %s raised %r", self.ref, delivery.facts.method, error)
                delivery.fail(error)
            else:
                await self._supervise(delivery, error)

    async def _stream(self, delivery: Delivery, items: AsyncIterator[Any]) -> None:
        if delivery.request is not None:
            await delivery.request.stream(items)
            return
        async for item in items:
            if delivery.sink is not None:
                delivery.sink.put_nowait(item)
        if delivery.sink is not None:
            delivery.sink.put_nowait(StreamEnd())

    async def _supervise(self, delivery: Delivery, error: Exception) -> None:
        log.error("%s: %s failed", self.ref, delivery.facts.method, exc_info=error)
        await self.actor.on_failure(error)
        if self._restarts_left == 0:
            self._node.give_up(self.ref, error)
            return
        self._restarts_left -= 1
        await self.actor.on_stop()
        self.actor = self._factory()
        self._adopt(self.actor)
        await self.actor.on_start()

    async def stop(self) -> None:
        """Take no more messages, end the running handlers, run ``on_stop``; what waits is refused."""
        if self._stopped:
            return
        self._stopped = True
        tasks = [task for task in (self._main, *self._tasks) if task is not None and task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while len(self._mailbox):
            (await self._mailbox.get()).fail(NoSuchActor(f"{self.ref} has stopped"))
        await self.actor.on_stop()
