"""The GPUs of the engines as text for people.

Invariant: "-" is a figure that the GPU or its driver does not tell, never a 0; an engine that has said nothing of its
GPUs for a while has no row of old figures, and what cannot be known is said with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.proxy.engines.load import EngineLoad
from actors.proxy.messages import EngineState
from coordinator.shell.tables import size, table

STALE_S = 10.0
"""What an engine said of its load longer ago is not shown as if it were so now."""

HEAD = (
    "engine",
    "GPUs",
    "busy",
    "memory",
    "memory busy",
    "power",
    "temperature",
    "PCIe out",
    "PCIe in",
    "NVLink out",
    "NVLink in",
    "failed queries",
)


def gpu_lines(engines: Sequence[EngineState]) -> list[str]:
    """Nothing where no engine is on a GPU."""
    told = [
        (engine.name, engine.load)
        for engine in engines
        if engine.load is not None and engine.load.devices and engine.load_age_s <= STALE_S
    ]
    if not told:
        return []
    rows = [_row(name, load) for name, load in told]
    return ["", table(HEAD, rows, nothing=""), *(f"{name}: {load.missing}" for name, load in told if load.missing)]


def _row(name: str, load: EngineLoad) -> tuple[object, ...]:
    vitals = load.vitals
    return (
        name,
        len(load.devices),
        _share(load.load if load.figure == "gpu_utilisation" else None),
        f"{size(load.memory_used)} of {size(load.memory_total)}",
        _share(vitals.memory_busy),
        "-" if vitals.power_w is None else f"{vitals.power_w:.0f} W",
        "-" if vitals.temperature_c is None else f"{vitals.temperature_c:.0f} C",
        *map(_rate, (vitals.pcie_sent, vitals.pcie_received, vitals.nvlink_sent, vitals.nvlink_received)),
        load.errors,
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{size(value)}/s"
