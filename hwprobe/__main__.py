"""``python -m hwprobe [--json] [--profile FILE] [--measure]``: what this machine is, and what its devices are good for.

Invariant: exit status 0 whatever the hardware is, 2 for a profile that cannot be used; plain text without colours.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from hwprobe.affinity import build_affinity_map
from hwprobe.hardware import Hardware
from hwprobe.measuring import measure_all
from hwprobe.offers import Offer, offers
from hwprobe.probing import probe
from hwprobe.profile import ProfileError, load_profile
from hwprobe.report import describe


def main(argv: list[str] | None = None) -> int:
    """Probe, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="probe", description="Show this machine's hardware and what it is good for.")
    parser.add_argument("--json", action="store_true", help="print one JSON object: hardware and affinity")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="YAML with a resource_profile to apply")
    parser.add_argument(
        "--measure",
        nargs="?",
        choices=("all", "unknown"),
        const="all",
        help="time a matrix product and a copy on every device, or on GPUs that the built-in table lacks (needs torch)",
    )
    options = parser.parse_args(argv)
    try:
        profile = load_profile(options.profile) if options.profile is not None else None
    except ProfileError as error:
        print(f"probe: {error}", file=sys.stderr)
        return 2
    hardware = probe()
    if options.measure:
        hardware = measure_all(hardware, only_unknown=options.measure == "unknown")
    affinity = build_affinity_map(hardware, profile)
    limits = limits_of(hardware)
    if options.json:
        document = msgspec.json.encode({"hardware": hardware, "affinity": affinity, "limits": limits})
        print(msgspec.json.format(document, indent=2).decode())
    else:
        print(describe(hardware, affinity, limits))
    return 0


def limits_of(hardware: Hardware) -> tuple[Offer, ...]:
    """What can be enforced on this host."""
    bus_ids = tuple(gpu.pci_bus_id for gpu in hardware.gpus)
    return offers(cpus=hardware.cpu.allowed, numa_nodes=len(hardware.numa), gpus=bus_ids)


if __name__ == "__main__":
    sys.exit(main())
