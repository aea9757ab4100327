"""Unix sockets for nodes of one host: the kernel's way between two processes that costs least.

Invariant: a node that listens at a TCP endpoint is behind the Unix socket named after it, or nobody is. So an address
need not say more than the endpoint, and who connects finds out by itself: the socket's name is there to be seen only on
the host, and in the network namespace, in which the endpoint's port is taken as well.

The names are abstract ones (Linux): no file is left behind by a process that is killed, and none needs a directory that
both ends can reach. Like loopback, they are open to every user of the host: keys guard both in the same way.
"""

from __future__ import annotations

import sys
from pathlib import Path

import zmq

from bus.security import is_loopback

_NAMES = Path("/proc/net/unix")
_LISTENS = b" 00010000 "
"""In the column of flags: __SO_ACCEPTCON. What such a socket has accepted goes by the same name."""

_PREFIX = "@rollart-"


def unix_endpoint(endpoint: str) -> str | None:
    """The Unix socket beside a TCP endpoint; None where there can be none."""
    scheme, _, place = endpoint.partition("://")
    return f"ipc://{_PREFIX}{place}" if scheme == "tcp" and _possible() else None


def _possible() -> bool:
    return sys.platform.startswith("linux") and zmq.has("ipc")


def nearest(endpoint: str, own: str) -> str:
    """Where to connect to, for who listens at a TCP endpoint: itself, unless its Unix socket is on this host. ``own``:
    where this node listens. Only loopback, and its own host, are looked for here, so that nobody on this host can pose
    as somebody on another."""
    local = unix_endpoint(endpoint)
    if local is None or not (_host(endpoint) == _host(own) or is_loopback(_host(endpoint))):
        return endpoint
    return local if _exists(local.removeprefix("ipc://")) else endpoint


def _host(endpoint: str) -> str:
    return endpoint.partition("://")[2].rpartition(":")[0].strip("[]")


def _exists(name: str) -> bool:
    """Whether somebody on this host listens on an abstract socket. It is looked up: a connection only to find out would
    be a broken handshake to the other end."""
    ending = b" " + name.encode()
    try:
        lines = _NAMES.read_bytes().splitlines()
    except OSError:
        return False
    return any(line.endswith(ending) and _LISTENS in line for line in lines)
