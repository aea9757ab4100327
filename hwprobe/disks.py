"""Disks: size, kind, NUMA node, and where they are mounted.

Invariant: only what has a device behind it and holds something (no loop, RAM or device-mapper volumes); at most
``MAX_DISKS``.
"""

from __future__ import annotations

from pathlib import Path

from hwprobe.hardware import Disk
from hwprobe.sysfs import entries, read_int, read_numa_node, read_text

SECTOR = 512  # the unit of /sys/block/*/size, whatever the disk's own is
MAX_DISKS = 64
MAX_MOUNTS = 8


def read_disks(sysfs: Path, proc: Path) -> tuple[Disk, ...]:
    mounts = _mounts(proc / "self" / "mountinfo")
    found = []
    for directory in entries(sysfs / "block"):
        sectors = read_int(directory / "size")
        if not sectors or not (directory / "device").exists():
            continue
        rotational = read_int(directory / "queue" / "rotational")
        device = (directory / "device").resolve()
        found.append(
            Disk(
                name=directory.name,
                size_bytes=sectors * SECTOR,
                rotational=None if rotational is None else bool(rotational),
                model=read_text(directory / "device" / "model"),
                numa_node=next(
                    (node for place in (device, device.parent) if (node := read_numa_node(place)) is not None), None
                ),
                mounts=_mounted(directory, mounts)[:MAX_MOUNTS],
            )
        )
    return tuple(found[:MAX_DISKS])


def _mounted(disk: Path, mounts: dict[str, list[str]]) -> tuple[str, ...]:
    """Of the disk and its partitions, whose directories carry its name in front."""
    parts = [disk, *(part for part in entries(disk) if part.name.startswith(disk.name))]
    numbers = [number for part in parts if (number := read_text(part / "dev")) is not None]
    return tuple(sorted({point for number in numbers for point in mounts.get(number, [])}))


def _mounts(mountinfo: Path) -> dict[str, list[str]]:
    """Device number -> mount points (proc(5): the third and the fifth field); bind mounts of parts are left out."""
    points: dict[str, list[str]] = {}
    for line in (read_text(mountinfo) or "").splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[3] == "/":
            points.setdefault(fields[2], []).append(fields[4])
    return points
