"""One node's objects: their bytes, in memory or on disk, and who keeps them.

    put -> in memory <-> on disk (when memory is short and nobody reads it) -> gone (with its last lease)

Invariants:

- an object's bytes never change while anybody can read them, in whatever process, also one whose lease has expired;
- memory never exceeds its bound: what nobody reads goes to disk, what was used longest ago first; where that is not
  possible the put that needed room fails, and nothing is lost;
- of an object that is gone the reason is kept (of the newest ``REMEMBERED``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from bus.codec import Frame
from bus.objects.disk import Disk, FileDisk
from bus.objects.handle import ObjectGone, ObjectStoreFull, layout_of
from bus.objects.image import wipe_label, write_label
from bus.objects.leases import Key, Lease, Leases
from bus.objects.memory import Memory, Segment, SharedMemory
from bus.objects.pool import Pool, capacity_for
from bus.objects.stored import Stored

log = logging.getLogger(__name__)

MEMORY_BYTES = 2 << 30

REMEMBERED = 10_000

ROOM_S = 1.0
"""How long what finds nothing but objects that are being read waits for the end of that, and how often it looks."""

LOOK_EVERY_S = 0.01

CLOSE_S = 5.0
"""How long the end of a store waits for what is being written or read."""


class ObjectStore:
    """See the module docstring. Belongs to one node, on whose event loop it is used."""

    def __init__(
        self,
        *,
        memory_bytes: int = MEMORY_BYTES,
        directory: Path | None = None,
        memory: Memory | None = None,
        disk: Disk | None = None,
    ) -> None:
        """``directory``: for what memory has no room for. By default it is a place for temporary files."""
        self.epoch = 0  # of its node
        self.memory = memory or SharedMemory()
        self.counters: Counter[str] = Counter()
        self._disk = disk or FileDisk(directory)
        self._pool = Pool(self.memory, memory_bytes)
        self._leases = Leases(self._lease_ended)
        self._stored: dict[int, Stored] = {}
        self._resident: OrderedDict[int, Stored] = OrderedDict()  # used longest ago first
        self._gone: OrderedDict[int, str] = OrderedDict()
        self._ids = itertools.count(1)
        self._last = 0
        self._own = itertools.count(1)  # numbers of this node's own leases
        self._room = asyncio.Lock()  # held by whoever takes memory
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def tidy(self) -> None:
        """Remove what nodes that were killed have left on disk; where that is not possible it is logged."""
        try:
            await self._disk.tidy()
        except OSError as error:
            log.warning("what killed nodes have left on disk cannot be removed: %s", error)

    # ---- in ------------------------------------------------------------------------------------------------------

    async def put(self, frames: Sequence[Frame], type_: str, *, raw: bool, hold_s: float | None) -> Stored:
        """Copy frames, and hold them (for ``hold_s``, or until ``release``). Raises ``ObjectStoreFull``."""
        layout = layout_of(frames, raw=raw)
        stored = Stored(next(self._ids), type_, layout)
        async with self._room:
            segment = await self._allocate(stored.room)
        try:
            into = stored.frames_in(segment)
            for offset, frame in zip(layout.offsets(), frames, strict=True):
                await self.memory.copy(into[offset : offset + len(frame)], memoryview(frame).cast("B"))
            if self._closed:
                raise ObjectGone("its node closed while it was put")
        except BaseException:
            segment.clean = False  # a thread may still be writing to it
            self._pool.give(segment)
            raise
        self._settle(stored, segment)
        self._stored[stored.id] = stored
        self._last = max(self._last, stored.id)
        self.hold(stored.id, hold_s)
        self.counters["objects_put"] += 1
        return stored

    def _settle(self, stored: Stored, segment: Segment) -> None:
        """All of an object is in a segment."""
        write_label(segment.view, self.epoch, stored.id, stored.head)
        stored.segment = segment
        self._resident[stored.id] = stored

    async def _allocate(self, size: int) -> Segment:
        """Memory for an object; with ``_room``."""
        bound = self._pool.bound
        if capacity_for(size) > bound:
            raise ObjectStoreFull(f"an object of {size} bytes in a store of {bound}: give the node a larger one")
        until = asyncio.get_running_loop().time() + ROOM_S
        while not self._closed:
            try:
                segment = self._pool.take(size)
            except (OSError, MemoryError) as error:
                raise ObjectStoreFull(f"an object of {size} bytes: the system has no memory for it ({error})") from None
            if segment is not None:
                return segment
            victim = next((one for one in self._resident.values() if self._unread(one)), None)
            if victim is not None:
                await self._moved(victim, self._spill)
            elif asyncio.get_running_loop().time() < until:
                await asyncio.sleep(LOOK_EVERY_S)  # who reads in other processes does not say when that is over
            else:
                read = sum(one.size for one in self._resident.values())
                raise ObjectStoreFull(
                    f"an object of {size} bytes: the store has {bound}, of which {self._pool.used} are in use, and "
                    f"all {len(self._resident)} objects in it ({read} bytes) are being read"
                )
        raise ObjectStoreFull("the node has closed")

    def _unread(self, stored: Stored) -> bool:
        """Whether nobody needs an object where it is in memory."""
        return not self._leases.reads(stored.id) and (stored.segment is None or stored.segment.unread())

    # ---- memory and disk -----------------------------------------------------------------------------------------

    async def _moved(self, stored: Stored, move: Callable[[Stored], Coroutine[Any, Any, None]]) -> None:
        """Wait for a move of an object. It goes on where its waiter does not: memory that is being read or written
        must not be used for something else. Raises what the move raises."""
        if stored.moving is None:
            stored.moving = self._start(self._move(stored, move))
        await asyncio.shield(stored.moving)

    async def _move(self, stored: Stored, move: Callable[[Stored], Coroutine[Any, Any, None]]) -> None:
        try:
            await move(stored)
        finally:
            stored.moving = None
            if stored.id not in self._stored:  # gone meanwhile
                self._clean_up(stored)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, also if nobody waits
        return task

    async def _spill(self, stored: Stored) -> None:
        """To disk, unless somebody begins to read it meanwhile."""
        if stored.checksum is None:
            try:
                stored.checksum = await self._disk.write(str(stored.id), stored.content)
            except OSError as error:
                raise ObjectStoreFull(f"{stored.size} bytes could not be moved to disk to make room: {error}") from None
            self.counters["objects_spilled"] += 1
        segment = stored.segment
        if segment is None or stored.id not in self._stored or self._leases.reads(stored.id):
            return
        wipe_label(segment.view)
        if segment.unread():
            self._evict(stored)
        else:  # somebody began to read it just now
            write_label(segment.view, self.epoch, stored.id, stored.head)

    def _evict(self, stored: Stored) -> None:
        """Nobody finds it in memory from now on; who reads it there keeps it."""
        segment, stored.segment = stored.segment, None
        self._resident.pop(stored.id, None)
        if segment is not None:
            wipe_label(segment.view)
            self._pool.give(segment)

    async def _restore(self, stored: Stored) -> None:
        """From disk."""
        async with self._room:
            segment = await self._allocate(stored.room)
        if stored.id in self._stored and stored.checksum is not None:
            try:
                await self._disk.read(str(stored.id), stored.frames_in(segment), stored.checksum)
            except OSError as error:
                log.error("object %d cannot be read back from disk: %s", stored.id, error)
                self._discard(stored.id, f"what was written to disk of it cannot be read back: {error}")
        if stored.id not in self._stored:
            self._pool.give(segment)
            return
        self._settle(stored, segment)
        self.counters["objects_restored"] += 1

    # ---- leases --------------------------------------------------------------------------------------------------

    def hold(self, id_: int, term_s: float | None = None) -> None:
        """Let this node keep an object. Raises ``ObjectGone``."""
        self._lend(id_, ("", 0, next(self._own)), reads=False, term_s=term_s)

    async def pin(self, id_: int) -> tuple[Stored, Segment]:
        """An object in memory, for a reader in this process until ``unpin``. Raises like ``read``."""
        stored, key = await self.read(id_)
        segment = stored.segment
        if segment is None:
            raise ObjectGone("it went to disk while it was read")
        segment.pins += 1
        self.give_back(key)
        return stored, segment

    def release(self, id_: int) -> None:
        """End the newest of this node's own holds, if there is one."""
        own = [lease for lease in self._leases.on(id_) if lease.key[0] == "" and not lease.reads]
        if own:
            self.give_back(own[-1].key)

    def hold_for(self, id_: int, key: Key, term_s: float) -> Stored:
        """Let another node keep an object. Raises ``ObjectGone``."""
        return self._lend(id_, key, reads=False, term_s=term_s)

    async def read(self, id_: int, key: Key | None = None, *, term_s: float | None = None) -> tuple[Stored, Key]:
        """Have an object in memory, for this node or another, until its lease is given back. Raises ``ObjectGone`` and
        ``ObjectStoreFull``."""
        key = key or ("", 0, next(self._own))
        stored = self._lend(id_, key, reads=True, term_s=term_s)
        try:
            while stored.segment is None:
                await self._moved(stored, self._restore)
                self._check(id_)
            if self._leases.get(key) is None:
                raise ObjectGone("its reader's lease ended while it was read back from disk")
        except BaseException:
            self.give_back(key)
            raise
        self._resident.move_to_end(id_)
        return stored, key

    def _lend(self, id_: int, key: Key, *, reads: bool, term_s: float | None) -> Stored:
        stored = self._check(id_)
        self._leases.add(Lease(key, id_, reads=reads, term_s=term_s))
        return stored

    def _check(self, id_: int) -> Stored:
        stored = self._stored.get(id_)
        if stored is None:
            self.counters["objects_asked_gone"] += 1
            raise ObjectGone(self._why(id_))
        return stored

    def _why(self, id_: int) -> str:
        if id_ in self._gone:
            return self._gone[id_]
        return "it went long ago" if 0 < id_ <= self._last else "its owner never had it"

    def lent(self, key: Key) -> Stored | None:
        """What a lease is on, while it lasts."""
        lease = self._leases.get(key)
        return None if lease is None else self._stored.get(lease.object)

    def renew(self, key: Key) -> bool:
        """For another term; whether the lease still was."""
        return self._leases.renew(key)

    def give_back(self, key: Key) -> None:
        """Its holder is done with an object."""
        lease = self._leases.remove(key)
        if lease is not None:
            self._let_go(lease, "it was released")

    def node_gone(self, name: str, epoch: int, why: str) -> None:
        """An incarnation of a node, and all before it, keeps nothing any more."""
        self._leases.end(name, epoch, why)

    def _lease_ended(self, lease: Lease, why: str) -> None:
        """Otherwise than by being given back: its holder may still be reading."""
        stored = self._stored.get(lease.object)
        if stored is not None and lease.reads and stored.segment is not None:
            stored.segment.clean = False
        self.counters["objects_leases_expired" if why == "expired" else "objects_leases_lost"] += 1
        self._let_go(lease, "the last lease on it expired" if why == "expired" else f"its last holder went: {why}")

    def _let_go(self, lease: Lease, why: str) -> None:
        if not self._leases.on(lease.object):
            self._discard(lease.object, why)

    def _discard(self, id_: int, why: str) -> None:
        stored = self._stored.pop(id_, None)
        if stored is None:
            return
        self._leases.forget(id_)
        if stored.segment is not None:
            wipe_label(stored.segment.view)
        self._gone[id_] = why
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        self.counters["objects_gone"] += 1
        if stored.moving is None:
            self._clean_up(stored)

    def _clean_up(self, stored: Stored) -> None:
        """Its memory and its file."""
        self._evict(stored)
        if stored.checksum is not None:
            self._disk.remove(str(stored.id))

    # ---- what there is, and the end ------------------------------------------------------------------------------

    def describe(self) -> dict[str, int]:
        """In numbers."""
        return {
            "objects": len(self._stored),
            "in_memory": len(self._resident),
            "memory_bytes": self._pool.used,
            "idle_bytes": self._pool.idle,
            "spilled_bytes": sum(one.layout.span for one in self._stored.values() if one.segment is None),
            "leases": len(self._leases),
        }

    async def close(self) -> None:
        """All objects go; who still reads one keeps its bytes. Idempotent."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for id_ in list(self._stored):
            self._discard(id_, "its node closed")
        self._pool.close()
        self._disk.close()
