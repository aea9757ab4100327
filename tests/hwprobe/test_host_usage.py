"""How busy a host is: rates worked out by hand from two readings."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from hwprobe.host_usage import DiskCounters, HostReading, NicCounters, Pressure, between, read_host_usage
from tests.hwprobe.trees import write

TICKS = os.sysconf("SC_CLK_TCK")


def tree(root: Path, *, busy: int, idle: int, disk: int, received: int) -> Path:
    """``busy`` seconds are spread over user, nice, system, irq, softirq and steal."""
    words = [busy - 5, 1, 1, idle, disk, 1, 1, 1, 0, 0]
    write(
        root,
        {
            "stat": f"cpu  {' '.join(str(word * TICKS) for word in words)}\ncpu0 1 2 3\n",
            "meminfo": "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\nBuffers: 1 kB\n",
            "net/dev": (
                "Inter-|   Receive                                                |  Transmit\n"
                " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo\n"
                "    lo: 999999 1 0 0 0 0 0 0 999999 1 0 0 0 0 0 0\n"
                f"  eth0:{received} 10 1 2 0 0 0 0 5000 10 3 4 0 0 0 0\n"
            ),
        },
    )
    return root


def test_shares_and_rates_are_differences_of_two_readings(tmp_path: Path) -> None:
    before = read_host_usage(tree(tmp_path, busy=100, idle=200, disk=10, received=1000))
    after = read_host_usage(tree(tmp_path, busy=106, idle=211, disk=13, received=3000))
    assert before.nics == {"eth0": NicCounters(1000, 5000, 10)}
    usage = between(before, msgspec.structs.replace(after, at_s=before.at_s + 4.0))
    assert usage.cpu_busy == pytest.approx(0.3)  # 6 of 6 + 11 + 3
    assert usage.disk_wait == pytest.approx(0.15)
    assert (usage.received, usage.sent, usage.lost) == (500.0, 0.0, 0)
    assert (usage.memory_used, usage.memory_total) == (600 * 1024, 1000 * 1024)


def test_disks_are_counted_whole_and_pressure_by_resource(tmp_path: Path) -> None:
    """A disk's line: major, minor, name, reads, merged, sectors read, ms, writes, merged, sectors written, ms, now, ms
    in which it was busy, ms weighted by requests (iostats.rst)."""
    write(
        tmp_path,
        {
            "diskstats": (
                " 259       0 nvme0n1 10 1 2000 7 20 2 4000 8 0 1500 15 0 0 0 0\n"
                " 259       1 nvme0n1p1 9 1 1999 7 20 2 4000 8 0 1500 15 0 0 0 0\n"
                "   7       0 loop0 5 0 100 1 0 0 0 0 0 4 1 0 0 0 0\n"
                " 253       0 dm-0 9 1 1999 7 20 2 4000 8 0 1500 15 0 0 0 0\n"
                "   8      16 sdb 1 0 8 0 0 0 0 0 0 4 0"
            ),
            "pressure/memory": (
                "some avg10=1.00 avg60=0.50 avg300=0.00 total=2500000\n"
                "full avg10=0.00 avg60=0.00 avg300=0.00 total=1000000"
            ),
            "pressure/cpu": (
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0"
            ),
        },
    )
    reading = read_host_usage(tmp_path)
    assert reading.disks == {
        "nvme0n1": DiskCounters(2000 * 512, 4000 * 512, 1.5),
        "sdb": DiskCounters(8 * 512, 0, 0.004),
    }
    assert reading.pressure == {"memory": Pressure(2.5, 1.0), "cpu": Pressure(7e-6, None)}


def test_what_the_kernel_does_not_tell_is_none(tmp_path: Path) -> None:
    usage = between(read_host_usage(tmp_path), read_host_usage(tmp_path))
    assert (usage.cpu_busy, usage.disk_wait, usage.memory_used, usage.memory_total) == (None, None, None, None)
    assert (usage.received, usage.sent) == (0.0, 0.0)


def test_an_interface_that_began_again_counts_nothing_rather_than_backwards() -> None:
    def reading(at_s: float, nics: dict[str, NicCounters]) -> HostReading:
        return HostReading(
            at_s=at_s, busy_s=None, idle_s=None, disk_wait_s=None, memory_total=None, memory_available=None, nics=nics
        )

    usage = between(
        reading(0.0, {"eth0": NicCounters(9000, 9000, 9)}),
        reading(1.0, {"eth0": NicCounters(10, 20, 0), "eth1": NicCounters(5, 5, 5)}),
    )
    assert (usage.received, usage.sent, usage.lost) == (0.0, 0.0, 0)
