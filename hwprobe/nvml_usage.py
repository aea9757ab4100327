"""How busy the GPUs are at this moment, by NVML: one session with the driver, for one thread.

Invariant: ``read`` never raises for what driver or device do: a GPU without an answer is left out of what is returned,
and why is counted by query and error.

Of a MIG slice NVML tells the memory and nothing else here: nvml.h has no utilisation rates for a GPU in MIG mode, and
power, temperature and traffic are those of the whole board, which slices of others share. A GPU that is split but seen
as a whole has the memory of the slices that can be seen: their sum may be asked for without the rights that the GPU's
own figure needs.
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
    """One GPU, or one slice of it, at one moment."""

    index: int  # the GPU's; slices of one GPU have the same
    uuid: str
    utilisation: float | None  # share of the driver's last sample (up to 1 s) in which a kernel ran; None: unsupported
    memory_used: int  # bytes
    memory_total: int
    vitals: GpuVitals = GpuVitals()
    missing: str = ""  # what cannot be known of it, and why


class _Device:
    """What is sampled."""

    def __init__(self, index: int, uuid: str, handle: Any, slices: list[Any], vitals: NvmlVitals | None) -> None:
        """``slices``: handles of those whose memory it has; ``vitals`` is None for a slice."""
        self.index = index
        self.uuid = uuid
        self.handle = handle
        self.slices = slices
        self.vitals = vitals

    @property
    def missing(self) -> str:
        return OF_A_SLICE if self.vitals is None else OF_A_SPLIT_GPU if self.slices else ""


OF_A_SLICE = "of a MIG slice NVML tells the memory, but no utilisation, power, temperature and traffic"
OF_A_SPLIT_GPU = "of a GPU that is split into MIG slices NVML tells no utilisation"


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
        self._devices = self._find(environ.get("CUDA_VISIBLE_DEVICES"))
        if not self._devices:
            self.close()
            raise NoGpus("no GPU answers, or none is visible to this process")

    def _find(self, wanted: str | None) -> list[_Device]:
        """As CUDA programs see them: a GPU that is split as a whole, or by those of its slices that are named."""
        nvml = self._nvml
        devices: dict[int | str, _Device] = {}
        for index in range(self._ask("nvmlDeviceGetCount", nvml.nvmlDeviceGetCount) or 0):
            handle = self._ask("nvmlDeviceGetHandleByIndex", partial(nvml.nvmlDeviceGetHandleByIndex, index))
            if handle is None:
                continue
            slices = self._slices(handle)
            vitals = NvmlVitals(nvml, handle, self.errors)
            devices[index] = _Device(index, self._uuid(handle, f"gpu{index}"), handle, slices, vitals)
            for place, one in enumerate(slices):
                name = f"gpu{index}.{place}"
                devices[name] = _Device(index, self._uuid(one, name), one, [one], None)
        if wanted is None:
            return [device for device in devices.values() if device.vitals is not None]
        return [devices[key] for key in visible(wanted, {key: device.uuid for key, device in devices.items()})]

    def _slices(self, handle: Any) -> list[Any]:
        """Handles of a GPU's MIG slices: of those that this process may see."""
        nvml, found = self._nvml, []
        try:
            places = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if nvml.nvmlDeviceGetMigMode(handle)[0] else 0
        except nvml.NVMLError:  # it cannot be split, or the driver is older than that
            return []
        for place in range(places):
            try:
                found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
            except nvml.NVMLError as error:
                if error.value not in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT):  # an empty place
                    self.errors[f"nvmlDeviceGetMigDeviceHandleByIndex: {error}"] += 1
        return found

    def _uuid(self, handle: Any, otherwise: str) -> str:
        return self._ask("nvmlDeviceGetUUID", partial(self._nvml.nvmlDeviceGetUUID, handle)) or otherwise

    def _ask(self, query: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._nvml.NVMLError as error:
            self.errors[f"{query}: {error}"] += 1
        except ValueError as error:  # text that is not UTF-8
            self.errors[f"{query}: bad answer: {error}"] += 1
        return None

    def read(self) -> list[GpuUsage]:
        """The GPUs, or slices, that answer now."""
        return [usage for device in self._devices if (usage := self._read(device)) is not None]

    def _read(self, device: _Device) -> GpuUsage | None:
        memory = self._memory(device.slices or [device.handle])
        busy = memory_busy = None
        if not device.slices:
            nvml = self._nvml
            try:
                rates = nvml.nvmlDeviceGetUtilizationRates(device.handle)
                busy, memory_busy = rates.gpu / 100, rates.memory / 100
            except nvml.NVMLError as error:
                self.errors[f"nvmlDeviceGetUtilizationRates: {error}"] += 1
                if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                    return None
        elif memory is None:
            return None
        used, total = memory or (0, 0)
        vitals = GpuVitals() if device.vitals is None else device.vitals.read(memory_busy)
        return GpuUsage(device.index, device.uuid, busy, used, total, vitals, device.missing)

    def _memory(self, handles: list[Any]) -> tuple[int, int] | None:
        """Used and whole, of those that say so together."""
        query = "nvmlDeviceGetMemoryInfo"
        asked = [self._ask(query, partial(self._nvml.nvmlDeviceGetMemoryInfo, handle)) for handle in handles]
        told = [memory for memory in asked if memory is not None]
        return (sum(int(one.used) for one in told), sum(int(one.total) for one in told)) if told else None

    def close(self) -> None:
        """Idempotent in effect: the driver counts sessions, and a failure here harms nobody."""
        self._ask("nvmlShutdown", self._nvml.nvmlShutdown)
