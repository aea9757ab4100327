"""Network interfaces: name, state, speed, MTU, NUMA node, driver, queues, and devices for RDMA.

Invariant: loopback is never reported; a speed that the kernel does not know is ``None``, not 0 or -1. At most
``MAX_NICS`` are kept, those with a device first: a Kubernetes host has hundreds of virtual ones.
"""

from __future__ import annotations

import re
from pathlib import Path

from hwprobe.hardware import Finding, Nic
from hwprobe.host import read_host_nics
from hwprobe.sysfs import entries, read_int, read_numa_node, read_text

MAX_NICS = 64
ARPHRD_LOOPBACK = 772  # linux/if_arp.h
PCI_FUNCTION = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def read_nics(sysfs: Path, findings: list[Finding]) -> tuple[Nic, ...]:
    """Interfaces with a device behind them, and virtual ones that are up."""
    directory = sysfs / "class" / "net"
    if not directory.is_dir():
        nics = [
            Nic(name=nic.name, up=nic.up, virtual=False, mtu=nic.mtu, speed_mbps=nic.speed_mbps)
            for nic in read_host_nics()
            if not nic.name.startswith("lo")
        ]
    else:
        nics = [_read_nic(path) for path in entries(directory) if _is_interface(path)]
    kept = sorted((nic for nic in nics if nic.up or not nic.virtual), key=lambda nic: (nic.virtual, nic.name))
    if len(kept) > MAX_NICS:
        findings.append(
            Finding("nics_omitted", "info", ("network",), f"{len(kept)} interfaces, the first {MAX_NICS} are reported")
        )
    return tuple(kept[:MAX_NICS])


def _is_interface(path: Path) -> bool:
    return path.is_dir() and read_int(path / "type") != ARPHRD_LOOPBACK and path.name != "lo"


def _read_nic(path: Path) -> Nic:
    device = path / "device"
    speed = read_int(path / "speed")
    numa_node, bus_id = None, None
    if device.exists():
        real = device.resolve()  # a virtio interface has no node of its own; the PCI function above it has
        numa_node = next((node for place in (real, real.parent) if (node := read_numa_node(place)) is not None), None)
        bus_id = next((place.name for place in (real, real.parent) if PCI_FUNCTION.fullmatch(place.name)), None)
    queues = [queue.name.partition("-")[0] for queue in entries(path / "queues")]
    return Nic(
        name=path.name,
        up=read_text(path / "operstate") in ("up", "unknown"),  # drivers without carrier detection say "unknown"
        virtual=not device.exists(),
        mtu=read_int(path / "mtu"),
        speed_mbps=speed if speed is not None and speed > 0 else None,
        numa_node=numa_node,
        driver=(device / "driver").resolve().name if (device / "driver").exists() else None,
        pci_bus_id=bus_id,
        rdma=tuple(one.name for one in entries(device / "infiniband")),
        rx_queues=queues.count("rx"),
        tx_queues=queues.count("tx"),
    )
