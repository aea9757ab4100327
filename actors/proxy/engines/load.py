"""How loaded one engine is: its GPU's utilisation where there is a GPU, else the share of its places that are taken.

Invariant: a figure is named as what it is. What could not be measured is None and never replaced by another figure: an
engine on a GPU whose driver has fallen silent has no load, for whoever decides by it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from hwprobe.vitals import GpuVitals

if TYPE_CHECKING:
    from hwprobe.telemetry import GpuFigures

Figure = Literal["gpu_utilisation", "occupancy"]


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One engine over the time since its last report."""

    figure: Figure  # what ``load`` is
    load: float | None  # 0 to 1; None: it could not be measured
    occupancy: float  # share of the running batch's places that were taken, 0 to 1, mean over time
    busy: float  # share of the time in which a step ran
    devices: tuple[str, ...] = ()  # UUIDs of its GPUs; other engines may be on the same one
    memory_used: int = 0  # bytes, of these GPUs
    memory_total: int = 0
    errors: int = 0  # queries to the GPUs' driver that failed, in this engine's life
    vitals: GpuVitals = GpuVitals()  # of its GPUs together
    missing: str = ""  # what cannot be known of its GPUs, and why


class LoadMeter:
    """Adds up what the engine's thread is at; asked from the loop."""

    def __init__(self, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._clock = clock
        self._lock = threading.Lock()
        self._since = self._at = clock()
        self._occupancy = 0.0
        self._busy = 0.0
        self._unfinished = 0
        self._stepping = False

    def note(self, unfinished: int, *, stepping: bool = False) -> None:
        """From now on so many requests are unfinished, and a step runs or does not."""
        with self._lock:
            self._add(self._clock())
            self._unfinished, self._stepping = unfinished, stepping

    def _add(self, now: float) -> None:
        passed_s, self._at = now - self._at, now
        self._occupancy += passed_s * min(1.0, self._unfinished / self._places)
        self._busy += passed_s * self._stepping

    def take(self) -> tuple[float, float]:
        """Occupancy and busy share since the last call."""
        with self._lock:
            now = self._clock()
            self._add(now)
            seconds, self._since = now - self._since, now
            occupancy, self._occupancy = self._occupancy, 0.0
            busy, self._busy = self._busy, 0.0
        if seconds <= 0:
            return min(1.0, self._unfinished / self._places), float(self._stepping)
        return min(1.0, occupancy / seconds), min(1.0, busy / seconds)


def engine_load(occupancy: float, busy: float, gpus: GpuFigures | None) -> EngineLoad:
    """``gpus``: of the engine's process; None where nobody looks for any."""
    if gpus is None or gpus.state == "absent":
        return EngineLoad(figure="occupancy", load=occupancy, occupancy=occupancy, busy=busy)
    by_places = gpus.samples > 0 and gpus.utilisation is None  # the driver answers, but has no such figure (MIG)
    return EngineLoad(
        figure="occupancy" if by_places else "gpu_utilisation",
        load=occupancy if by_places else gpus.utilisation,
        occupancy=occupancy,
        busy=busy,
        devices=gpus.devices,
        memory_used=gpus.memory_used,
        memory_total=gpus.memory_total,
        errors=sum(gpus.errors.values()),
        vitals=gpus.vitals,
        missing=gpus.missing,
    )
