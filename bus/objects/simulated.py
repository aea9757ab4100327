"""The twins of shared memory and of a disk for nodes on a simulated network: no process, no file, no real time.

    machine = SimulatedMachine("m1")
    Node("a", transport=network.join("a"), objects=ObjectStore(memory=machine.memory(), disk=SimulatedDisk()))

Invariant: nodes with memory of one machine map each other's segments, all others fetch; the same program does the same
in every process.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import zlib
from collections import Counter

from bus.objects.handle import Place
from bus.objects.host import Host
from bus.objects.memory import SHARED_FROM_BYTES, Mapped, PrivateMemory, Segment

_Where = tuple[Host, Place]


class SimulatedMachine:
    """What its processes share."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.numbers = itertools.count(1)
        self.segments: dict[_Where, SimulatedSegment] = {}
        self.running: set[Host] = set()

    def memory(self) -> SimulatedMemory:
        """For one node: a process of its own."""
        return SimulatedMemory(self)


class SimulatedSegment(Segment):
    """Leaves its machine when it is released."""

    __slots__ = ("_host", "_machine", "locks")

    def __init__(self, machine: SimulatedMachine, host: Host, place: Place) -> None:
        self._machine = machine
        self._host = host
        self.locks: Counter[Host] = Counter()
        super().__init__(bytearray(place.capacity), None, place)

    def unread(self) -> bool:
        return super().unread() and not any(
            count for host, count in self.locks.items() if host in self._machine.running
        )

    def release(self) -> None:
        if self.place is not None:
            self._machine.segments.pop((self._host, self.place), None)
        super().release()


class SimulatedMapping:
    """See ``bus.objects.memory.Mapped``."""

    def __init__(self, segment: SimulatedSegment, reader: Host) -> None:
        self.view = segment.view.toreadonly()
        self._locks = segment.locks
        self._reader = reader

    def lock(self) -> bool:
        self._locks[self._reader] += 1
        return True

    def unlock(self) -> None:
        self._locks[self._reader] -= 1

    def close(self) -> None:
        self.view = memoryview(b"")


class SimulatedMemory:
    """See ``bus.objects.memory.Memory``; one process's."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        number = next(machine.numbers)
        self._host = Host(machine.name, 1, number, number)
        machine.running.add(self._host)

    @property
    def host(self) -> Host | None:
        return self._host

    def allocate(self, capacity: int) -> Segment:
        if self._host not in self._machine.running or capacity < SHARED_FROM_BYTES:
            return PrivateMemory().allocate(capacity)
        number = next(self._machine.numbers)
        place = Place(number, number, capacity)
        segment = self._machine.segments[self._host, place] = SimulatedSegment(self._machine, self._host, place)
        return segment

    async def copy(self, into: memoryview, source: memoryview) -> None:
        await PrivateMemory().copy(into, source)

    def map(self, host: Host, place: Place) -> Mapped | None:
        segment = self._machine.segments.get((host, place))
        return None if segment is None else SimulatedMapping(segment, self._host)

    def runs(self, host: Host) -> bool | None:
        return host in self._machine.running if host.boot == self._machine.name else None

    def crash(self) -> None:
        """The process is killed: what it shared is left to those who have mapped it."""
        self._machine.running.discard(self._host)
        for where in [where for where in self._machine.segments if where[0] == self._host]:
            del self._machine.segments[where]


class SimulatedDisk:
    """See ``bus.objects.disk.Disk``."""

    def __init__(self, capacity: int = 1 << 40, *, bytes_per_s: float = 1e9) -> None:
        self.files: dict[str, bytes] = {}
        self.capacity = capacity
        self._bytes_per_s = bytes_per_s

    async def write(self, name: str, content: memoryview) -> int:
        if sum(map(len, self.files.values())) + len(content) > self.capacity:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        self.files[name] = bytes(content)
        checksum = zlib.crc32(content)
        try:
            await asyncio.sleep(len(content) / self._bytes_per_s)
        except BaseException:
            del self.files[name]
            raise
        return checksum

    async def read(self, name: str, into: memoryview, checksum: int) -> None:
        await asyncio.sleep(len(into) / self._bytes_per_s)
        content = self.files.get(name)
        if content is None or len(content) != len(into) or zlib.crc32(content) != checksum:
            raise OSError(errno.EIO, "not what was written", name)
        into[:] = content

    async def tidy(self) -> None:
        """Nobody else has anything here."""

    def remove(self, name: str) -> None:
        self.files.pop(name, None)

    def close(self) -> None:
        self.files.clear()
