"""Objects of other nodes: mapped where their owner runs on this machine, fetched where it does not.

Invariants:

- what is mapped is locked as long as anything here still refers to it, and by nothing else: neither silence nor a lost
  message ends that, and the end of this process does. What is fetched is a copy of this node's own, borrowed while it
  is fetched;
- whoever waits for an object gets it, or an error that says whose object it was and what became of it: at once where
  its owner's process has ended on this machine, or its node is known to be gone; else within the time that it set.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from actors.core.lending import TERM_S, Borrow, FetchObject, GiveBack, Lent, ObjectPiece, RenewLeases
from actors.core.ref import Ref
from actors.core.watching import NODE_ACTOR, RETRIES
from bus.message import BusError, Lane, NodeAddress, NotBegun, PeerLost, RemoteError
from bus.objects.handle import Layout, Object, ObjectError, ObjectGone, Place
from bus.objects.image import Head
from bus.objects.mappings import Mappings
from bus.objects.memory import SHARED_FROM_BYTES, Memory

if TYPE_CHECKING:
    from actors.core.liveness import Liveness
    from actors.core.node import Node

T = TypeVar("T")
log = logging.getLogger(__name__)

RENEWALS = 3
"""In a lease's term: two may get lost."""

LOOK_EVERY_S = 1.0
"""How often who waits for an owner looks whether its process still runs."""

_Which = tuple[str, int, int]  # owner, its epoch, its number for the object


class Content:
    """An object's bytes, as they can be read here."""

    def __init__(self, type_: str, layout: Layout, view: memoryview) -> None:
        self.type = type_
        self.layout = layout
        self.view = view


class _Copy:
    """One that is here as long as somebody refers to it."""

    def __init__(self, type_: str, layout: Layout, anchor: np.ndarray) -> None:
        self.type = type_
        self.layout = layout
        self.anchor = weakref.ref(anchor)


