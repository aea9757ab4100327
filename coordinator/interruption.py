"""Ctrl-C and SIGTERM: the first one asks for an orderly end, the second one insists.

Invariant: from ``listen`` on no signal is lost and none raises anywhere, also between two sittings of a run and while
the process winds up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from types import FrameType

from coordinator.observe.progress import INTERRUPTED, Progress


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


class Interruption:
    """Create inside a running event loop."""

    def __init__(self, progress: Progress, says: str = INTERRUPTED) -> None:
        """``says``: what people are told, of Ctrl-C."""
        self.asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._progress = progress
        self._says = says
        self._signalled = False

    def listen(self) -> None:
        """For good: also while this process winds up, when the event loop is closed already."""
        loop = asyncio.get_running_loop()

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._signalled:  # the second one insists
                self._progress.close()
                os._exit(130)
            self._signalled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
                loop.call_soon_threadsafe(self._interrupt, signal.Signals(number))

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)

    def _interrupt(self, number: signal.Signals) -> None:
        who = "Ctrl-C" if number == signal.SIGINT else number.name
        self._progress.interrupted(self._says.replace("Ctrl-C:", f"{who}:"))
        if not self.asked.done():
            self.asked.set_result(None)
