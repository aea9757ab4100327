"""Other processes' segments that are mapped here.

Invariant: a segment is mapped once, however many read it, and for a while longer: its owner will use it again, and each
page's first touch costs as much as the copy of it.
"""

from __future__ import annotations

import asyncio

from bus.objects.handle import Place
from bus.objects.host import Host
from bus.objects.image import Head, read_image
from bus.objects.memory import Mapped, Memory
from bus.objects.pool import IDLE_S

IDLE_AT_MOST = 8
"""Segments that stay mapped while nobody reads them."""


_Where = tuple[Host, Place]


class _Open:
    def __init__(self, mapped: Mapped) -> None:
        self.mapped = mapped
        self.readers = 0
        self.idle: asyncio.TimerHandle | None = None


class Mappings:
    """See the module docstring."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._open: dict[_Where, _Open] = {}
        self._idle: dict[_Where, None] = {}  # the one that is idle longest is the first
        self._closed = False

    def __len__(self) -> int:
        """Segments that are mapped, read or not."""
        return len(self._open)

    def read(self, host: Host, place: Place, epoch: int, id_: int) -> tuple[Head, memoryview] | None:
        """An object as it lies in its owner's memory, until ``done``; None where it cannot be read from here, or is not
        there (any more)."""
        if self._memory.runs(host) is not True:
            return None
        where = host, place
        opened = self._open.get(where)
        if opened is None:
            mapped = self._memory.map(host, place)
            if mapped is None:
                return None
            opened = self._open[where] = _Open(mapped)
        if opened.readers == 0 and not opened.mapped.lock():
            self._rest(where, opened)
            return None
        found = read_image(opened.mapped.view, epoch, id_)
        if found is not None:
            opened.readers += 1
            self._wake(where, opened)
        elif opened.readers == 0:
            opened.mapped.unlock()
            self._rest(where, opened)
        return found

    def done(self, host: Host, place: Place) -> None:
        """One reader less."""
        where = host, place
        opened = self._open.get(where)
        if opened is None:
            return
        opened.readers -= 1
        if opened.readers == 0:
            opened.mapped.unlock()
            self._rest(where, opened)

    def _rest(self, where: _Where, opened: _Open) -> None:
        """Nobody reads it."""
        self._wake(where, opened)
        opened.idle = asyncio.get_running_loop().call_later(IDLE_S, self._forget, where)
        self._idle[where] = None
        if len(self._idle) > (0 if self._closed else IDLE_AT_MOST):
            self._forget(next(iter(self._idle)))

    def _wake(self, where: _Where, opened: _Open) -> None:
        if opened.idle is not None:
            opened.idle.cancel()
            opened.idle = None
            del self._idle[where]

    def _forget(self, where: _Where) -> None:
        opened = self._open.pop(where)
        self._wake(where, opened)
        opened.mapped.close()

    def close(self) -> None:
        """Nothing stays mapped but what is being read; that stays locked until its last view is gone."""
        self._closed = True
        for where in list(self._idle):
            self._forget(where)
