"""Virtual time: an event loop on which hours pass in seconds, and in the same way every time.

Invariant: what runs next depends on the program and its seed alone. Callbacks run in the order in which they were asked
for, timers by their time and then by the order in which they were set; time stands still while anything is left to do
and then jumps to the next timer. What would bring in the real world (executors, subprocesses, descriptors, signals,
other threads) is refused by name, and a program that waits for something that cannot come ends in ``Stuck``, which says
who waits where, instead of hanging.

    async def main() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    assert run(main(), seed=7) == 86_400.0

Everything in asyncio that is made of tasks, futures and timers works unchanged. Real time that a callback takes does
not count.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LIMIT_S = 30 * 86_400.0
"""Virtual time after which a program that only goes on waiting is declared stuck."""

MAX_STEPS_AT_ONCE = 10_000_000
"""Callbacks after which time that does not move is declared to stand still for good."""

CLEAN_UP_S = 3_600.0
"""Virtual time in which a stuck program's tasks, cancelled, may end."""

_COMPACT_FROM = 1_000
"""Cancelled timers that may stay in the heap, before it is asked whether they are most of it."""


class NotSimulated(RuntimeError):
    """Something of the real world was asked of a loop in virtual time."""


class Stuck(RuntimeError):
    """Tasks wait for what cannot come; the message says which, and where."""


def run(main: Coroutine[Any, Any, T], *, seed: int = 0, limit_s: float = LIMIT_S) -> T:
    """Run a coroutine to its end in virtual time, which begins at 0. Raises ``Stuck`` where it has none."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed, limit_s=limit_s)) as runner:
        return runner.run(main)


class _Task(asyncio.Task[Any]):
    """Hashed by number instead of by address, so that sets of tasks are walked in the same order in every run."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module docstring. ``random`` is the program's one source of chance."""

    _ready: deque[asyncio.Handle]
    _stopping: bool
    _thread_id: int | None

    def __init__(self, seed: int = 0, *, limit_s: float = LIMIT_S) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self._now = 0.0
        self._limit_s = limit_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._cancelled = 0
        self._order = itertools.count()
        self._steps = 0
        tasks = itertools.count()
        self.set_task_factory(lambda loop, coroutine, **options: _Task(next(tasks), coroutine, loop=loop, **options))

    # ---- time ----------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by a timer that is cancelled, also after it was due. Most deadlines are never reached: they must not
        fill the heap."""
        self._cancelled += 1
        if self._cancelled > _COMPACT_FROM and self._cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled() and entry[2] is not handle]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _run_once(self) -> None:
        """Turns, until it is to stop: in each, everything that is ready now, but nothing that becomes so meanwhile."""
        ready = self._ready
        while True:
            timers = self._timers
            if not ready and not self._stopping and not (timers and timers[0][0] <= self._now):
                self._advance()
            while timers and timers[0][0] <= self._now:
                ready.append(heapq.heappop(timers)[2])
            self._steps += len(ready)
            if self._steps > MAX_STEPS_AT_ONCE:
                self._steps = 0
                self._give_up(f"time stands still after {MAX_STEPS_AT_ONCE} steps")
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
            if self._stopping:
                return

    def _advance(self) -> None:
        """To the next timer that still counts."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
            self._cancelled = max(0, self._cancelled - 1)
        if not timers:
            self._give_up("nothing is scheduled")
        if timers[0][0] > self._limit_s:
            self._give_up(f"the limit of {self._limit_s:g} s of virtual time has passed")
        self._now = max(self._now, timers[0][0])
        self._steps = 0

    def _give_up(self, why: str) -> NoReturn:
        self._limit_s = max(self._limit_s, self._now) + CLEAN_UP_S
        waiting = [f"  {task.get_name()}: {_where(task.get_coro())}" for task in asyncio.all_tasks(self)]
        raise Stuck("\n".join([f"{why} at {self._now:g} s of virtual time, and {len(waiting)} tasks wait:", *waiting]))

    # ---- the real world ------------------------------------------------------------------------------------------

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._thread_id not in (None, threading.get_ident()):
            raise NotSimulated("another thread called into a loop in virtual time: it would come at no definite time")
        return self.call_soon(callback, *args, context=context)


def _where(coroutine: Any) -> str:
    """The innermost place at which a coroutine waits, and through which functions it came there."""
    names: list[str] = []
    place = "before its first step"
    while coroutine is not None:
        frame = next(
            (getattr(coroutine, name) for name in ("cr_frame", "ag_frame", "gi_frame") if hasattr(coroutine, name)),
            None,
        )
        if frame is None:
            break
        names.append(frame.f_code.co_name)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        awaited = ("cr_await", "ag_await", "gi_yieldfrom")
        coroutine = next((getattr(coroutine, name) for name in awaited if hasattr(coroutine, name)), None)
    return f"{' -> '.join(names)} at {place}"


_REFUSED = {
    "an executor": ["run_in_executor", "set_default_executor", "getaddrinfo", "getnameinfo"],
    "a subprocess": ["subprocess_exec", "subprocess_shell"],
    "a signal handler": ["add_signal_handler", "remove_signal_handler"],
    "a real descriptor": [
        *["add_reader", "remove_reader", "add_writer", "remove_writer", "connect_read_pipe", "connect_write_pipe"],
        *["create_connection", "create_server", "create_unix_connection", "create_unix_server"],
        *["create_datagram_endpoint", "connect_accepted_socket", "start_tls", "sendfile"],
        *["sock_accept", "sock_connect", "sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into"],
        *["sock_sendall", "sock_sendto", "sock_sendfile"],
    ],
}


def _refusal(method: str, what: str) -> Callable[..., NoReturn]:
    def refuse(self: VirtualLoop, *args: Any, **options: Any) -> NoReturn:
        raise NotSimulated(
            f"{method} needs {what}, which a loop in virtual time does not have: put what needs it behind a protocol "
            "with a simulated twin"
        )

    return refuse


for _what, _methods in _REFUSED.items():
    for _method in _methods:
        setattr(VirtualLoop, _method, _refusal(_method, _what))
