"""A node's objects: those it owns, and those of other nodes that it reads.

Invariant: what ``get`` returns is what was put, of the declared type; its arrays are read-only views of memory that
stays as it is for as long as anything refers to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from actors.core.borrowing import Borrower, Content, when_dropped
from actors.core.lending import Lender
from bus.codec import Decoder, Encoder, Frame
from bus.message import BusError, DeadlineExceeded, DecodeError
from bus.objects.handle import Object, ObjectError, ObjectGone
from bus.objects.store import ObjectStore

if TYPE_CHECKING:
    from actors.core.liveness import Liveness
    from actors.core.node import Node

T = TypeVar("T")

PUT_S = 60.0
"""How long ``put`` waits for room."""

RAW = (bytes, bytearray, memoryview)
"""Put as they are; got as ``bytes`` (a copy) or ``memoryview``."""


class Objects:
    """See the module docstring."""

    def __init__(
        self, node: Node, store: ObjectStore, liveness: Liveness, decoder: Callable[[Any], Decoder[Any]]
    ) -> None:
        """``decoder``: for a type."""
        self.store = store
        store.epoch = node.address.epoch
        self.lender = Lender(store)
        self.borrower = Borrower(node, store.memory, liveness)
        self._node = node
        self._decoder = decoder
        self._encoder = Encoder()
        self._closed = False

    async def put(self, value: T, *, hold_s: float | None, timeout_s: float) -> Object[T]:
        """See ``Keeper.put``."""
        self._check_open("put")
        raw = isinstance(value, RAW)
        type_ = "bytes" if raw else type(value).__name__
        frames = [cast(Frame, value)] if raw else self._encoder.encode(value)
        if raw:
            frames = [memoryview(frame).cast("B") for frame in frames]
        what = f"{type_} of {sum(map(len, frames))} bytes to be put"
        stored = await self._in_time(self.store.put(frames, type_, raw=raw, hold_s=hold_s), what, timeout_s)
        place = None if stored.segment is None else stored.segment.place
        return Object(self._node.address, stored.id, stored.size, type_, self.store.memory.host, place)

    async def get(self, handle: Object[Any], type_: type[T], *, timeout_s: float) -> T:
        """See ``Keeper.get``."""
        self._check_open("get")
        own = self._node.address == handle.owner
        reading = self._read_own(handle) if own else self.borrower.read(_checked(handle), timeout_s)
        content = await self._in_time(reading, str(handle), timeout_s)
        return self._decode(handle, content, type_)

    async def _read_own(self, handle: Object[Any]) -> Content:
        try:
            stored, segment = await self.store.pin(handle.id)
        except ObjectGone as error:
            raise ObjectGone(f"{handle} is gone: {error}") from None
        anchor = np.frombuffer(stored.frames_in(segment), np.uint8)
        when_dropped(anchor, self._node.loop, segment.unpin)
        if (stored.type, stored.size) != (handle.type, handle.size):
            raise ObjectError(f"a false handle: {handle}; it is {stored.type}, {stored.size} bytes")
        self._node.counters["objects_got_own"] += 1
        return Content(stored.type, stored.layout, anchor.data.toreadonly())

    def _decode(self, handle: Object[Any], content: Content, type_: type[T]) -> T:
        """Raises ``DecodeError`` where an object is of another type."""
        frames = content.layout.frames(content.view)
        name = type_.__name__ if isinstance(type_, type) else ""
        if content.layout.raw:
            if name == "memoryview":
                return cast(T, frames[0])
            if name == "bytes":
                return cast(T, bytes(frames[0]))
            raise DecodeError(f"{handle} is bytes, expected {name or type_}")
        if name and name != content.type:
            raise DecodeError(f"{handle} is a {content.type}, expected {name}")
        try:
            return cast(T, self._decoder(type_).decode(frames))
        except DecodeError as error:
            raise DecodeError(f"{handle}: {error}") from None

    async def hold(self, handle: Object[Any], *, timeout_s: float) -> None:
        """See ``Keeper.hold``."""
        self._check_open("hold")
        if self._node.address != handle.owner:
            await self._in_time(self.borrower.hold(_checked(handle), timeout_s), str(handle), timeout_s)
            return
        try:
            self.store.hold(handle.id)
        except ObjectGone as error:
            raise ObjectGone(f"{handle} is gone: {error}") from None

    def release(self, handle: Object[Any]) -> None:
        """See ``Keeper.release``."""
        if self._node.address == handle.owner:
            self.store.release(handle.id)
        else:
            self.borrower.release(handle)

    async def _in_time(self, work: Any, what: str, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            self._node.counters["deadlines"] += 1
            who = f"{self._node.address.name} waited for {what}"
            raise DeadlineExceeded(f"{who}: not there within {timeout_s:g} s") from None

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise BusError(f"node {self._node.address.name} has closed: cannot {what} an object")

    def gone(self, name: str, epoch: int, why: str) -> None:
        """An incarnation of a node, and all before it, neither keeps objects nor has any."""
        self.store.node_gone(name, epoch, why)
        self.borrower.owner_gone(name, epoch)

    def describe(self) -> dict[str, int]:
        """In numbers."""
        return {**self.store.describe(), "borrowed": len(self.borrower), "mapped": self.borrower.mapped}

    async def close(self) -> None:
        """What is read here stays readable. Idempotent."""
        self._closed = True
        self.borrower.close()
        await self.store.close()


def _checked(handle: Object[Any]) -> Object[Any]:
    """Raises ``ObjectError`` for a handle that no node has made."""
    if handle.owner.epoch <= 0 or handle.id <= 0:
        raise ObjectError(f"a false handle: {handle} names no object of a certain incarnation of a node")
    return handle


class Keeper:
    """What a node offers of it."""

    _objects: Objects

    async def put(self, value: T, *, hold_s: float | None = None, timeout_s: float = PUT_S) -> Object[T]:
        """Keep a value here (copied: leave it unchanged until then), for whoever gets the handle, until ``release`` or
        for ``hold_s``; longer where others hold or read it. Raises ``TypeError`` for what cannot travel,
        ``ObjectStoreFull``."""
        return await self._objects.put(value, hold_s=hold_s, timeout_s=timeout_s)

    async def get(self, handle: Object[Any], type_: type[T], *, timeout_s: float) -> T:
        """A value that was put, here or on another node; its arrays are read-only views, without a copy on one
        machine. What was put as bytes is got as ``bytes`` or ``memoryview``. Raises ``ObjectGone``, ``ObjectError``
        (a false handle), ``DecodeError`` (it is of another type), and what ``ask`` raises."""
        return await self._objects.get(handle, type_, timeout_s=timeout_s)

    async def hold(self, handle: Object[Any], *, timeout_s: float) -> None:
        """Keep an object, wherever it is, until ``release`` or the end of this node. Raises like ``get``."""
        await self._objects.hold(handle, timeout_s=timeout_s)

    def release(self, handle: Object[Any]) -> None:
        """Undo one ``put`` or ``hold`` of this node; nothing where there is none (any more)."""
        self._objects.release(handle)

    @asynccontextmanager
    async def putting(self, value: T, *, timeout_s: float = PUT_S) -> AsyncIterator[Object[T]]:
        """``put`` for a while: ``async with node.putting(value) as handle``."""
        handle = await self.put(value, timeout_s=timeout_s)
        try:
            yield handle
        finally:
            self.release(handle)
