"""What psutil says about the host: the base on every platform, refined by sysfs where there is one.

Invariant: the only module that imports psutil; a reading of the whole host, not of this process's share, except for
``affinity``.
"""

from __future__ import annotations

import os

import msgspec
import psutil


class NicFacts(msgspec.Struct, frozen=True):
    name: str
    up: bool
    mtu: int
    speed_mbps: int | None


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    logical_cpus: int
    physical_cores: int | None = None
    memory_total: int
    memory_available: int
    affinity: tuple[int, ...] | None = None  # CPUs in this process's mask; None where the platform has none


def read_host() -> HostFacts:
    """Read the machine that this process runs on."""
    memory = psutil.virtual_memory()
    return HostFacts(
        logical_cpus=psutil.cpu_count(logical=True) or 1,
        physical_cores=psutil.cpu_count(logical=False),
        memory_total=memory.total,
        memory_available=memory.available,
        affinity=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None,
    )


def read_host_nics() -> list[NicFacts]:
    """Interfaces as the platform reports them, for where sysfs is absent."""
    return [
        NicFacts(name, stats.isup, stats.mtu, stats.speed or None)
        for name, stats in sorted(psutil.net_if_stats().items())
    ]
