"""How busy the GPUs are at this moment, by NVML: one session with the driver, for one thread.

Invariant: ``read`` never raises for what driver or device do: a GPU without an answer is left out of what is returned,
and why is counted by query and error.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from hwprobe.nvml_vitals import NvmlVitals
from hwprobe.visible import visible
from hwprobe.vitals import GpuVitals


class GpuUsage(msgspec.Struct, frozen=True):
    """One GPU at one moment."""

    index: int
    uuid: str
    utilisation: float | None  # share of the driver's last sample (up to 1 s) in which a kernel ran; None: unsupported
    memory_used: int  # bytes
    memory_total: int
    vitals: GpuVitals = GpuVitals()


class NoGpus(RuntimeError):
    """There is nothing to measure; the message says why."""


class NvmlUsage:
    """See the module docstring."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Of the GPUs that CUDA_VISIBLE_DEVICES names, if it is there. Raises ``NoGpus``."""
        try:
            import pynvml  # noqa: PLC0415
        except ImportError:
            raise NoGpus("the Python bindings of NVML are not installed") from None
        self._nvml: Any = pynvml
        self.errors: Counter[str] = Counter()
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoGpus(f"NVML does not start: {error}") from None
        self._handles = self._find(environ.get("CUDA_VISIBLE_DEVICES"))
        self._vitals = {index: NvmlVitals(pynvml, handle, self.errors) for index, (_, handle) in self._handles.items()}
        if not self._handles:
            self.close()
            raise NoGpus("no GPU answers, or none is visible to this process")

    def _find(self, wanted: str | None) -> dict[int, tuple[str, Any]]:
        """Index -> UUID (or a name that is as good) and handle."""
        nvml = self._nvml
        handles: dict[int, Any] = {}
        uuids: dict[int, str | None] = {}
        for index in range(self._ask("nvmlDeviceGetCount", nvml.nvmlDeviceGetCount) or 0):
            handle = self._ask("nvmlDeviceGetHandleByIndex", partial(nvml.nvmlDeviceGetHandleByIndex, index))
            if handle is not None:
                handles[index] = handle
                uuids[index] = self._ask("nvmlDeviceGetUUID", partial(nvml.nvmlDeviceGetUUID, handle))
        return {index: (uuids[index] or f"gpu{index}", handles[index]) for index in visible(wanted, uuids)}

    def _ask(self, query: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._nvml.NVMLError as error:
            self.errors[f"{query}: {error}"] += 1
        except ValueError as error:  # text that is not UTF-8
            self.errors[f"{query}: bad answer: {error}"] += 1
        return None

    def read(self) -> list[GpuUsage]:
        """The GPUs that answer now."""
        nvml = self._nvml
        found = []
        for index, (uuid, handle) in self._handles.items():
            memory = self._ask("nvmlDeviceGetMemoryInfo", partial(nvml.nvmlDeviceGetMemoryInfo, handle))
            try:
                rates = nvml.nvmlDeviceGetUtilizationRates(handle)
                busy, memory_busy = rates.gpu / 100, rates.memory / 100
            except nvml.NVMLError as error:
                self.errors[f"nvmlDeviceGetUtilizationRates: {error}"] += 1
                if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                    continue
                busy = memory_busy = None
            used, total = (0, 0) if memory is None else (int(memory.used), int(memory.total))
            found.append(GpuUsage(index, uuid, busy, used, total, self._vitals[index].read(memory_busy)))
        return found

    def close(self) -> None:
        """Idempotent in effect: the driver counts sessions, and a failure here harms nobody."""
        self._ask("nvmlShutdown", self._nvml.nvmlShutdown)
