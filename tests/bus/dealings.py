"""What nodes have with each other besides calls: names in a folder, actors that are linked across nodes, timers."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import msgspec

from actors.core import Actor, Node, Ref, handler
from bus.message import BusError, NodeAddress
from tests.bus.history import Life, Told, Unwatched, Watched
from tests.bus.workers import Book

OFFER = "partner"
PAIR = "pair"
"""How the names of both ends of a link begin."""

SPAWN_S = 3.0
LINKED_AFTER_S = 0.1
"""By then the request for a link has left."""

TICK_S = 0.2
LATE_S = 5.0
"""By when a timer has ticked at least once, however busy the machine."""


def publish(path: Path, value: object) -> None:
    """A file that is there as a whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(value))
    draft.rename(path)


class FolderDirectory:
    """Names for the processes of one machine: a file each. As in a real store, that of a killed node stays behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    async def announce(self, name: str, ref: Ref) -> None:
        publish(self._folder / name, ref)

    async def withdraw(self, name: str, ref: Ref) -> None:
        if await self.find(name) == ref:
            (self._folder / name).unlink()

    async def find(self, name: str) -> Ref | None:
        try:
            return msgspec.json.decode((self._folder / name).read_bytes(), type=Ref)
        except FileNotFoundError:
            return None


# ---- links ----------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True):
    by: Life


class Greet(msgspec.Struct, frozen=True):
    pass


class PartnerSettings(msgspec.Struct, frozen=True):
    other: Ref


class Partner(Actor):
    """Started on another node by the one that it links itself to."""

    def __init__(self, settings: PartnerSettings) -> None:
        self._other = settings.other

    async def on_start(self) -> None:
        self.link(self._other)
        self.send_after(LINKED_AFTER_S, Greet())

    @handler
    async def greet(self, message: Greet) -> None:
        """Arrives behind the link, so that the other end knows that there is one."""
        self.node.tell(self._other, Hello(Life(self.node.address.name, self.node.address.epoch)))


class Bound(Actor):
    """Ends with its partner, and writes that down; a watch, in the words of a history."""

    def __init__(self, book: Book, life: Life, watch: int) -> None:
        self._book = book
        self._life = life
        self.watch = watch
        self._linked = False
        self.released = False

    @handler
    async def hello(self, message: Hello) -> None:
        self._linked = True
        to = message.by
        self._book.write(Watched(at=self._book.now(), life=self._life, watch=self.watch, to=to.node, epoch=to.epoch))

    def release(self) -> None:
        """It is about to be stopped for another reason."""
        self.released = True
        if self._linked:
            self._book.write(Unwatched(at=self._book.now(), life=self._life, watch=self.watch))

    async def on_stop(self) -> None:
        if self._linked and not self.released:
            self._book.write(Told(at=self._book.now(), life=self._life, watch=self.watch, kind="linked"))


class Pairs:
    """One node's ends of links."""

    def __init__(self, book: Book, node: Node) -> None:
        self._book = book
        self._node = node
        self._life = Life(node.address.name, node.address.epoch)
        self._pairing: set[asyncio.Task[None]] = set()
        node.offer(OFFER, Partner, PartnerSettings)

    def add(self, target: NodeAddress, lasts_s: float) -> None:
        """Link an actor here to one there, and stop the one here after a while."""
        task = asyncio.create_task(self._pair(target, lasts_s))
        self._pairing.add(task)
        task.add_done_callback(self._pairing.discard)

    async def _pair(self, target: NodeAddress, lasts_s: float) -> None:
        bound = Bound(self._book, self._life, self._book.next_op())
        ref = await self._node.spawn(lambda: bound, f"{PAIR}-{bound.watch}")
        try:
            with contextlib.suppress(BusError):  # whatever was started there finds nobody to link itself to
                await self._node.spawn_on(target, OFFER, ref.actor, PartnerSettings(ref), timeout_s=SPAWN_S)
                await asyncio.sleep(lasts_s)
        finally:
            bound.release()
            await self._node.stop(ref)

    async def let_go(self) -> None:
        """Stop all ends that are here."""
        tasks = list(self._pairing)
        for task in tasks:
            task.cancel()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(error, Exception):
                raise error

    def left_over(self) -> list[str]:
        """Ends that should have gone with the other ones."""
        actors = self._node.description().actors
        return [f"{self._life}: actor {name} outlived its link" for name in actors if name.startswith(PAIR)]


# ---- timers ---------------------------------------------------------------------------------------------------------


class Tick(msgspec.Struct, frozen=True):
    pass


class Clock(Actor):
    """Counts the ticks of a timer."""

    def __init__(self) -> None:
        self._begun_at = 0.0
        self._ticks = 0
        self._over = False
        self.wrong: list[str] = []

    async def on_start(self) -> None:
        self._begun_at = asyncio.get_running_loop().time()
        self.every(TICK_S, Tick())

    @handler
    async def tick(self, message: Tick) -> None:
        self._ticks += 1
        if self._over:
            self.wrong.append("a timer outlived its actor")

    async def on_stop(self) -> None:
        self._over = True
        seconds = asyncio.get_running_loop().time() - self._begun_at
        if not (self._ticks > 0 or seconds < LATE_S) or self._ticks > seconds / TICK_S + 1:
            self.wrong.append(f"{self._ticks} ticks in {seconds:.3f} s, one every {TICK_S} s")
