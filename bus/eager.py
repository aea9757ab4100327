"""Looking for an answer a moment longer before the process goes to sleep: to be woken up costs more than most answers.

Invariants:

- it lasts ``EAGER_S`` at most after an ask was sent, gives way to every other callback and every thread that wants to
  run, and ends with whatever comes first;
- where answers take longer it is given up: then only one ask in ``SKIPPED`` is looked for, to find out whether that has
  changed.

Why: a message that finds its receiver asleep passes two threads that have to be woken up, on processors that may have
to be, which takes several times as long as handling it. Hypervisors halt their guests' processors by the same rule.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

EAGER_S = 0.0005
"""The longest look; about what two wake-ups cost at the worst."""

TURN_S = 50e-6
"""After so long the event loop gets its turn."""

SKIPPED = 64
"""Asks that are not looked for once looking was in vain too often."""

_CREDIT = 8
_IN_VAIN = 4


class Eager:
    """Looks on an event loop; see the module docstring."""

    def __init__(self, loop: asyncio.AbstractEventLoop, look: Callable[[], bool]) -> None:
        """``look``: take in what has come; whether anything had."""
        self._loop = loop
        self._look = look
        self._credit = _CREDIT
        self._skip = 0
        self._until = 0.0
        self._due: asyncio.Handle | None = None
        self._closed = len(os.sched_getaffinity(0)) < 2 if hasattr(os, "sched_getaffinity") else False

    @property
    def looking(self) -> bool:
        """Whether it will look again."""
        return self._due is not None

    def expect(self) -> None:
        """An answer will come, perhaps soon."""
        if self._skip:
            self._skip -= 1
            return
        self._until = time.perf_counter() + EAGER_S
        if self._due is None and not self._closed:
            self._due = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._due = None
        end = min(time.perf_counter() + TURN_S, self._until)
        while not self._look():
            os.sched_yield()
            now = time.perf_counter()
            if now < end:
                continue
            if now < self._until:
                self._due = self._loop.call_soon(self._turn)
            else:
                self._in_vain()
            return
        self._credit = min(self._credit + 1, _CREDIT)

    def _in_vain(self) -> None:
        self._credit -= _IN_VAIN
        if self._credit <= 0:
            self._credit, self._skip = 1, SKIPPED

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._closed = True
        if self._due is not None:
            self._due.cancel()
            self._due = None
