"""What a GPU says of itself at a moment beyond how busy it is: memory traffic, power, temperature, PCIe and NVLink.

Invariant: None is "the device or its driver does not say", never 0; a figure over several GPUs is of those that say.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class GpuVitals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rates are bytes a second, as the GPU sees them: sent is what leaves it."""

    memory_busy: float | None = None  # share of the driver's last sample in which device memory was read or written
    power_w: float | None = None
    temperature_c: float | None = None
    pcie_sent: float | None = None
    pcie_received: float | None = None
    nvlink_sent: float | None = None  # over all links
    nvlink_received: float | None = None


SUMMED = ("power_w", "pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received")
LARGEST = ("memory_busy", "temperature_c")


def merged(samples: Iterable[Iterable[tuple[int, GpuVitals]]]) -> GpuVitals:
    """Over time and devices: each GPU's mean, then the sum of them, or the largest. ``samples``: (GPU, its vitals)."""
    readings: dict[str, dict[int, list[float]]] = {}
    for gpu, vitals in (one for sample in samples for one in sample):
        for name in (*SUMMED, *LARGEST):
            value = getattr(vitals, name)
            if value is not None:
                readings.setdefault(name, {}).setdefault(gpu, []).append(value)
    means = {name: [sum(values) / len(values) for values in of.values()] for name, of in readings.items()}
    return GpuVitals(**{name: (sum(of) if name in SUMMED else max(of)) for name, of in means.items()})
