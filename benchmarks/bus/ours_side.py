"""Two nodes in two processes, an actor on one, asks and tells from the other.

python -m benchmarks.bus.ours_side [server]
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import psutil

from actors.core import Actor, Node, Ref, handler
from benchmarks.bus.common import (
    ANSWER_TIMEOUT_S,
    BURST,
    OBJECT_BYTES,
    OBJECTS_FIRST,
    WINDOW,
    Count,
    Question,
    Sample,
    Tensor,
    answer,
    tensor,
)
from bus.message import Lane
from bus.objects import Object

UNIX = os.environ.get("BUS_BENCHMARK_UNIX") == "1"
"""Whether the two nodes find each other's Unix sockets, as they do by themselves; else TCP, as the other sides."""

IDLE_ACTORS = 10_000
BULK_BYTES = 1 << 30


class HowMany(msgspec.Struct, frozen=True):
    """Ask for a ``Count``."""


class Ping(msgspec.Struct, frozen=True):
    """Asked urgently, as an ABORT is."""


class Once(msgspec.Struct, frozen=True):
    """A one-way message."""

    sample: Sample


class Get(msgspec.Struct, frozen=True):
    """How large is it?"""

    handle: Object[np.ndarray]


class Echo(Actor):
    """Answers what the other sides' servers answer."""

    def __init__(self) -> None:
        self._count = 0

    @handler
    async def echo(self, message: Sample) -> Sample:
        return message

    @handler
    async def once(self, message: Once) -> None:
        self._count += 1

    @handler
    async def how_many(self, message: HowMany) -> Count:
        return Count(self._count)

    @handler
    async def take(self, message: Tensor) -> Count:
        return Count(message.values.nbytes)

    @handler
    async def get(self, message: Get) -> Count:
        values = await self.node.get(message.handle, np.ndarray, timeout_s=ANSWER_TIMEOUT_S)
        return Count(values.nbytes)

    @handler(urgent=True)
    async def ping(self, message: Ping) -> Count:
        return Count(0)


async def serve() -> None:
    """Until standard input ends."""
    async with Node("server", unix=UNIX) as node:
        ref = await node.spawn(Echo, "echo")
        print(msgspec.json.encode(ref).decode(), flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def round_trip(node: Node, echo: Ref, count: int) -> list[float]:
    seconds = []
    sample = Sample()
    for _ in range(count):
        start = time.perf_counter()
        await node.ask(echo, sample, Sample, timeout_s=ANSWER_TIMEOUT_S)
        seconds.append(time.perf_counter() - start)
    return seconds


async def one_way(node: Node, echo: Ref, count: int) -> list[float]:
    message = Once(Sample())
    start = time.perf_counter()
    for _ in range(count // BURST):
        for _ in range(BURST):
            node.tell(echo, message)
        await node.ask(echo, HowMany(), Count, timeout_s=ANSWER_TIMEOUT_S)
    return [time.perf_counter() - start]


async def tensors(node: Node, echo: Ref, count: int) -> list[float]:
    message = Tensor(tensor())
    left = iter(range(count))

    async def send() -> None:
        for _ in left:
            await node.ask(echo, message, Count, timeout_s=ANSWER_TIMEOUT_S, lane=Lane.BULK)

    start = time.perf_counter()
    await asyncio.gather(*(send() for _ in range(WINDOW)))
    return [time.perf_counter() - start]


async def objects(node: Node, echo: Ref, count: int) -> list[float]:
    """Put, have it got in the other process, and release."""
    large = np.arange(OBJECT_BYTES // 4, dtype=np.float32)
    seconds = []
    for _ in range(count + OBJECTS_FIRST):
        start = time.perf_counter()
        handle = await node.put(large)
        await node.ask(echo, Get(handle), Count, timeout_s=ANSWER_TIMEOUT_S)
        node.release(handle)
        seconds.append(time.perf_counter() - start)
    return seconds[OBJECTS_FIRST:]


async def memcpy(node: Node, echo: Ref, count: int) -> list[float]:
    """What the machine needs to copy as much within a process, into memory that has been written to before."""
    source, target = (np.arange(OBJECT_BYTES // 4, dtype=np.float32) for _ in range(2))
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return seconds


async def abort(node: Node, echo: Ref, count: int) -> list[float]:
    """Each time 1 GB of bulk is queued, then an urgent ask on the control lane is timed."""
    seconds = []
    message = Tensor(np.tile(tensor(), 4))  # the bulk lane takes no more than 1,000 messages at a time
    for _ in range(count):
        bulk = asyncio.gather(
            *(
                node.ask(echo, message, Count, timeout_s=ANSWER_TIMEOUT_S, lane=Lane.BULK)
                for _ in range(BULK_BYTES // message.values.nbytes)
            )
        )
        await asyncio.sleep(0)  # it is on its way
        start = time.perf_counter()
        await node.ask(echo, Ping(), Count, timeout_s=ANSWER_TIMEOUT_S)
        seconds.append(time.perf_counter() - start)
        await bulk
    return seconds


async def local(node: Node, echo: Ref, count: int) -> list[float]:
    """An ask within the node, on average."""
    own = await node.spawn(Echo, "own")
    sample = Sample()
    start = time.perf_counter()
    for _ in range(count):
        await node.ask(own, sample, Sample, timeout_s=ANSWER_TIMEOUT_S)
    seconds = (time.perf_counter() - start) / count
    await node.stop(own)
    return [seconds]


async def idle(node: Node, echo: Ref, count: int) -> list[float]:
    """Bytes of resident memory for each of so many actors that do nothing."""
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    refs = [await node.spawn(Echo, f"idle-{index}") for index in range(count)]
    gc.collect()
    each = (process.memory_info().rss - before) / count
    for ref in refs:
        await node.stop(ref)
    return [each]


Measured = Callable[[Node, Ref, int], Awaitable[list[float]]]


async def open_node() -> Node:
    return Node("client", unix=UNIX)


def main() -> None:
    if len(sys.argv) > 1:
        asyncio.run(serve())
        return
    words = [sys.executable, "-m", "benchmarks.bus.ours_side", "server"]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if server.stdout is None or server.stdin is None:
        raise RuntimeError("started without pipes")
    echo = msgspec.json.decode(server.stdout.readline(), type=Ref)
    with asyncio.Runner() as runner:
        node = runner.run(open_node())

        def question(measured: Measured) -> Question:
            async def asked(count: int) -> list[float]:
                return await measured(node, echo, count)

            return lambda count: runner.run(asked(count))

        answer(
            {
                "round_trip": question(round_trip),
                "one_way": question(one_way),
                "tensors": question(tensors),
                "objects": question(objects),
                "memcpy": question(memcpy),
                "abort": question(abort),
                "local": question(local),
                "idle": question(idle),
            }
        )
        runner.run(node.close())
    server.stdin.close()
    server.wait(10)


if __name__ == "__main__":
    main()
