"""Deadlines of which hardly any is ever reached: one timer for all of them.

Invariant: what is not over by its time is called then, once; what is over is not, and takes no memory for longer than
twice as many as it take place. A timer of its own for each, set and cancelled, costs an ask more than its encoding.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush

SPARE = 100
"""So many that are over may be kept, however few there are."""


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
        due = []
        while self._times and (self._times[0][0] <= now or self._times[0][1] not in self._late):
            due.append(heappop(self._times)[1])
        if self._times:
            self._set(self._times[0][0])
        for number in due:
            late = self._late.pop(number, None)
            if late is not None:
                late()

    def close(self) -> None:
        """Forget all of them."""
        self._late.clear()
        self._times.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
