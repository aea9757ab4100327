"""Other hosts, as they are named to the doctor, and the interface that leads there.

Invariant: an address is numeric once it is here; a name that stands for none is an error of whoever gave it.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

import msgspec

from hwprobe.sysfs import read_int

SIOCGIFADDR, SIOCGIFMTU = 0x8915, 0x8921
_DISCARD = 9  # any port: nothing is sent


class PeerError(ValueError):
    """A peer that cannot be meant; one line."""


class Peer(msgspec.Struct, frozen=True):
    """``port``: where something of ours listens; None for a host alone."""

    address: str
    port: int | None = None

    @property
    def name(self) -> str:
        return self.address if self.port is None else f"{self.address}:{self.port}"


class Way(msgspec.Struct, frozen=True):
    """How this host sends to a peer."""

    interface: str
    mtu: int
    speed_mbps: int | None
    own: bool  # the peer is this host


def parse_peer(text: str) -> Peer:
    """``10.0.0.2``, ``gpu-b``, ``tcp://10.0.0.2:5610``. Raises ``PeerError``."""
    plain = text.removeprefix("tcp://")
    host, colon, port = plain.partition(":")
    if not host or (colon and not (port.isdigit() and 0 < int(port) < 65536)) or (plain != text and not colon):
        raise PeerError(f"peer {text!r}: expected an address, or tcp://ADDRESS:PORT (IPv4)")
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise PeerError(f"peer {text!r}: {host} stands for no IPv4 address: {error.strerror or error}") from None
    return Peer(str(found[0][4][0]), int(port) if colon else None)


def way_to(peer: Peer, sysfs: Path = Path("/sys")) -> Way | None:
    """None where no way leads there. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer.address, peer.port or _DISCARD))
        except OSError:
            return None
        here = probe.getsockname()[0]
        own = here == peer.address
        for _, name in socket.if_nameindex():
            if _address_of(probe, name) == here:
                mtu = struct.unpack_from("i", fcntl.ioctl(probe, SIOCGIFMTU, struct.pack("16s16x", name.encode())), 16)
                speed = read_int(sysfs / "class" / "net" / name / "speed")
                return Way(name, mtu[0], speed if speed is not None and speed > 0 else None, own)
    return None


def _address_of(any_socket: socket.socket, name: str) -> str | None:
    try:
        answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("16s16x", name.encode()))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
