"""How busy a host is: rates worked out by hand from two readings."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from hwprobe.host_usage import HostReading, NicCounters, between, read_host_usage
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
