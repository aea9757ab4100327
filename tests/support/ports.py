"""Ports for what a test starts by number.

Invariant: no other process is given one of them by chance: they lie below those that the kernel gives to whoever asks
for any, so that one may be let go and taken again. (Two who choose here may still choose alike: one in ten thousand.)
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

FIRST = 20_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """On loopback, now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ones."""
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    if end <= FIRST + 1_000:
        raise RuntimeError(f"{_RANGE}: expected it to begin well above {FIRST}, found {end}")
    chance, found = random.SystemRandom(), set[int]()
    while len(found) < count:
        port = chance.randrange(FIRST, end)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)
