"""Large copies: beside the event loop, by a thread for each processor that there is, none of which waits for another.

Invariants:

- when a copy has returned all of it is there; one that was cancelled ends with the piece that each thread is at;
- the threads are few, however large what is copied and however many copies there are at a time, and are started once:
  more threads than processors only take those from each other.

A thread takes the next piece from one end of what is left, its neighbour from the other, so that each goes through
memory in one direction (as processors expect it) and one whose processor has other work holds up only a piece. The
event loop is woken once, by the last: it would take a processor from those that still copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

PIECE_BYTES = 4 << 20
"""Copied by a thread before it looks for more: it is what threads may wait for each other in the end."""

THREAD_BYTES = 16 << 20
"""A thread for each so many bytes, and at most ``THREADS``."""

THREADS = 8


class Copier:
    """See the module docstring."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    async def copy(self, into: memoryview, source: memoryview) -> None:
        """All of it."""
        if len(into) != len(source):
            raise ValueError(f"{len(source)} bytes to be copied into {len(into)}")
        processors = _processors()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(processors, THREADS), thread_name_prefix="objects")
        work = _Work(into, source)
        count = threads_for(len(source), processors)
        threads = [self._pool.submit(work.take, front=number % 2 == 0) for number in range(count)]
        try:
            await _all(threads)
        finally:
            work.left.clear()


class _Work:
    """Pieces that are left to copy."""

    def __init__(self, into: memoryview, source: memoryview) -> None:
        self._into, self._source = np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8)
        self.left = deque(range(0, len(source), PIECE_BYTES))

    def take(self, *, front: bool) -> None:
        """Copy pieces until none is left."""
        take = self.left.popleft if front else self.left.pop
        with contextlib.suppress(IndexError):  # of a deque that is empty
            while True:
                start = take()
                piece = slice(start, start + PIECE_BYTES)
                np.copyto(self._into[piece], self._source[piece])


async def _all(threads: list[Future[None]]) -> None:
    """Raises what one of them has raised."""
    loop, lock, running = asyncio.get_running_loop(), threading.Lock(), len(threads)
    ended = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def one_ended(_: Future[None]) -> None:
        nonlocal running
        with lock:
            running -= 1
            last = running == 0
        if last:
            with contextlib.suppress(RuntimeError):  # nobody waits: the loop has closed
                loop.call_soon_threadsafe(end)

    for thread in threads:
        thread.add_done_callback(one_ended)
    await ended
    for thread in threads:
        thread.result()


def threads_for(size: int, processors: int) -> int:
    """How many copy so much."""
    return max(1, min(size // THREAD_BYTES, processors, THREADS))


def _processors() -> int:
    """What this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
