"""Which chain of messages this code runs for: a number that every message carries on to those it causes.

Invariant: what a handler sends has the trace of what it handles; a message that nothing caused begins a trace, with a
number that depends on its node and on how many that node has begun, on nothing random.
"""

from __future__ import annotations

import itertools
import zlib
from contextvars import ContextVar

trace: ContextVar[int] = ContextVar("trace", default=0)
"""0 is none. Set by whoever runs a handler; tasks inherit it."""


class Traces:
    """Numbers the traces that one incarnation of a node begins: 32 bits of its name and epoch, 32 bits of a count."""

    def __init__(self, name: str, epoch: int) -> None:
        self._count = itertools.count(zlib.crc32(f"{name}/{epoch}".encode()) << 32 | 1)

    def current(self) -> int:
        """The trace that this code runs for, or a new one."""
        return trace.get() or next(self._count)


def spelled(number: int) -> str:
    """As it stands in logs."""
    return f"{number:016x}"
