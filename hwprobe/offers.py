"""What can be enforced on this host, one line each: by the kernel, by a library, or by nobody.

Invariant: a limit is called enforced only where something other than good will enforces it, and ``how`` names it; a
limit that nobody enforces says so with the reason, and what is known instead (a PCIe budget is a figure).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from hwprobe.cost import RESERVE
from hwprobe.delegation import standing
from hwprobe.sysfs import read_text

LimitName = Literal["cpu", "memory", "pids", "io", "pinning", "numa_memory", "gpu_memory", "pcie"]

CROSS_NUMA = 0.5
"""Share of a PCIe link that is budgeted for traffic from another NUMA node: it also crosses the link between the
sockets, which the host's other devices use."""

_GROUPS: tuple[tuple[LimitName, str], ...] = (
    ("cpu", "CPU time per time"),
    ("memory", "main memory"),
    ("pids", "processes and threads"),
    ("io", "bytes a second to and from a disk"),
)


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One limit."""

    limit: LimitName
    what: str
    enforced: bool
    how: str  # by what, or why not

    def line(self) -> str:
        return f"{self.limit} ({self.what}): {'enforced by' if self.enforced else 'not enforced:'} {self.how}"


def offers(
    *,
    cpus: str,
    numa_nodes: int,
    gpus: Sequence[str | None] = (),
    cgroup: Path = Path("/sys/fs/cgroup"),
    proc: Path = Path("/proc"),
    sysfs: Path = Path("/sys"),
) -> tuple[Offer, ...]:
    """Every limit that a job may ask for. ``cpus``: that this process may use; ``gpus``: their PCI bus ids, as far as
    they are known."""
    found = standing(cgroup, proc)
    groups = [
        Offer(
            limit=name,
            what=what,
            enforced=name not in found.missing,
            how=found.missing.get(name, f"cgroup v2, {found.group}/*/{name}.max"),
        )
        for name, what in _GROUPS
    ]
    return (*groups, _pinning(cpus), _numa_memory(numa_nodes), _gpu_memory(len(gpus)), _pcie(gpus, sysfs))


def _pinning(cpus: str) -> Offer:
    there = hasattr(os, "sched_setaffinity")
    how = f"sched_setaffinity, on CPUs {cpus}" if there else "this platform has no sched_setaffinity"
    return Offer(limit="pinning", what="CPUs that a process runs on", enforced=there, how=how)


def _numa_memory(nodes: int) -> Offer:
    how = "there is one node"
    if nodes > 1:
        how = (
            "memory comes from where the pinned CPUs are by first touch, which the kernel prefers and does not promise"
        )
    return Offer(limit="numa_memory", what="NUMA node that memory comes from", enforced=False, how=how)


def _gpu_memory(gpus: int) -> Offer:
    how = (
        "torch's allocator (set_per_process_memory_fraction), in each process for itself" if gpus else "there is no GPU"
    )
    what = f"share of a GPU's memory, {100 * RESERVE:.0f}% in reserve"
    return Offer(limit="gpu_memory", what=what, enforced=gpus > 0, how=how)


def _pcie(gpus: Sequence[str | None], sysfs: Path) -> Offer:
    links = {link for bus_id in gpus if (link := pcie_bytes_s(bus_id, sysfs)) is not None}
    known = f"budget {min(links) * CROSS_NUMA / 1e9:.1f} GB/s a GPU, each way" if links else "its links are unknown"
    how = f"the kernel has no such limit; {known}" if gpus else "there is no GPU"
    return Offer(limit="pcie", what="PCIe traffic across NUMA nodes", enforced=False, how=how)


def pcie_bytes_s(bus_id: str | None, sysfs: Path = Path("/sys")) -> float | None:
    """What a device's link carries in one direction, from its generation and width; None where the kernel does not say.
    From 8 GT/s on 130 bits are sent for 128 of data, before that 10 for 8."""
    if bus_id is None:
        return None
    device = sysfs / "bus" / "pci" / "devices" / bus_id
    speed = re.match(r"([\d.]+) GT/s", read_text(device / "max_link_speed") or "")
    width = re.fullmatch(r"\d+", read_text(device / "max_link_width") or "")
    if speed is None or width is None:
        return None
    rate = float(speed[1])
    return rate * 1e9 * int(width[0]) * (128 / 130 if rate >= 8 else 8 / 10) / 8


def gpu_share(engines_on_device: int) -> float:
    """Share of a GPU's memory that each of its engines may take."""
    return (1 - RESERVE) / engines_on_device


def cross_numa_s(size_bytes: float, link_bytes_s: float) -> float:
    """Seconds that a transfer across NUMA nodes takes within the budget."""
    return size_bytes / (link_bytes_s * CROSS_NUMA)
