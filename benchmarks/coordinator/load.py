"""Writes at given times, however long those before them take; and as many as go.

Invariant (open loop): a write's time is from when it was due to its answer, so that a store that stalls is charged for
all that was due meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from benchmarks.coordinator.trace import Arrival

Write = Callable[[str, bytes], Awaitable[object]]


class Latencies(msgspec.Struct, frozen=True):
    """Of one open loop."""

    offered_per_s: float
    done_per_s: float
    p50_ms: float
    p99_ms: float
    worst_ms: float


async def at_their_times(arrivals: Sequence[Arrival], seconds: float, write: Write) -> Latencies:
    loop = asyncio.get_running_loop()
    took: list[float] = []
    writing: set[asyncio.Task[None]] = set()
    start = loop.time()

    async def one(arrival: Arrival) -> None:
        await write(arrival.path, bytes(arrival.size))
        took.append(loop.time() - start - arrival.at_s)

    for arrival in arrivals:
        early = start + arrival.at_s - loop.time()
        if early > 0:
            await asyncio.sleep(early)
        task = asyncio.create_task(one(arrival))
        writing.add(task)
        task.add_done_callback(writing.discard)
    for task in list(writing):
        await task
    lasted = max(seconds, loop.time() - start)
    took.sort()
    return Latencies(
        len(arrivals) / seconds,
        len(took) / lasted,
        took[len(took) // 2] * 1e3,
        took[min(len(took) - 1, int(len(took) * 0.99))] * 1e3,
        took[-1] * 1e3,
    )


async def as_many_as_go(paths: Sequence[str], size: int, seconds: float, at_once: int, write: Write) -> float:
    """Writes a second with so many under way."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    done = 0

    async def one_after_another(first: int) -> None:
        nonlocal done
        number = first
        while loop.time() < end:
            await write(paths[number % len(paths)], bytes(size))
            done += 1
            number += at_once

    start = loop.time()
    await asyncio.gather(*(one_after_another(first) for first in range(at_once)))
    return done / (loop.time() - start)
