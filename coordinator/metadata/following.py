"""A watch over a server whose own watches fire once: whatever is in doubt is read again, with a new watch, and what
differs from the last look is reported. So nothing is missed for good, whatever was lost between (an event, a
connection), and each report says that the entry really is different now.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

from coordinator.metadata import checks
from coordinator.metadata.protocol import Change
from coordinator.metadata.watching import ChangeQueue


class Mark(NamedTuple):
    """Transaction ids of an entry's creation and of its last write: both are unique and rise with time."""

    created: int
    written: int


class ReadAgain(Exception):
    """The connection was lost while reading; what was read and which watches are set is unknown."""


class Reader(Protocol):
    """Reads that leave a watch behind, which reports to ``Follower.doubt``."""

    async def names(self, prefix: str) -> list[str]:
        """Of the entries directly below; empty (and watched) where there is no such prefix. Raises ``ReadAgain``."""

    async def mark(self, path: str) -> Mark | None:
        """None (and watched) where there is nothing. Raises ``ReadAgain``."""


class Follower:
    """Looks until cancelled. ``armed`` is set once the first look is complete: that one is the state "now"."""

    def __init__(self, prefix: str, watch: ChangeQueue) -> None:
        self.prefix = prefix
        self.watch = watch
        self.armed = asyncio.Event()
        self._known: dict[str, Mark] = {}
        self._doubted: set[str] = set()  # paths of children
        self._doubts_all = True
        self._wake = asyncio.Event()

    def doubt(self, path: str | None) -> None:
        """Something happened at ``path`` (None: anything may have happened). On the event loop."""
        if path is None:
            self._doubts_all = True
        else:
            self._doubted.add(path)
        self._wake.set()

    async def run(self, reader: Reader) -> None:
        while True:
            self._wake.clear()
            doubted, self._doubted = self._doubted, set()
            doubts_all, self._doubts_all = self._doubts_all, False
            try:
                await self._look(reader, None if doubts_all else doubted)
            except ReadAgain:  # the next read waits in the client until a connection is there
                self._doubts_all = True
                continue
            self.armed.set()
            await self._wake.wait()

    async def _look(self, reader: Reader, doubted: set[str] | None) -> None:
        present = [checks.child_of(self.prefix, name) for name in await reader.names(self.prefix)]
        to_read = [path for path in present if doubted is None or path in doubted or path not in self._known]
        marks = await asyncio.gather(*(reader.mark(path) for path in to_read))
        now = {path: mark for path in present if (mark := self._known.get(path)) is not None}
        for path, mark in zip(to_read, marks, strict=True):
            if mark is None:
                now.pop(path, None)
            else:
                now[path] = mark
        known, self._known = self._known, now
        if self.armed.is_set():
            self._report(known, now)

    def _report(self, known: dict[str, Mark], now: dict[str, Mark]) -> None:
        gone = [path for path, mark in known.items() if path not in now or now[path].created != mark.created]
        for path in sorted(gone):
            self.watch.put(Change("deleted", path))
        news = [
            (mark.written if path in known and known[path].created == mark.created else mark.created, path)
            for path, mark in now.items()
            if known.get(path) != mark
        ]
        for when, path in sorted(news):  # in the order in which they happened
            self.watch.put(Change("created" if when == now[path].created else "written", path))
