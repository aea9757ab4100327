"""Network namespaces for one thread, and a wire between two of them that a test can damage.

    within(machine.name, lambda: look_mtu([peer]))        # in a thread that lives in that namespace

    with wire() as (near, far, line):                     # namespaces and their ends: near.address, far.address
        line.drop_every = 5                               # every fifth packet is lost
        line.largest = 1400                               # what is larger is lost without a word
        line.delay_s = 0.02                               # in each direction

The wire is two TUN devices with a thread between them: no kernel module for faults is needed. Needs root and ``ip``
(``tests.support.machines.why_not``).
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
TUN = Path("/dev/net/tun")
_LIBC = ctypes.CDLL(None, use_errno=True)
_made = itertools.count()


def within(namespace: str, work: Callable[[], T]) -> T:
    """What ``work`` returns, or raises, in that network namespace."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            _enter(namespace)
            result.set_result(work())
        except BaseException as error:  # whoever waits gets it
            result.set_exception(error)

    thread = threading.Thread(target=run, name=f"in-{namespace}", daemon=True)
    thread.start()
    return result.result(120)


def _enter(namespace: str) -> None:
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if _LIBC.setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    finally:
        os.close(descriptor)


class End(NamedTuple):
    """One end of a wire."""

    name: str  # of the namespace
    address: str


class Line(threading.Thread):
    """What carries packets from one end to the other."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(name="wire", daemon=True)
        self.drop_every = 0
        self.largest = 0
        self.delay_s = 0.0
        self._to = {one: other, other: one}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._seen = itertools.count(1)
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else 0.1
            for descriptor in select.select(list(self._to), [], [], min(wait_s, 0.1))[0]:
                self._take(self._to[descriptor], os.read(descriptor, 1 << 16))
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, descriptor, packet = heapq.heappop(self._late)
                _put(descriptor, packet)

    def _take(self, onward: int, packet: bytes) -> None:
        number = next(self._seen)
        if (self.drop_every and number % self.drop_every == 0) or 0 < self.largest < len(packet):
            return
        if self.delay_s:
            heapq.heappush(self._late, (time.monotonic() + self.delay_s, number, onward, packet))
        else:
            _put(onward, packet)

    def end(self) -> None:
        self._over.set()
        self.join(10)
        for descriptor in self._to:
            os.close(descriptor)


def _put(descriptor: int, packet: bytes) -> None:
    with suppress(OSError):  # the other end is down
        os.write(descriptor, packet)


@contextmanager
def wire() -> Iterator[tuple[End, End, Line]]:
    """Two namespaces, each with one interface ``tun0`` to the other one."""
    mark = os.getpid() * 8 + next(_made) % 8
    net = f"10.{192 + mark // 256 % 64}.{mark % 256}"
    ends = [End(f"rlw{mark}-{n}", f"{net}.{n}") for n in (1, 2)]
    made: list[str] = []
    line: Line | None = None
    try:
        for end in ends:
            _ip("netns", "add", end.name)
            made.append(end.name)
        line = Line(*(within(end.name, _tun) for end in ends))
        for end in ends:
            _ip("-n", end.name, "address", "add", f"{end.address}/24", "dev", "tun0")
            _ip("-n", end.name, "link", "set", "tun0", "mtu", str(MTU), "up")
            _ip("-n", end.name, "link", "set", "lo", "up")
        line.start()
        yield ends[0], ends[1], line
    finally:
        if line is not None:
            line.end()
        for name in made:
            _ip("netns", "del", name)


def _tun() -> int:
    descriptor = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))
    return descriptor


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout
