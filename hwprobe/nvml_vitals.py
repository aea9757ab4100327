"""Power, temperature, PCIe and NVLink traffic of one GPU, by NVML.

Invariant: what the device does not support is asked for once and then never again; what fails otherwise is counted, by
query and error. Traffic is the growth of the driver's counters between two reads, by the driver's own time stamps;
where a PCIe bus has no counters, the driver's measurement over 20 ms stands in for them (it takes that long).

Field numbers and units are nvml.h's: NVLINK_THROUGHPUT_DATA_* count KiB (all links together with scope UINT_MAX),
PCIE_COUNT_*_BYTES count bytes; nvmlDeviceGetPcieThroughput gives KB/s.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from hwprobe.vitals import GpuVitals

ALL_LINKS = 0xFFFFFFFF
UNSIGNED_LONG_LONG = 3  # nvmlValueType_t; narrower counters would wrap within a second


class NvmlVitals:
    """One GPU's, for one thread."""

    def __init__(self, nvml: Any, handle: Any, errors: Counter[str]) -> None:
        self._nvml = nvml
        self._handle = handle
        self._errors = errors
        self._unsupported: set[str] = set()
        # Name -> field, scope, bytes of one unit.
        self._fields: dict[str, tuple[int, int, int]] = {
            "nvlink_sent": (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS, 1024),
            "nvlink_received": (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS, 1024),
            "pcie_sent": (nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0, 1),
            "pcie_received": (nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0, 1),
        }
        self._before: dict[str, tuple[int, float]] = {}  # value, and when

    def read(self, memory_busy: float | None) -> GpuVitals:
        """As they are now; rates are None at the first read."""
        nvml, handle = self._nvml, self._handle
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", partial(nvml.nvmlDeviceGetPowerUsage, handle))
        degrees = self._ask(
            "nvmlDeviceGetTemperature", partial(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        )
        rates = self._rates()
        return GpuVitals(
            memory_busy=memory_busy,
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=None if degrees is None else float(degrees),
            pcie_sent=self._pcie("pcie_sent", rates, nvml.NVML_PCIE_UTIL_TX_BYTES),
            pcie_received=self._pcie("pcie_received", rates, nvml.NVML_PCIE_UTIL_RX_BYTES),
            nvlink_sent=rates.get("nvlink_sent"),
            nvlink_received=rates.get("nvlink_received"),
        )

    def _ask(self, query: str, call: Callable[[], Any]) -> Any:
        if query in self._unsupported:
            return None
        nvml = self._nvml
        try:
            return call()
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self._unsupported.add(query)
            else:
                self._errors[f"{query}: {error}"] += 1
        return None

    def _rates(self) -> dict[str, float]:
        """Of the counters that this device has."""
        if not self._fields:
            return {}
        wanted = [(field, scope) for field, scope, _ in self._fields.values()]
        query = "nvmlDeviceGetFieldValues"
        found = self._ask(query, partial(self._nvml.nvmlDeviceGetFieldValues, self._handle, wanted))
        if found is None:
            if query in self._unsupported:
                self._fields.clear()
            return {}
        rates: dict[str, float] = {}
        for name, value in zip(list(self._fields), found, strict=True):
            self._take(name, value, rates)
        return rates

    def _take(self, name: str, value: Any, rates: dict[str, float]) -> None:
        nvml, unit = self._nvml, self._fields[name][2]
        if value.nvmlReturn != nvml.NVML_SUCCESS or value.valueType != UNSIGNED_LONG_LONG:
            if value.nvmlReturn in (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                del self._fields[name]
            else:
                self._errors[f"nvmlDeviceGetFieldValues, {name}: error {value.nvmlReturn}"] += 1
            return
        count = int(value.value.ullVal)
        at_s = value.timestamp / 1e6 if value.timestamp else time.monotonic()
        before, self._before[name] = self._before.get(name), (count, at_s)
        if before is not None and count >= before[0] and at_s > before[1]:  # a reset begins again
            rates[name] = (count - before[0]) * unit / (at_s - before[1])

    def _pcie(self, name: str, rates: dict[str, float], counter: int) -> float | None:
        if name in self._fields:
            return rates.get(name)
        query = f"nvmlDeviceGetPcieThroughput ({name})"
        kilobytes = self._ask(query, partial(self._nvml.nvmlDeviceGetPcieThroughput, self._handle, counter))
        return None if kilobytes is None else kilobytes * 1000.0