class Borrower:
    """See the module docstring."""

    def __init__(self, node: Node, memory: Memory, liveness: Liveness) -> None:
        self._node = node
        self._memory = memory
        self._liveness = liveness
        self._mappings = Mappings(memory)
        self._numbers = itertools.count(1)
        self._leases: dict[NodeAddress, dict[int, Object[Any]]] = {}
        self._renewals: dict[NodeAddress, asyncio.TimerHandle] = {}
        self._holds: dict[_Which, list[int]] = {}
        self._copies: dict[_Which, _Copy] = {}
        self._turns: weakref.WeakValueDictionary[_Which, asyncio.Lock] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        """Leases that this node has."""
        return sum(map(len, self._leases.values()))

    @property
    def mapped(self) -> int:
        """Segments of other processes that are mapped here, also those that wait to be read again."""
        return len(self._mappings)

    # ---- reading -------------------------------------------------------------------------------------------------

    async def read(self, handle: Object[Any], timeout_s: float) -> Content:
        """Raises ``ObjectGone``, ``ObjectError`` and what ``ask`` raises."""
        content = None if handle.place is None else self._map(handle, handle.place)
        if content is not None:
            return content
        which = _which(handle)
        turn = self._turns.setdefault(which, asyncio.Lock())
        async with turn:  # who asks for the same object meanwhile finds it here
            copy = self._copies.get(which)
            anchor = None if copy is None else copy.anchor()
            if copy is not None and anchor is not None:
                self._node.counters["objects_got_again"] += 1
                return Content(copy.type, copy.layout, anchor.data.toreadonly())
            return await self._read(handle, timeout_s)

    async def _read(self, handle: Object[Any], timeout_s: float) -> Content:
        lease, which = next(self._numbers), _which(handle)
        lent = await self._borrow(handle, lease, reads=True, timeout_s=timeout_s)
        if lent.layout.span < SHARED_FROM_BYTES:
            self._drop(handle.owner, lease)  # as its owner has
            _check(handle, lent)
            self._node.counters["objects_got_small"] += 1
            return Content(lent.type, lent.layout, memoryview(lent.content))
        try:
            _check(handle, lent)
            content = None if lent.place is None else self._map(handle, lent.place)
            if content is not None:
                return content
            copy = await self._fetch(handle, lease, lent.layout, timeout_s)
        finally:
            self._give_back(handle.owner, lease)
        self._copies[which] = _Copy(lent.type, lent.layout, copy)
        when_dropped(copy, self._node.loop, lambda: self._forget_copy(which))
        return Content(lent.type, lent.layout, copy.data.toreadonly())

    async def _borrow(self, handle: Object[Any], lease: int, *, reads: bool, timeout_s: float) -> Lent:
        self._leases.setdefault(handle.owner, {})[lease] = handle
        self._renew_later(handle.owner)
        message = Borrow(handle.id, self._node.address, lease, reads)
        there = Ref(handle.owner, NODE_ACTOR)
        ask = self._node.ask(there, message, timeout_s=timeout_s, retries=RETRIES, about=str(handle))
        try:
            lent = await self._while_it_runs(handle, ask)
        except BaseException:
            self._give_back(handle.owner, lease)
            raise
        if lent.refusal:
            self._drop(handle.owner, lease)
            kind = ObjectGone if lent.gone else ObjectError
            raise kind(f"{handle} {'is gone' if lent.gone else 'cannot be had'}: {lent.refusal}")
        return lent

    async def _while_it_runs(self, handle: Object[Any], work: Coroutine[Any, Any, T]) -> T:
        """What comes of work that needs the owner. Raises ``ObjectGone`` once that is gone."""
        task = asyncio.ensure_future(work)
        watched = False
        try:
            while True:
                if handle.host is not None and self._memory.runs(handle.host) is False:
                    raise ObjectGone(f"{handle} is gone: its owner's process has ended")
                done, _ = await asyncio.wait({task}, timeout=LOOK_EVERY_S)
                if done:
                    return task.result()
                if not watched:
                    watched = True
                    self._liveness.hold(handle.owner)
        except (PeerLost, NotBegun) as error:
            if isinstance(error, PeerLost) and not self._liveness.lost(handle.owner):
                raise  # on the way, or because this node closes
            raise ObjectGone(f"{handle} is gone: {error}") from None
        finally:
            if watched:
                self._liveness.release(handle.owner)
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, BusError):
                    await task
            elif not task.cancelled():
                task.exception()  # seen, also where the reader was cancelled at the same time

    def _map(self, handle: Object[Any], place: Place) -> Content | None:
        """An object in its owner's memory, locked until nothing here refers to it any more; None where it is not
        there, or cannot be read from here. Raises ``ObjectError`` for a false handle."""
        if handle.host is None:
            return None
        host = handle.host
        found = self._mappings.read(host, place, handle.owner.epoch, handle.id)
        if found is None:
            return None
        head, view = found
        anchor = np.frombuffer(view, np.uint8)
        when_dropped(anchor, self._node.loop, lambda: self._mappings.done(host, place))
        _check(handle, head)
        self._node.counters["objects_got_local"] += 1
        return Content(head.type, head.layout, anchor.data.toreadonly())

    def _forget_copy(self, which: _Which) -> None:
        copy = self._copies.get(which)
        if copy is not None and copy.anchor() is None:
            del self._copies[which]

    async def _fetch(self, handle: Object[Any], lease: int, layout: Layout, timeout_s: float) -> np.ndarray:
        """A copy, over the bulk lane."""
        try:
            buffer = np.empty(layout.span, np.uint8)
        except (MemoryError, ValueError) as error:
            raise ObjectError(f"{handle} does not fit into this node's memory: {error}") from None
        await self._while_it_runs(handle, self._fill(handle, lease, buffer, timeout_s))
        self._node.counters["objects_got_remote"] += 1
        return buffer

    async def _fill(self, handle: Object[Any], lease: int, buffer: np.ndarray, timeout_s: float) -> None:
        message = FetchObject(self._node.address, lease)
        there = Ref(handle.owner, NODE_ACTOR)
        stream = self._node.stream(there, message, timeout_s=timeout_s, lane=Lane.BULK, about=str(handle))
        filled = 0
        try:
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    filled = _place(handle, piece, buffer, filled)
        except RemoteError as error:
            raise ObjectError(f"{handle} did not come whole, after {filled} bytes: {error}") from None
        if filled != buffer.nbytes:
            raise ObjectError(f"{handle} did not come whole: {filled} of {buffer.nbytes} bytes")

    # ---- leases --------------------------------------------------------------------------------------------------

    async def hold(self, handle: Object[Any], timeout_s: float) -> None:
        """Keep an object until ``release``. Raises like ``read``."""
        lease = next(self._numbers)
        await self._borrow(handle, lease, reads=False, timeout_s=timeout_s)
        self._holds.setdefault(_which(handle), []).append(lease)

    def release(self, handle: Object[Any]) -> None:
        """End the newest hold on an object, if there is one."""
        holds = self._holds.get(_which(handle), [])
        if holds:
            self._give_back(handle.owner, holds.pop())
        if not holds:
            self._holds.pop(_which(handle), None)

    def _give_back(self, owner: NodeAddress, lease: int) -> None:
        """Where that gets lost, the lease expires."""
        if self._drop(owner, lease):
            self._node.tell(Ref(owner, NODE_ACTOR), GiveBack(self._node.address, lease))

    def _drop(self, owner: NodeAddress, lease: int) -> bool:
        leases = self._leases.get(owner, {})
        known = leases.pop(lease, None) is not None
        if known and not leases:
            del self._leases[owner]
        return known

    def _renew_later(self, owner: NodeAddress) -> None:
        if owner not in self._renewals:
            wait_s = TERM_S / RENEWALS
            self._renewals[owner] = self._node.loop.call_later(wait_s, self._renew_soon, owner)

    def _renew_soon(self, owner: NodeAddress) -> None:
        del self._renewals[owner]
        if owner in self._leases:
            self._node.background(self._renew(owner, list(self._leases[owner])))
            self._renew_later(owner)

    async def _renew(self, owner: NodeAddress, leases: list[int]) -> None:
        message = RenewLeases(self._node.address, leases)
        try:
            renewed = await self._node.ask(Ref(owner, NODE_ACTOR), message, timeout_s=TERM_S, retries=RETRIES)
        except PeerLost as error:
            self.owner_gone(owner.name, owner.epoch)
            log.info("node %s reads objects of an owner that is gone: %s", self._node.address.name, error)
        except BusError as error:
            self._node.counters["objects_unrenewed"] += 1
            log.warning("leases of node %s are not renewed: %s", self._node.address.name, error)
        else:
            for lease in renewed.ended:
                self._drop(owner, lease)
                self._node.counters["objects_leases_overdue"] += 1

    def owner_gone(self, name: str, epoch: int) -> None:
        """There is nobody to renew for, or to give back to; what is mapped stays so."""
        for owner in [owner for owner in self._leases if owner.name == name and owner.epoch <= epoch]:
            del self._leases[owner]
        for which in [which for which in self._holds if which[0] == name and which[1] <= epoch]:
            del self._holds[which]

    def close(self) -> None:
        """Views that are still held stay good."""
        self._leases.clear()
        for timer in self._renewals.values():
            timer.cancel()
        self._mappings.close()


def when_dropped(anchor: np.ndarray, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call something on the loop once nothing refers to an array, or to a view of it, any more."""
    weakref.finalize(anchor, _post, loop, call).atexit = False


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """In whatever thread the last reference went."""
    with suppress(RuntimeError):  # the loop has closed
        loop.call_soon_threadsafe(call)


def _which(handle: Object[Any]) -> _Which:
    return handle.owner.name, handle.owner.epoch, handle.id


def _check(handle: Object[Any], found: Lent | Head) -> None:
    size = sum(found.layout.sizes)
    if (found.type, size) != (handle.type, handle.size):
        raise ObjectError(f"a false handle: {handle}; it is {found.type}, {size} bytes")


def _place(handle: Object[Any], piece: ObjectPiece, buffer: np.ndarray, filled: int) -> int:
    end = filled + piece.data.nbytes
    if piece.data.dtype != np.uint8 or piece.data.ndim != 1 or piece.offset != filled or end > buffer.nbytes:
        what = f"{piece.data.nbytes} bytes of {piece.data.dtype} at {piece.offset}"
        raise ObjectError(f"{handle}: {filled} of {buffer.nbytes} bytes had come, and then {what}")
    buffer[filled:end] = piece.data
    return end
