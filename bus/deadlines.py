"""Deadlines of which hardly any is ever reached: one timer for all of them.

Invariant: what is not over by its time is called then, once, also where one that is called before it raises; what is
over is not called, and no more of it is kept than of what is not, and ``SPARE``. A timer of its own for each, set and
cancelled, costs an ask more than its encoding.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush

SPARE = 100
"""So many that are over may be kept beside those that are not, however few these are."""


class Deadlines:
    """Times are the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._numbers = itertools.count()
        self._late: dict[int, Callable[[], None]] = {}
        self._times: list[tuple[float, int]] = []  # a heap, also of some that are over
        self._timer: asyncio.TimerHandle | None = None
        self._set_for = math.inf

    def add(self, when: float, late: Callable[[], None]) -> int:
        """Call it at that time, unless ``over`` comes first with the number that this returns."""
        number = next(self._numbers)
        self._late[number] = late
        heappush(self._times, (when, number))
        if when < self._set_for:
            self._set(when)
        return number

    def over(self, number: int) -> None:
        """It is no longer waited for; it may have been called."""
        self._late.pop(number, None)
        if len(self._times) > 2 * len(self._late) + SPARE:
            self._times = [entry for entry in self._times if entry[1] in self._late]
            heapify(self._times)

    def _set(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._set_for = when
        self._timer = self._loop.call_at(when, self._due, when)

    def _due(self, when: float) -> None:
        self._timer, self._set_for = None, math.inf
        now = max(self._loop.time(), when)  # a timer may be called a little early
        due: deque[int] = deque()
        while self._times and (self._times[0][0] <= now or self._times[0][1] not in self._late):
            due.append(heappop(self._times)[1])
        try:
            while due:
                late = self._late.pop(due.popleft(), None)
                if late is not None:
                    late()
        finally:  # where one raised, which the event loop reports, the rest come in its next turn
            for number in due:
                heappush(self._times, (now, number))
            if self._times:
                self._set(self._times[0][0])

    def close(self) -> None:
        """Forget all of them."""
        self._late.clear()
        self._times.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
