"""A node that lives through history after history, and says after each what it holds.

    python -m tests.bus.lasting '<Settings as JSON>'

Its directory has a folder for each history (``0``, ``1``, ...), in which it takes part as ``tests.bus.life`` does, but
for its end; it closes when there is a file ``end``.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import sys
import time
from pathlib import Path

import msgspec

from actors.core import Node
from bus.objects import store
from bus.objects.pool import IDLE_S
from tests.bus.dealings import FolderDirectory, Pairs, publish
from tests.bus.history import Staffed, Up
from tests.bus.life import NAMES, FileBook, Settings, Share, appears, begin
from tests.bus.workers import Caller, public_name

REMEMBERED = 50
"""Objects that are gone of which a node keeps the reason here: so few that the bound is reached at once, since what
fills up to a bound of thousands would look like what grows for ever."""

REST_S = 1.0
"""From the end of the others to the count of what is held: what they were waiting for ends."""


LET_GO_S = 2 * IDLE_S
"""Within which memory that objects lay in is nowhere kept any more to be used again. Until then each piece of it takes
two descriptors, here and where it was read: as many as there happened to be calls in the last ``IDLE_S``."""


class Held(msgspec.Struct, frozen=True):
    """What a node has at rest."""

    tasks: int
    unfinished: int  # asks, and streams at either end
    answers: int  # recorded, in case that they are asked for again
    watches: int
    connections: int
    actors: int
    lent: int  # objects here, and leases of and for those of others
    timers: int  # of the event loop
    objects: int  # that the garbage collector knows, after a collection
    blocks: int  # of memory in use by Python objects
    heap_mb: float  # in use by whatever calls malloc, libzmq for one; what is free of it is given back first


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        ("first", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),  # mapped for large ones
        ("between", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),  # given out of the arenas
        ("last", ctypes.c_size_t * 2),
    ]


def heap_mb() -> float:
    """What malloc has given out, in all its arenas and beside them; 0 without glibc."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0.0
    mallinfo2.restype = _MallInfo
    found = mallinfo2()
    return float(found.uordblks + found.hblkhd) / 2**20


def give_back_free() -> None:
    """Let malloc give back what is free of its memory, where it can. Otherwise a process keeps as much of it as it ever
    needed at a time, within a bound (``bus.zeromq.KEPT_FREE_BYTES``), and rare moments need more than all before."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # only glibc has it
        trim(ctypes.c_size_t(0))


class Lasting:
    """See the module docstring."""

    def __init__(self, settings: Settings, node: Node, book: FileBook) -> None:
        self._settings = settings
        self._node = node
        self._book = book
        self._pairs = Pairs(book, node)
        self._caller = Caller(book, node)

    async def live(self) -> None:
        await self._caller.staff()
        await self._node.announce(public_name(self._settings.name), self._caller.ref)
        town = Path(self._settings.directory)
        for number in itertools.count():
            while not (town / str(number) / "open").exists():
                if (town / "end").exists():
                    return
                await asyncio.sleep(0.05)
            await self._take_part(town / str(number))

    async def _take_part(self, directory: Path) -> None:
        name, book, caller = self._settings.name, self._book, self._caller
        book.turn(directory / f"{name}.events")
        now = book.now()
        book.write(Up(at=now, life=caller.life))
        book.write(Staffed(at=now, life=caller.life))
        settings = msgspec.structs.replace(
            self._settings, directory=str(directory), seed=self._settings.seed + int(directory.name)
        )
        wrong = await Share(settings, caller, book, self._pairs).take()
        await appears(directory, "over")
        wrong += caller.failures()
        caller.let_go()
        await asyncio.sleep(REST_S)
        if not await self._lets_go():
            wrong.append(f"{caller.life}: memory for objects is kept for {LET_GO_S:g} s: {self._node.description()}")
        held = self._held()
        if held.unfinished:
            wrong.append(f"{caller.life}: {held.unfinished} asks or streams have not ended")
        publish(directory / f"{name}.held", held)
        publish(directory / f"{name}.left", wrong + self._pairs.left_over())

    async def _lets_go(self) -> bool:
        """Whether no memory is kept for objects to come."""
        gc.collect()  # what is read in a cycle stays mapped until it is found
        until = time.monotonic() + LET_GO_S
        while time.monotonic() < until:
            objects = self._node.description().objects
            if objects["idle_bytes"] == 0 and objects["mapped"] == 0:
                return True
            await asyncio.sleep(0.1)
        return False

    def _held(self) -> Held:
        gc.collect()
        give_back_free()
        node = self._node.description()
        answers = node.unfinished["answers"]
        return Held(
            tasks=len(asyncio.all_tasks()),
            unfinished=sum(node.unfinished.values()) - answers,
            answers=answers,
            watches=node.watches,
            connections=len(self._node._transport._ways.open),  # type: ignore[attr-defined]
            actors=len(node.actors),
            lent=sum(node.objects[what] for what in ("objects", "leases", "borrowed")),
            timers=sum(not timer.cancelled() for timer in getattr(asyncio.get_running_loop(), "_scheduled", ())),
            objects=len(gc.get_objects()),
            blocks=sys.getallocatedblocks(),
            heap_mb=heap_mb(),
        )


async def dwell(settings: Settings) -> None:
    town, epoch = Path(settings.directory), time.monotonic_ns()
    book = FileBook(town / f"{settings.name}.events", first_op=epoch)
    async with Node(settings.name, epoch=epoch, directory=FolderDirectory(town / NAMES)) as node:
        await Lasting(settings, node, book).live()


def main() -> None:
    store.REMEMBERED = REMEMBERED
    asyncio.run(dwell(begin()))


if __name__ == "__main__":
    main()
