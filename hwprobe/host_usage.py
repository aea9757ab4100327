"""How busy a host is: processors, memory, interfaces, disks, and what waits for them, from the kernel's counters.

Invariant: a reading costs a few small files and no thread; rates are differences of two readings. The figures are the
host's, also inside a container, where ``/proc`` shows no others (but for interfaces, which are the container's); what
the kernel does not tell is None, or absent.

Sources: Documentation/filesystems/proc.rst (``/proc/stat``, ``/proc/meminfo``, ``/proc/net/dev``),
Documentation/admin-guide/iostats.rst (``/proc/diskstats``), Documentation/accounting/psi.rst (``/proc/pressure``).
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import msgspec

from hwprobe.sysfs import read_text

TICKS = os.sysconf("SC_CLK_TCK")
LOOPBACK = "lo"
SECTOR = 512  # the unit of /proc/diskstats, whatever the disk's own is
DISKS = re.compile(r"(sd|vd|xvd|hd)[a-z]+|nvme\d+n\d+|mmcblk\d+|pmem\d+")
"""Whole disks: what they hold (partitions, volumes of device-mapper) would count the same bytes again."""
PRESSURES = ("cpu", "memory", "io")


class NicCounters(msgspec.Struct, frozen=True):
    """Since the interface came up."""

    received: int  # bytes
    sent: int
    lost: int  # packets with errors, and those dropped, both ways


class DiskCounters(msgspec.Struct, frozen=True):
    """Since the host started."""

    read: int  # bytes
    written: int
    busy_s: float  # in which it had something to do


class Pressure(msgspec.Struct, frozen=True):
    """Since the host started: time in which somebody waited for a resource, and in which nobody could go on for it."""

    some_s: float
    full_s: float | None  # None of processors: on a whole host somebody always goes on, and the kernel's 0 says nothing


class HostReading(msgspec.Struct, frozen=True, kw_only=True):
    """Counters at one moment."""

    at_s: float  # monotonic
    busy_s: float | None  # CPU time of all CPUs since boot, by what they did
    idle_s: float | None
    disk_wait_s: float | None  # idle, while a thread waited for a disk
    memory_total: int | None  # bytes
    memory_available: int | None
    nics: dict[str, NicCounters]
    disks: dict[str, DiskCounters] = {}
    pressure: dict[str, Pressure] = {}  # by resource, where the kernel counts it


class HostUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Between two readings."""

    seconds: float
    cpu_busy: float | None  # share of all CPUs' time
    disk_wait: float | None
    memory_used: int | None  # bytes that are not available
    memory_total: int | None
    received: float  # bytes a second over all interfaces but loopback
    sent: float
    lost: int  # packets


def read_host_usage(proc: Path = Path("/proc")) -> HostReading:
    """Now."""
    busy_s, idle_s, disk_wait_s = _cpu(read_text(proc / "stat"))
    memory = _memory(read_text(proc / "meminfo"))
    return HostReading(
        at_s=time.monotonic(),
        busy_s=busy_s,
        idle_s=idle_s,
        disk_wait_s=disk_wait_s,
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        nics=_nics(read_text(proc / "net" / "dev")),
        disks=_disks(read_text(proc / "diskstats")),
        pressure={name: found for name in PRESSURES if (found := _pressure(name, read_text(proc / "pressure" / name)))},
    )


def between(before: HostReading, after: HostReading) -> HostUsage:
    """Rates from one reading to a later one. An interface that is new, or began again, counts from there."""
    seconds = max(after.at_s - before.at_s, 1e-9)
    common = [(before.nics[name], nic) for name, nic in after.nics.items() if name in before.nics]
    busy, idle, disk = (
        _grown(old, new)
        for old, new in (
            (before.busy_s, after.busy_s),
            (before.idle_s, after.idle_s),
            (before.disk_wait_s, after.disk_wait_s),
        )
    )
    whole = None if busy is None or idle is None or disk is None else busy + idle + disk
    used = (
        None
        if after.memory_total is None or after.memory_available is None
        else (after.memory_total - after.memory_available)
    )
    return HostUsage(
        seconds=seconds,
        cpu_busy=busy / whole if busy is not None and whole else None,
        disk_wait=disk / whole if disk is not None and whole else None,
        memory_used=used,
        memory_total=after.memory_total,
        received=sum(max(0, new.received - old.received) for old, new in common) / seconds,
        sent=sum(max(0, new.sent - old.sent) for old, new in common) / seconds,
        lost=sum(max(0, new.lost - old.lost) for old, new in common),
    )


def _grown(old: float | None, new: float | None) -> float | None:
    return None if old is None or new is None else max(0.0, new - old)


def _cpu(text: str | None) -> tuple[float, float, float] | tuple[None, None, None]:
    """Seconds busy, idle and waiting for a disk: user nice system idle iowait irq softirq steal."""
    words = (text or "").partition("\n")[0].split()
    if len(words) < 9 or words[0] != "cpu":
        return None, None, None
    user, nice, system, idle, disk, irq, softirq, steal = (int(word) / TICKS for word in words[1:9])
    return user + nice + system + irq + softirq + steal, idle, disk


def _memory(text: str | None) -> dict[str, int]:
    found = {}
    for line in (text or "").splitlines()[:8]:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def _nics(text: str | None) -> dict[str, NicCounters]:
    found = {}
    for line in (text or "").splitlines()[2:]:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) >= 12 and name.strip() != LOOPBACK:
            received, _, errors, dropped = (int(word) for word in words[:4])
            sent, _, send_errors, send_dropped = (int(word) for word in words[8:12])
            found[name.strip()] = NicCounters(received, sent, errors + dropped + send_errors + send_dropped)
    return found


def _disks(text: str | None) -> dict[str, DiskCounters]:
    found = {}
    for line in (text or "").splitlines():
        words = line.split()
        if len(words) >= 13 and DISKS.fullmatch(words[2]):
            found[words[2]] = DiskCounters(int(words[5]) * SECTOR, int(words[9]) * SECTOR, int(words[12]) / 1000)
    return found


def _pressure(name: str, text: str | None) -> Pressure | None:
    """``some avg10=0.00 avg60=0.00 avg300=0.00 total=12345``, and the same for ``full``; the total is microseconds."""
    totals = {kind: int(us) / 1e6 for kind, us in re.findall(r"^(some|full) .*total=(\d+)", text or "", re.MULTILINE)}
    return Pressure(totals["some"], None if name == "cpu" else totals.get("full")) if "some" in totals else None
