"""Network cards that a test sets as it likes: TAP devices in a namespace of their own.

    with cards(Card("eth0", speed=25_000), Card("eth1", speed=10_000)) as host:
        host.set(Card("eth1", speed=25_000))
        host.doctor("--only", "interfaces")           # bin/doctor there

Speed, duplex, MTU, carrier, queues and counters are the kernel's own: the TUN driver keeps what it is told by
ETHTOOL_SSET, as a card's would. What it lacks is a place on a bus; for ``bin/doctor`` the two files that say who made
the card, and which, are laid over sysfs.

Source: linux/ethtool.h (struct ethtool_cmd), linux/if_tun.h.
"""

from __future__ import annotations

import array
import fcntl
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from hwprobe.doctor import Finding
from hwprobe.doctor.ring import SIOCETHTOOL
from tests.support import machines
from tests.support.namespaces import IFF_NO_PI, TUN, TUNSETIFF, within

ROOT = Path(__file__).resolve().parents[2]
IFF_TAP = 0x0002
ETHTOOL_SSET = 0x2
DUPLEX = {"half": 0, "full": 1}
_made = itertools.count()

LAID_OVER = """
set -e
mount -t tmpfs tmpfs /sys/class/net
ln -s /sys/devices/virtual/net/lo /sys/class/net/lo
for card in $CARDS; do
    name=${card%%:*}
    mkdir -p /sys/class/net/$name/device
    ln -s /sys/devices/virtual/net/$name/* /sys/class/net/$name/
    echo 0x15b3 > /sys/class/net/$name/device/vendor
    echo ${card##*:} > /sys/class/net/$name/device/device
done
exec "$@"
"""


class Card(NamedTuple):
    name: str
    speed: int = 25_000  # Mbit/s
    duplex: str = "full"
    mtu: int = 9000
    model: str = "0x1021"


class Host:
    """One namespace, and its cards."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._cards: dict[str, Card] = {}

    def set(self, card: Card) -> None:
        self._cards[card.name] = card
        within(self.name, lambda: _set_link(card))
        subprocess.run(["ip", "-n", self.name, "link", "set", card.name, "mtu", str(card.mtu), "up"], check=True)

    def doctor(self, *words: str) -> list[Finding]:
        """What ``bin/doctor`` finds there, told that these are cards."""
        cards = " ".join(f"{card.name}:{card.model}" for card in self._cards.values())
        command = ["ip", "netns", "exec", self.name, "sh", "-c", LAID_OVER, "doctor"]
        command += [sys.executable, "-m", "coordinator.commands.doctor", "--json", *words]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "CARDS": cards}, capture_output=True, check=False, timeout=120
        )
        assert done.returncode in (0, 1), done.stderr.decode()
        document = json.loads(done.stdout)
        assert done.returncode == bool(document["findings"])
        return msgspec.convert(document["findings"], list[Finding])


def why_not() -> str:
    """Why there can be none here; "" where there can."""
    return machines.why_not() or ("" if TUN.exists() else f"{TUN} is not there")


@contextmanager
def cards(*wanted: Card) -> Iterator[Host]:
    host = Host(f"rlc{os.getpid()}-{next(_made)}")
    opened: list[int] = []
    subprocess.run(["ip", "netns", "add", host.name], check=True)
    try:
        for card in wanted:
            opened.append(within(host.name, lambda card=card: _tap(card.name)))  # type: ignore[misc]
            host.set(card)
        yield host
    finally:
        for descriptor in opened:
            os.close(descriptor)
        subprocess.run(["ip", "netns", "del", host.name], check=True)


def _tap(name: str) -> int:
    """A device whose link is up as long as somebody has it open."""
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def _set_link(card: Card) -> None:
    link = struct.pack(
        "=IIIHBBBBBBIIHBBI8x",
        *(ETHTOOL_SSET, 0, 0, card.speed & 0xFFFF, DUPLEX[card.duplex]),
        *(0, 0, 0, 0, 0, 0, 0, card.speed >> 16, 0, 0, 0),
    )
    held = array.array("B", link)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sP16x", card.name.encode(), held.buffer_info()[0]))
