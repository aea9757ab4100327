"""Caches and huge pages, from sysfs.

Invariant: caches are those of the CPUs that this process may use, each counted once however many CPUs share it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from hwprobe.cpulist import parse_cpulist
from hwprobe.hardware import Cache, HugePages
from hwprobe.sysfs import entries, read_int, read_text

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def read_caches(sysfs: Path, cpus: Iterable[int]) -> tuple[Cache, ...]:
    """By level, instructions and data apart where they are; nothing where the kernel shows none."""
    seen: dict[tuple[int, str, int, int], int] = {}
    counted: set[tuple[int, str, int]] = set()  # level, kind, CPU: covered by a cache that was counted
    for cpu in cpus:
        for directory in entries(sysfs / "devices" / "system" / "cpu" / f"cpu{cpu}" / "cache"):
            level, kind = read_int(directory / "level"), (read_text(directory / "type") or "").lower()
            if level is None or (level, kind, cpu) in counted:
                continue
            size = _size(read_text(directory / "size"))
            shared = _shared(directory / "shared_cpu_list") or (cpu,)
            counted |= {(level, kind, sharer) for sharer in shared}
            if size is not None:
                key = (level, kind, size, len(shared))
                seen[key] = seen.get(key, 0) + 1
    return tuple(
        Cache(level=level, kind=kind, size_bytes=size, shared_by=shared, count=count)
        for (level, kind, size, shared), count in sorted(seen.items())
    )


def _shared(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpulist(read_text(path) or "")
    except ValueError:
        return ()


def _size(text: str | None) -> int | None:
    """``32K``, as sysfs writes it."""
    match = re.fullmatch(r"(\d+)([KMG])", text or "")
    return int(match[1]) * _UNITS[match[2]] if match else None


def read_huge_pages(sysfs: Path) -> tuple[HugePages, ...]:
    """Of each size that the kernel has, smallest first."""
    found = []
    for directory in entries(sysfs / "kernel" / "mm" / "hugepages"):
        match = re.fullmatch(r"hugepages-(\d+)kB", directory.name)
        if match:
            total, free = read_int(directory / "nr_hugepages"), read_int(directory / "free_hugepages")
            found.append(HugePages(size_bytes=int(match[1]) << 10, total=total or 0, free=free or 0))
    return tuple(sorted(found, key=lambda pages: pages.size_bytes))


def read_transparent(sysfs: Path) -> str | None:
    """always, madvise or never: the kernel puts brackets around the one that holds."""
    text = read_text(sysfs / "kernel" / "mm" / "transparent_hugepage" / "enabled") or ""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else None
