"""Segments that are in use, and those that wait to be used again: fresh memory costs ten times the copy into it.

Invariants:

- what is in use and what waits never exceeds the bound together;
- a segment is used again only when nobody can still be reading what it held. One that waits too long for that, or whose
  room is needed, is let go: its readers keep it, unchanged, for as long as they read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bus.objects.memory import SHARED_FROM_BYTES, Memory, Segment

IDLE_S = 10.0
"""After this long without use a segment goes back to the system."""

STEPS = 8
"""Sizes are rounded up to one of so many between a power of two and the next, so that they fit again."""

PAGE_BYTES = 4096


class Pool:
    """See the module docstring."""

    def __init__(self, memory: Memory, bound: int) -> None:
        self.bound = bound
        self.used = 0  # bytes in segments that are in use
        self.idle = 0  # bytes in those that wait
        self._memory = memory
        self._waiting: dict[Segment, asyncio.TimerHandle] = {}  # the one that waits longest is the first

    def take(self, size: int) -> Segment | None:
        """A segment of at least this size; None where there is no room for it. Raises ``OSError`` where the system has
        none."""
        capacity = capacity_for(size)
        segment = self._fitting(capacity)
        if segment is not None:
            self._leave(segment)
        elif self._make_room(capacity):
            segment = self._memory.allocate(capacity)
        else:
            return None
        self.used += segment.capacity
        return segment

    def _fitting(self, capacity: int) -> Segment | None:
        """The smallest one that waits, is not much too large, and is not read any more."""
        most = capacity + capacity // STEPS
        fitting = [segment for segment in self._waiting if capacity <= segment.capacity <= most]
        fitting.sort(key=lambda segment: segment.capacity)
        return next((segment for segment in fitting if segment.unread()), None)

    def _make_room(self, capacity: int) -> bool:
        if self.used + capacity > self.bound:
            return False
        while self.used + self.idle + capacity > self.bound:
            self._let_go(next(iter(self._waiting)))
        return True

    def give(self, segment: Segment) -> None:
        """It holds nothing any more, though some may still be reading what it held."""
        self.used -= segment.capacity
        if not segment.clean or segment.capacity < SHARED_FROM_BYTES:
            segment.release()
            return
        self.idle += segment.capacity
        let_go: Callable[[Segment], None] = self._let_go
        self._waiting[segment] = asyncio.get_running_loop().call_later(IDLE_S, let_go, segment)

    def _leave(self, segment: Segment) -> None:
        self._waiting.pop(segment).cancel()
        self.idle -= segment.capacity

    def _let_go(self, segment: Segment) -> None:
        self._leave(segment)
        segment.release()

    def close(self) -> None:
        """Nothing waits any more."""
        for segment in list(self._waiting):
            self._let_go(segment)


def capacity_for(size: int) -> int:
    """What a segment for an object of this size takes: small ones just that, others whole pages and an eighth more at
    most."""
    if size < SHARED_FROM_BYTES:
        return max(size, 1)
    step = max(PAGE_BYTES, (1 << (size.bit_length() - 1)) // STEPS)
    return -(-size // step) * step
