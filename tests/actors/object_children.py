"""A process with a node whose actor puts and gets: ``python -m tests.actors.object_children NAME FILE``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.core import Actor, Node, handler
from actors.core.launch import die_with_parent
from bus.objects import Object
from tests.actors.children import write


class Look(msgspec.Struct, frozen=True):
    """Add it up."""

    handle: Object[Any]


class Looked(msgspec.Struct, frozen=True):
    total: float
    private_bytes: int  # by which this process's own memory grew for it


class Keep(msgspec.Struct, frozen=True):
    """Get it, or (None) say what the one that was got holds."""

    handle: Object[Any] | None


class Kept(msgspec.Struct, frozen=True):
    values: list[int]  # each once


class Make(msgspec.Struct, frozen=True):
    """Put so many ones."""

    count: int


class Made(msgspec.Struct, frozen=True):
    handle: Object[Any]


class Holder(Actor):
    """See the module docstring."""

    def __init__(self) -> None:
        self._kept = np.zeros(0, np.uint8)

    @handler
    async def look(self, message: Look) -> Looked:
        before = _private_bytes()
        values = await self.node.get(message.handle, np.ndarray, timeout_s=10)
        return Looked(float(values.sum()), _private_bytes() - before)

    @handler
    async def keep(self, message: Keep) -> Kept:
        if message.handle is not None:
            self._kept = await self.node.get(message.handle, np.ndarray, timeout_s=10)
        return Kept(np.unique(self._kept).tolist())

    @handler
    async def make(self, message: Make) -> Made:
        return Made(await self.node.put(np.ones(message.count, np.uint8)))


def _private_bytes() -> int:
    """Resident memory that is no other process's too."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


async def main(name: str, file: str) -> None:
    die_with_parent()
    async with Node(name) as node:
        write(file, msgspec.json.encode(await node.spawn(Holder, "holder")))
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
