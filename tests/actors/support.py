"""Nodes and actors to test with."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from actors.core import Actor, Node, Ref, handler

Where = Literal["local", "remote"]
WHERE: tuple[Where, ...] = ("local", "remote")


class Add(msgspec.Struct):
    amount: int


class Total(msgspec.Struct):
    value: int


class Sum(msgspec.Struct):
    """Looks like ``Total`` on the wire."""

    value: int


class Fail(msgspec.Struct):
    text: str = "on purpose"


class Wait(msgspec.Struct):
    """Until ``release`` is set."""


class WaitBeside(msgspec.Struct):
    """Likewise, in a concurrent handler."""


class WaitForCancelled(msgspec.Struct):
    """For something that is cancelled."""


class Mark(msgspec.Struct):
    text: str


class Hurry(msgspec.Struct):
    text: str


class Count(msgspec.Struct):
    upto: int
    fail_at: int = -1


class Array(msgspec.Struct):
    data: np.ndarray


class Unknown(msgspec.Struct):
    """Nobody handles it."""


class Example(Actor):
    """Does a bit of everything."""

    def __init__(self) -> None:
        self.total = 0
        self.marks: list[str] = []
        self.yielded = 0
        self.stream_closed = asyncio.Event()
        self.release = asyncio.Event()
        self.waiting = asyncio.Event()
        self.stopped = False

    async def on_stop(self) -> None:
        self.stopped = True

    @handler
    async def add(self, message: Add) -> Total:
        self.total += message.amount
        return Total(self.total)

    @handler
    async def fail(self, message: Fail) -> Total:
        raise KeyError(message.text)

    @handler
    async def wait(self, message: Wait) -> Total:
        self.waiting.set()
        await self.release.wait()
        return Total(self.total)

    @handler(concurrent=True)
    async def wait_beside(self, message: WaitBeside) -> Total:
        self.waiting.set()
        await self.release.wait()
        return Total(self.total)

    @handler
    async def wait_for_cancelled(self, message: WaitForCancelled) -> Total:
        future: asyncio.Future[Total] = asyncio.get_running_loop().create_future()
        future.cancel()
        return await future

    @handler
    async def mark(self, message: Mark) -> None:
        self.marks.append(message.text)

    @handler(urgent=True)
    async def hurry(self, message: Hurry) -> None:
        self.marks.append(message.text)

    @handler
    async def double(self, message: Array) -> Array:
        return Array(message.data * 2)

    @handler
    async def count(self, message: Count) -> AsyncGenerator[Total, None]:
        try:
            for value in range(message.upto):
                if value == message.fail_at:
                    raise ValueError(f"no {value}")
                self.yielded += 1
                yield Total(value)
        finally:
            self.stream_closed.set()


class Stage:
    """A node that asks, a node that hosts (the same one, or another), and an ``Example`` on it."""

    def __init__(self, asker: Node, host: Node, actor: Example, ref: Ref) -> None:
        self.asker = asker
        self.host = host
        self.actor = actor
        self.ref = ref

    async def add(self, amount: int, *, retries: int = 0) -> int:
        """The total; also shows that everything sent before has been handled."""
        answer = await self.asker.ask(self.ref, Add(amount), Total, timeout_s=10, retries=retries)
        return answer.value


@asynccontextmanager
async def stage(where: Where, *, bound: int = 10_000, restarts: int = 3) -> AsyncIterator[Stage]:
    async with Node("host") as host, Node("asker") as remote:
        actor = Example()
        ref = await host.spawn(lambda: actor, "example", bound=bound, restarts=restarts)
        yield Stage(host if where == "local" else remote, host, actor, ref)


async def until(condition: Callable[[], bool]) -> None:
    """Within 20 s."""
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError("it never came to be")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
