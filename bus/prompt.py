"""What a task waits at, and goes on from within the call that settles it: no round of the event loop lies between.

Invariant: nobody's code is interrupted for it. While a task runs, the waiting one is called by the event loop a little
later, as it is with an ``asyncio.Future``.

Why: between two nodes that have nothing else to do, that round is a good part of what a message costs them.
"""

from __future__ import annotations

import asyncio
from asyncio import current_task
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_Wakeup = Callable[[Any], object]


class Prompt(Generic[T]):
    """Awaited by one task at a time. The last part is what ``asyncio`` asks of whatever a task can wait for."""

    __slots__ = ("_asyncio_future_blocking", "_context", "_error", "_loop", "_value", "_wakeup", "settled")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asyncio_future_blocking = False  # the attribute by which a task knows it
        self._wakeup: _Wakeup | None = None
        self._context: Context | None = None
        self._value: Any = None  # a T, once it is settled
        self._error: BaseException | None = None
        self.settled = False

    def settle(self, value: T, *, at_once: bool) -> None:
        """What the task gets, within this call (``at_once``) if no task runs."""
        self.settled, self._value = True, value
        wakeup = self._wakeup
        if wakeup is None:
            return
        if at_once and self._context is not None and current_task(self._loop) is None:
            self._wakeup = None
            self._context.run(wakeup, self)
        else:
            self._wake_soon()

    def fail(self, error: BaseException) -> None:
        """What the task is to raise."""
        self.settled, self._error = True, error
        self._wake_soon()

    def renew(self) -> None:
        """Make it fit to be waited at again."""
        self.settled, self._value, self._error = False, None, None

    @property
    def cancelled(self) -> bool:
        """Whether the task was cancelled while it waited here."""
        return isinstance(self._error, asyncio.CancelledError)

    def _wake_soon(self) -> None:
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            self._loop.call_soon(wakeup, self, context=self._context)

    # ---- what tasks call ---------------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, T]:
        if not self.settled:
            self._asyncio_future_blocking = True
            yield self
        return self.result()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, wakeup: _Wakeup, *, context: Context) -> None:
        self._wakeup, self._context = wakeup, context
        if self.settled:
            self._wake_soon()

    def cancel(self, msg: Any = None) -> bool:
        if self.settled:
            return False
        self.fail(asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg))
        return True
