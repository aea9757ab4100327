"""The length of a network card's rings, as ``ethtool -g`` shows it.

Source: linux/ethtool.h (struct ethtool_ringparam), linux/sockios.h.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct

import msgspec

SIOCETHTOOL = 0x8946
ETHTOOL_GRINGPARAM = 0x10
_FIELDS = 9  # cmd, rx_max, rx_mini_max, rx_jumbo_max, tx_max, rx, rx_mini, rx_jumbo, tx


class Ring(msgspec.Struct, frozen=True):
    """Descriptors for frames that arrive, and how many the card could have."""

    receive: int
    most: int


def read_ring(name: str) -> Ring | None:
    """None where the driver has none to tell of."""
    request = array.array("I", [ETHTOOL_GRINGPARAM] + [0] * (_FIELDS - 1))
    ifreq = struct.pack("16sP16x", name.encode(), request.buffer_info()[0])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCETHTOOL, ifreq)
    except OSError:
        return None
    return Ring(receive=request[5], most=request[1])
