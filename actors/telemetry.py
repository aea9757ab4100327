"""Spans of work, gathered where it happens and sent to whoever draws the timeline.

Busy work that comes in many tiny pieces (engine steps) is merged into one span as long as the gaps stay small.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque

import msgspec

from actors.core import Node, Ref

MERGE_GAP_S = 0.05
MERGE_LENGTH_S = 1.0
REPORT_EVERY_S = 1.0
KEPT = 10_000
"""Spans kept while nobody takes them; the oldest go first."""


class Span(msgspec.Struct, frozen=True, gc=False):
    """Somebody did something for a while."""

    lane: str  # who: "engine-0", "trainer", "env", "weightsync"
    kind: str  # what: "generate", "train", "publish", "swap", "evaluate", "reset"
    start: float  # seconds since the epoch
    end: float  # >= start
    version: int = -1  # of the weights concerned; -1 is none
    detail: str = ""


class SpansTaken(msgspec.Struct, frozen=True):
    """A batch on its way to the coordinator."""

    spans: list[Span]


class Spans:
    """Collects one lane's spans; thread-safe. ``take`` empties it."""

    def __init__(self, lane: str) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._done: deque[Span] = deque(maxlen=KEPT)
        self._open: dict[str, tuple[float, float]] = {}

    def add(self, kind: str, start: float, end: float, *, version: int = -1, detail: str = "") -> None:
        with self._lock:
            self._done.append(Span(self._lane, kind, start, end, version, detail))

    def busy(self, kind: str, start: float, end: float) -> None:
        """Another piece of continuing work."""
        with self._lock:
            opened = self._open.get(kind)
            if opened is not None and start - opened[1] <= MERGE_GAP_S and end - opened[0] <= MERGE_LENGTH_S:
                self._open[kind] = (opened[0], end)
                return
            if opened is not None:
                self._done.append(Span(self._lane, kind, *opened))
            self._open[kind] = (start, end)

    def take(self) -> list[Span]:
        """Everything so far, open pieces included."""
        with self._lock:
            for kind, (start, end) in self._open.items():
                self._done.append(Span(self._lane, kind, start, end))
            self._open.clear()
            done = list(self._done)
            self._done.clear()
            return done


async def report_spans(node: Node, telemetry: Ref | None, *lanes: Spans) -> None:
    """Send what the lanes gather, once a second, until cancelled."""
    while telemetry is not None:
        await asyncio.sleep(REPORT_EVERY_S)
        spans = [span for lane in lanes for span in lane.take()]
        if spans:
            node.tell(telemetry, SpansTaken(spans))
