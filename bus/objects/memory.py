"""Memory that objects lie in: shared with the other processes of the machine where that is possible.

Invariants:

- shared memory has no name in any file system (memfd), so nothing of it is left when the last process that maps it has
  ended, however that ended;
- what another process is asked to map is mapped only if it is what it should be: an anonymous file of this kind, of
  exactly this size, which can never shrink (or whoever reads it could be killed by the kernel for it);
- who reads another process's segment has a lock on it (flock), which ends when the reader says so or its process ends,
  however that ends, and never before.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import resource
import stat
import weakref
from typing import Protocol

from bus.objects.copying import Copier
from bus.objects.handle import Place
from bus.objects.host import Host, Watched, runs, this_host

SHARED_FROM_BYTES = 65_537
"""Smaller objects are kept in this process's own memory, and travel in the answer to who asks for them."""

SHARE_OF_DESCRIPTORS = 4
"""A segment takes two; at most this part of what the process may have open goes into them."""

PIECE_BYTES = 8 << 20
"""Copied on the event loop before that gets its turn."""

THREADS_FROM_BYTES = 32 << 20
"""Copied by threads."""

NAME = "rollart-object"

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0


class Segment:
    """A piece of memory. What views of it are still held when it is released keep it for themselves."""

    __slots__ = ("_descriptor", "capacity", "clean", "pins", "place", "view")

    def __init__(
        self, buffer: mmap.mmap | bytearray, descriptor: int | None = None, place: Place | None = None
    ) -> None:
        self._descriptor = descriptor
        self.view = memoryview(buffer)
        self.capacity = len(self.view)
        self.place = place
        self.pins = 0  # readers in this process
        self.clean = True  # False: what it holds may be on its way to somebody, whatever is known of that

    def unread(self) -> bool:
        """Whether nobody reads it just now: no other process has it locked, and this one has not pinned it."""
        if self.pins or self._descriptor is None:
            return not self.pins
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        except OSError:
            return False
        return True

    def unpin(self) -> None:
        """A reader less in this process."""
        self.pins -= 1

    def release(self) -> None:
        """Idempotent."""
        self.view = memoryview(b"")
        self.place = None
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()


class Mapped(Protocol):
    """Another process's segment."""

    @property
    def view(self) -> memoryview:
        """Read-only, to be read under a lock."""

    def lock(self) -> bool:
        """Keep its owner from using it for something else; False where its owner is just doing so."""

    def unlock(self) -> None:
        """It is not read any more."""

    def close(self) -> None:
        """Unmap it, once no view of it is left. Idempotent."""


class MappedSegment:
    """See ``Mapped``. ``owner``: kept for as long as this is."""

    def __init__(self, descriptor: int, capacity: int, owner: Watched | None) -> None:
        """``descriptor``: one of its own, opened here. Raises ``OSError``, and then leaves it open."""
        self._owner = owner
        self._descriptor: int | None = None
        self.view = memoryview(mmap.mmap(descriptor, capacity, mmap.MAP_SHARED, mmap.PROT_READ))
        self._descriptor = descriptor

    def lock(self) -> bool:
        if self._descriptor is None:
            return False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock(self) -> None:
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
            self.view = memoryview(b"")
            self._owner = None

    def __del__(self) -> None:  # where its loop had ended before its last reader
        self.close()


class Memory(Protocol):
    """Where segments come from. Real memory here, a simulated machine's in ``bus.objects.simulated``."""

    @property
    def host(self) -> Host | None:
        """With which processes it can be shared; None for none."""

    def allocate(self, capacity: int) -> Segment:
        """Raises ``OSError`` where there is none left."""

    async def copy(self, into: memoryview, source: memoryview) -> None:
        """All of it. Where this is cancelled, some may still be copied afterwards."""

    def map(self, host: Host, place: Place) -> Mapped | None:
        """Another process's segment; None where it cannot be mapped from here."""

    def runs(self, host: Host) -> bool | None:
        """Whether a process still runs; None where that cannot be told from here."""


class PrivateMemory:
    """Of this process alone."""

    @property
    def host(self) -> Host | None:
        return None

    def allocate(self, capacity: int) -> Segment:
        return Segment(mmap.mmap(-1, capacity) if capacity >= SHARED_FROM_BYTES else bytearray(capacity))

    async def copy(self, into: memoryview, source: memoryview) -> None:
        for start in range(0, len(source), PIECE_BYTES):
            if start:
                await asyncio.sleep(0)  # the event loop's turn
            into[start : start + PIECE_BYTES] = source[start : start + PIECE_BYTES]

    def map(self, host: Host, place: Place) -> Mapped | None:
        return None

    def runs(self, host: Host) -> bool | None:
        return None


class SharedMemory:
    """See the module docstring. Beyond its share of descriptors, and where the system has no such memory, segments are
    private: other processes fetch what is in them."""

    def __init__(self) -> None:
        self._host = this_host() if hasattr(os, "memfd_create") else None
        self._private = PrivateMemory()
        self._copier = Copier()
        self._owners: weakref.WeakValueDictionary[Host, Watched] = weakref.WeakValueDictionary()  # of what is mapped

    @property
    def host(self) -> Host | None:
        return self._host

    def allocate(self, capacity: int) -> Segment:
        if self._host is None or capacity < SHARED_FROM_BYTES:
            return self._private.allocate(capacity)
        try:
            descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:  # no more descriptors, or not permitted
            return self._private.allocate(capacity)
        if descriptor > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE_OF_DESCRIPTORS:  # the lowest free one
            os.close(descriptor)
            return self._private.allocate(capacity)
        try:
            os.ftruncate(descriptor, capacity)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            place = Place(descriptor, os.fstat(descriptor).st_ino, capacity)
            return Segment(mmap.mmap(descriptor, capacity), descriptor, place)
        except BaseException:
            os.close(descriptor)
            raise

    async def copy(self, into: memoryview, source: memoryview) -> None:
        """Large ones beside the event loop, and in several threads: one does not get all of the memory's bandwidth."""
        if len(source) < THREADS_FROM_BYTES:
            await self._private.copy(into, source)
        else:
            await self._copier.copy(into, source)

    def map(self, host: Host, place: Place) -> Mapped | None:
        if self._host is None or not runs(host, self._host):
            return None
        path = f"/proc/{host.pid}/fd/{place.descriptor}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{NAME}"):  # to open anything else could have effects
                return None
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:  # it is gone, or another user's
            return None
        try:
            if _is(descriptor, place):
                return MappedSegment(descriptor, place.capacity, self._owner(host))
        except OSError:  # no memory to map it into
            pass
        os.close(descriptor)
        return None

    def runs(self, host: Host) -> bool | None:
        watched = self._owners.get(host)
        if watched is not None:
            return watched.runs()
        return None if self._host is None else runs(host, self._host)

    def _owner(self, host: Host) -> Watched | None:
        """None where it can only be looked for in /proc."""
        watched = self._owners.get(host)
        if watched is None:
            with contextlib.suppress(OSError):
                watched = self._owners[host] = Watched(host)
        return watched


def _is(descriptor: int, place: Place) -> bool:
    """Whether an open file is the segment that is meant."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or (found.st_ino, found.st_size) != (place.inode, place.capacity):
        return False
    with contextlib.suppress(OSError):
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    return False
