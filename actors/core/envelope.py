"""One message on its way to a handler, and the way back for what the handler says.

Within a node that is an object and a future or a local stream; from another node it is a request of the bus. Both ways
have the same semantics: a stream waits for its reader, and stops when the reader does.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from actors.core.actor import HandlerFacts
from actors.core.metrics import LOCAL
from bus.delivery import Request
from bus.message import ASK, DeadlineExceeded, Failure

WINDOW = 16
"""Items of a local stream that may wait for their reader."""

TRACEBACK_CHARACTERS = 4000


class Envelope:
    """A ``tell`` within a node, and the base of all others."""

    __slots__ = ("cancelled", "facts", "message", "task", "trace")

    lane = LOCAL

    def __init__(self, facts: HandlerFacts, message: Any, trace: int = 0) -> None:
        self.facts = facts
        self.message = message
        self.trace = trace
        self.cancelled = False
        self.task: asyncio.Task[Any] | None = None  # that handles it, while its handler runs

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        if self.facts.cancellable and not self.cancelled:
            self.cancelled = True
            if self.task is not None:
                self.task.cancel()

    @property
    def wants_answer(self) -> bool:
        return False

    def taken(self) -> None:
        """It no longer waits in a mailbox."""

    def reply(self, value: Any) -> None:
        """What the handler returned. Raises ``TypeError`` for what cannot travel."""

    def fail(self, error: BaseException) -> None:
        """What the handler raised, or why there will be no answer."""

    async def feed(self, items: AsyncGenerator[Any, None]) -> None:
        """What the handler yields."""
        raise TypeError(f"{self.facts.method} answers a stream, not a tell or an ask")


class Tick(Envelope):
    """What a timer sends, again and again the same one."""

    __slots__ = ("waits",)

    def __init__(self, facts: HandlerFacts, message: Any) -> None:
        super().__init__(facts, message)
        self.waits = False  # in the mailbox, or being handled

    def reply(self, value: Any) -> None:
        self.waits = False

    def fail(self, error: BaseException) -> None:
        self.waits = False


class LocalAsk(Envelope):
    """An ``ask`` within a node."""

    __slots__ = ("_future",)

    def __init__(self, facts: HandlerFacts, message: Any, trace: int, future: asyncio.Future[Any]) -> None:
        super().__init__(facts, message, trace)
        self._future = future

    @property
    def wants_answer(self) -> bool:
        return True

    def reply(self, value: Any) -> None:
        if not self._future.done():
            self._future.set_result(value)

    def fail(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)


class LocalStream(Envelope):
    """A stream within a node: at most ``WINDOW`` items wait for their reader."""

    __slots__ = ("_credit", "_ended", "_items", "_patience_s", "_task")

    def __init__(self, facts: HandlerFacts, message: Any, trace: int, patience_s: float) -> None:
        super().__init__(facts, message, trace)
        self._patience_s = patience_s
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._credit = asyncio.Semaphore(WINDOW)
        self._task: asyncio.Task[Any] | None = None
        self._ended = False

    @property
    def wants_answer(self) -> bool:
        return True

    def fail(self, error: BaseException) -> None:
        self._items.put_nowait(_End(error))

    async def feed(self, items: AsyncGenerator[Any, None]) -> None:
        if self._ended:
            return
        self._task = asyncio.current_task()
        try:
            async with aclosing(items):
                async for item in items:
                    await self._wait_for_reader()
                    self._items.put_nowait(item)
            self._items.put_nowait(_End(None))
        finally:
            self._task = None

    async def _wait_for_reader(self) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._credit.acquire()
        except TimeoutError:
            name = self.facts.message.__name__
            raise DeadlineExceeded(f"{name} stream: its reader took nothing for {self._patience_s:g} s") from None

    async def read(self, timeout_s: float, late: Callable[[int], Exception]) -> AsyncGenerator[Any, None]:
        """The other end. Raises what the handler raised, or ``late(items taken)``; closing it cancels the handler."""
        taken = 0
        try:
            while True:
                try:
                    async with asyncio.timeout(timeout_s):
                        item = await self._items.get()
                except TimeoutError:
                    raise late(taken) from None
                if isinstance(item, _End):
                    if item.error is not None:
                        raise item.error
                    return
                self._credit.release()
                taken += 1
                yield item
        finally:
            self._ended = True
            if self._task is not None:
                self._task.cancel()


class _End:
    """Last item of a local stream."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Remote(Envelope):
    """A message from another node."""

    __slots__ = ("_request", "lane")

    def __init__(self, facts: HandlerFacts, message: Any, request: Request) -> None:
        self.facts = facts  # as in the base: on the way of every message
        self.message = message
        header = request.header
        self.trace = header.trace
        self.cancelled = False
        self.task = None
        self._request = request
        self.lane = request.lane
        if header.kind is ASK:
            request.on_cancel = self.cancel  # until it is answered

    @property
    def wants_answer(self) -> bool:
        return self._request.header.id != 0

    def taken(self) -> None:
        self._request.taken()

    def reply(self, value: Any) -> None:
        if self._request.header.id:  # else it is a tell
            self._request.reply(value)

    def fail(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        self._request.fail(Failure(type(error).__name__, str(error), text[-TRACEBACK_CHARACTERS:]))

    async def feed(self, items: AsyncGenerator[Any, None]) -> None:
        await self._request.stream(items)
