"""How busy this process's GPUs are, sampled beside its work.

    starting --(the driver answers)--> measuring        --(no driver, no GPU)--> absent: the thread has ended

Invariants:

- whoever asks never waits for the driver: its calls, which nobody can interrupt, are made by one daemon thread; a call
  that hangs shows as samples that do not come;
- where there is no GPU, nothing runs but the attempt to find one;
- at most ``KEPT`` samples are kept; every query that failed is counted under its name and error.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import msgspec

from hwprobe.nvml_usage import GpuUsage, NoGpus, NvmlUsage
from hwprobe.vitals import GpuVitals, merged

log = logging.getLogger(__name__)

PERIOD_S = 1.0
KEPT = 64
"""Samples of all GPUs between two questions; older ones go first."""

STOP_TIMEOUT_S = 1.0

State = Literal["starting", "measuring", "absent"]


class Source(Protocol):
    """Where samples come from: NVML."""

    errors: Counter[str]

    def read(self) -> list[GpuUsage]: ...

    def close(self) -> None: ...


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled since the last question, over all GPUs of this process."""

    state: State
    samples: int  # 0: the driver has not answered since
    utilisation: float | None  # of the busiest GPU, mean of its samples; None without samples, or unsupported
    memory_used: int  # bytes, of all GPUs, in the last sample
    memory_total: int
    devices: tuple[str, ...]  # UUIDs
    errors: Mapping[str, int]  # queries that failed, ever
    missing: str = ""  # what cannot be known of these GPUs, and why
    vitals: GpuVitals = GpuVitals()  # means over the samples; over GPUs the sum, or the largest (``hwprobe.vitals``)


class GpuTelemetry:
    """See the module docstring."""

    def __init__(self, period_s: float = PERIOD_S, source: Callable[[], Source] = NvmlUsage) -> None:
        """``source`` is called in the thread. It raises ``NoGpus`` where there is nothing to measure."""
        self._period_s = period_s
        self._make = source
        self._lock = threading.Lock()
        self._samples: deque[list[GpuUsage]] = deque(maxlen=KEPT)
        self._errors: dict[str, int] = {}
        self._last: list[GpuUsage] = []
        self._state: State = "starting"
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-telemetry", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            source = self._make()
        except NoGpus as reason:
            log.info("GPUs are not measured: %s", reason)
            self._state = "absent"
            return
        self._state = "measuring"
        while not self._ending.is_set():
            sample = source.read()
            with self._lock:
                self._errors = dict(source.errors)
                if sample:
                    self._samples.append(sample)
            self._ending.wait(self._period_s)
        source.close()

    def take(self) -> GpuFigures:
        """What was sampled since the last call."""
        with self._lock:
            samples = list(self._samples)
            self._samples.clear()
            errors = dict(self._errors)
        if samples:
            self._last = samples[-1]
        return GpuFigures(
            state=self._state,
            samples=len(samples),
            utilisation=_busiest(samples),
            memory_used=sum(gpu.memory_used for gpu in self._last),
            memory_total=sum(gpu.memory_total for gpu in self._last),
            devices=tuple(gpu.uuid for gpu in self._last),
            errors=errors,
            missing="; ".join(sorted({gpu.missing for gpu in self._last if gpu.missing})),
            vitals=merged([(gpu.index, gpu.vitals) for gpu in sample] for sample in samples),
        )

    def stop(self) -> None:
        """End the thread; a call that hangs is left to end with the process. Idempotent."""
        self._ending.set()
        self._thread.join(STOP_TIMEOUT_S)


def _busiest(samples: list[list[GpuUsage]]) -> float | None:
    readings: dict[int, list[float]] = {}
    for gpu in (gpu for sample in samples for gpu in sample):
        if gpu.utilisation is not None:
            readings.setdefault(gpu.index, []).append(gpu.utilisation)
    return max((sum(values) / len(values) for values in readings.values()), default=None)
