"""``python -m hwprobe [--json] [--profile FILE]``: what this machine is, and what its devices are good for.

Invariant: exit status 0 whatever the hardware is, 2 for a profile that cannot be used; plain text without colours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hwprobe.affinity import AffinityMap, build_affinity_map
from hwprobe.hardware import Finding, Hardware
from hwprobe.offers import Offer, offers
from hwprobe.probing import probe
from hwprobe.profile import ProfileError, load_profile

GIB = 1 << 30


def main(argv: list[str] | None = None) -> int:
    """Probe, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="probe", description="Show this machine's hardware and what it is good for.")
    parser.add_argument("--json", action="store_true", help="print one JSON object: hardware and affinity")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="YAML with a resource_profile to apply")
    options = parser.parse_args(argv)
    try:
        profile = load_profile(options.profile) if options.profile is not None else None
    except ProfileError as error:
        print(f"probe: {error}", file=sys.stderr)
        return 2
    hardware = probe()
    affinity = build_affinity_map(hardware, profile)
    if options.json:
        document = msgspec.json.encode({"hardware": hardware, "affinity": affinity, "limits": limits_of(hardware)})
        print(msgspec.json.format(document, indent=2).decode())
    else:
        print(describe(hardware, affinity))
    return 0


def describe(hardware: Hardware, affinity: AffinityMap) -> str:
    """The report for a terminal: the host, its devices, NUMA nodes, interfaces, and what is wrong."""
    cpu, memory = hardware.cpu, hardware.memory
    quota = f", quota {cpu.quota:g}" if cpu.quota is not None else ""
    lines = [
        f"Host      {hardware.host}",
        f"CPU       {cpu.model}: {cpu.usable} usable of {cpu.online} (allowed {cpu.allowed}{quota};"
        f" {cpu.physical_cores} cores, {cpu.isa})",
        f"Memory    {_gib(memory.usable_bytes)} usable of {_gib(memory.total_bytes)}",
        f"cgroup    {hardware.cgroup}",
        f"Driver    {hardware.driver or 'none'}",
        "",
        *_table(
            ("DEVICE", "CLASS", "KIND", "BF16", "BANDWIDTH", "RIDGE", "MEMORY", "NUMA", "CPUS", "NICS", "BEST FOR"),
            [
                (
                    device.id,
                    device.hardware_class,
                    device.kind or "-",
                    _si(device.peak_bf16_flops, "FLOP/s"),
                    _si(device.bandwidth, "B/s"),
                    f"{device.ridge:.0f}" if device.ridge is not None else "-",
                    _gib(device.memory_bytes),
                    _or_dash(device.numa_node),
                    device.cpus or "-",
                    ",".join(device.nics[:2]) or "-",
                    ", ".join(device.roles) or "left out",
                )
                for device in affinity.devices
            ],
        ),
        "",
        *_table(
            ("NUMA", "CPUS", "MEMORY", "DEVICES", "NICS"),
            [
                (
                    str(node.node),
                    node.cpus or "-",
                    _gib(node.memory_bytes),
                    ",".join(node.devices) or "-",
                    ",".join(node.nics) or "-",
                )
                for share in affinity.hosts
                for node in share.numa
            ],
        ),
    ]
    links = [(f"gpu{gpu.index}", str(gpu.nvlinks), _peers(gpu.nvlink_peers)) for gpu in hardware.gpus if gpu.nvlinks]
    if links:
        lines += ["", *_table(("NVLINK", "LINKS", "PEERS"), links)]
    if hardware.nics:
        rows = [
            (nic.name, "up" if nic.up else "down", _mbps(nic.speed_mbps), _or_dash(nic.mtu), _or_dash(nic.numa_node))
            for nic in hardware.nics
        ]
        lines += ["", *_table(("NIC", "STATE", "SPEED", "MTU", "NUMA"), rows)]
    limits = [(o.limit, "yes" if o.enforced else "no", o.what, o.how) for o in limits_of(hardware)]
    lines += ["", *_table(("LIMIT", "ENFORCED", "OF WHAT", "BY WHAT, OR WHY NOT"), limits)]
    if affinity.findings:
        lines += ["", *(_line(finding) for finding in affinity.findings)]
    return "\n".join(lines)


def limits_of(hardware: Hardware) -> tuple[Offer, ...]:
    """What can be enforced on this host."""
    bus_ids = tuple(gpu.pci_bus_id for gpu in hardware.gpus)
    return offers(cpus=hardware.cpu.allowed, numa_nodes=len(hardware.numa), gpus=bus_ids)


def _line(finding: Finding) -> str:
    subjects = f"{', '.join(finding.subjects)}: " if finding.subjects else ""
    remedy = f" ({finding.remedy})" if finding.remedy else ""
    return f"{finding.severity}: {subjects}{finding.detail}{remedy}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.1f} GiB"


def _si(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    for factor, prefix in ((1e12, "T"), (1e9, "G")):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _mbps(speed: int | None) -> str:
    return "-" if speed is None else f"{speed / 1000:g} Gbit/s"


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def _peers(peers: tuple[int, ...]) -> str:
    return ",".join(f"gpu{peer}" for peer in peers) or "-"


if __name__ == "__main__":
    sys.exit(main())
