"""How far two PCI functions are from each other, by where sysfs puts them.

Invariant: read from the directory tree alone, in the words of ``nvidia-smi topo -m``. ``/sys/bus/pci/devices/ID`` leads
to ``/sys/devices/pci0000:15/0000:15:01.0/.../ID``: the host bridge, then every bridge on the way.

    one switch is an upstream bridge with a downstream bridge a device: two functions with at most one bridge each below
    the last that they share are on one switch (PIX), with more they are behind several (PXB)
"""

from __future__ import annotations

from pathlib import Path

from hwprobe.gpu import PathLevel
from hwprobe.sysfs import read_numa_node

ORDER: tuple[PathLevel, ...] = ("INT", "PIX", "PXB", "PHB", "NODE", "SYS")


def distance(sysfs: Path, one: str, other: str) -> PathLevel | None:
    """Between two bus ids; None where the kernel does not show the way of one of them."""
    first, second = _way(sysfs, one), _way(sysfs, other)
    if first is None or second is None:
        return None
    shared = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        shared += 1
    if shared == 0:
        nodes = [read_numa_node(sysfs / "bus" / "pci" / "devices" / bus_id) for bus_id in (one, other)]
        return "NODE" if nodes[0] is not None and nodes[0] == nodes[1] else "SYS"
    if shared == 1:
        return "PHB"
    below = max(len(first), len(second)) - shared - 1  # without the functions themselves
    return "PIX" if below <= 1 else "PXB"


def _way(sysfs: Path, bus_id: str) -> tuple[str, ...] | None:
    """Host bridge, bridges, function."""
    link = sysfs / "bus" / "pci" / "devices" / bus_id
    parts = link.resolve().parts if link.exists() else ()
    host = next((place for place, part in enumerate(parts) if part.startswith("pci")), None)
    return parts[host:] if host is not None and parts[-1] == bus_id and host < len(parts) - 1 else None
