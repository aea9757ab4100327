"""What a node does with its keys: nothing plain listens beyond loopback, and a key file that changes is read again.

One key file joins every node of a job; what it holds, and how keys are listed and rotated, is in ``bus.keyring``. Who
is let in is decided in ``bus.authentication``.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from bus import keyring
from bus.keyring import KeyFile, Pair, Ring, SecurityError

__all__ = [
    "ClusterKey",
    "SecurityError",
    "check_exposure",
    "check_name",
    "is_loopback",
    "make_key",
    "reachable_plainly",
    "read_key",
]

log = logging.getLogger(__name__)

RETIRED_GRACE_S = 30.0
"""Connections that a retired key has opened before are heard for this long after it: clocks differ, and what is on its
way arrives."""


class ClusterKey:
    """The key file of a node, as it is at the moment."""

    def __init__(self, path: Path, content: KeyFile, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self.content = content
        self._clock = clock
        self._seen = _stamp(path)

    def refresh(self) -> bool:
        """Read the file again if it has changed; True if it has. One that is no good is logged and left aside."""
        stamp = _stamp(self.path)
        if stamp == self._seen or stamp is None:
            return False
        self._seen = stamp
        try:
            self.content = keyring.load(self.path)
        except SecurityError as error:
            log.error("the key file has changed, and is no good: going on with the keys from before: %s", error)
            return False
        return True

    def ring(self) -> Ring:
        """The keys that are good now."""
        return self.content.at(self._clock())

    def ring_of_the_open(self) -> Ring:
        """The keys whose connections are heard, where they stand already."""
        return self.content.at(self._clock() - RETIRED_GRACE_S)

    def next_change_s(self) -> float | None:
        """In how many seconds the next key retires."""
        now = self._clock()
        change = self.content.next_change(now)
        return None if change is None else change - now


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_ino, facts.st_size


def make_key(path: Path) -> ClusterKey:
    """Create the file of a new cluster, which only its owner can read. Raises ``FileExistsError``."""
    content = keyring.new_cluster()
    keyring.create(path, content)
    return ClusterKey(path, content)


def read_key(path: Path) -> ClusterKey:
    """Read a key file. Raises ``SecurityError`` where it is missing, malformed or readable by others."""
    return ClusterKey(path, keyring.load(path))


# ---- checks ----------------------------------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether a host can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, key: ClusterKey | None) -> None:
    """Refuse to listen beyond loopback without a key, or on an address that peers could not be told."""
    if key is None and not is_loopback(host):
        raise SecurityError(f"listening on {host} needs a key file (--key-file): only loopback may be plain")
    if host in ("0.0.0.0", "::", "*", ""):
        raise SecurityError(f"listening on {host!r}: name the one address under which other hosts reach this one")


def reachable_plainly(endpoint: str) -> bool:
    """Whether a ZeroMQ endpoint can be spoken to without a key: one of this machine, or none at all (which ZeroMQ
    refuses by itself)."""
    scheme, separator, place = endpoint.partition("://")
    if not separator or scheme != "tcp":
        return True
    return is_loopback(place.rpartition(":")[0].strip("[]"))


def check_name(name: str, key: ClusterKey) -> Pair:
    """The pair with which a node of this name speaks. Raises ``SecurityError`` where the others would refuse it."""
    ring = key.ring()
    if ring.pair is None:
        raise SecurityError(f"key file {key.path}: its keys have retired; fetch the one that bin/keys rotate wrote")
    if not ring.may_be(ring.pair.public, name):
        owner = key.content.node
        if owner:
            raise SecurityError(
                f"key file {key.path}: is the file of node {owner!r}, and this node is named {name!r}: "
                f"start it as {owner} (--name {owner}), or with another file"
            )
        raise SecurityError(f"key file {key.path}: lists node {name!r} with a key of its own: start it with that file")
    return ring.pair


# ---- sockets ---------------------------------------------------------------------------------------------------------


ZAP_DOMAIN = b"rollart"


def secure_server(socket: zmq.Socket[bytes], pair: Pair) -> None:
    """CURVE for a socket before it binds. Without somebody who answers for the list of keys, it lets nobody in."""
    socket.curve_publickey = pair.public.encode()
    socket.curve_secretkey = pair.secret.encode()
    socket.curve_server = True
    socket.zap_domain = ZAP_DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: zmq.Socket[bytes], pair: Pair, server_key: str) -> None:
    """CURVE for a socket before it connects."""
    socket.curve_publickey = pair.public.encode()
    socket.curve_secretkey = pair.secret.encode()
    socket.curve_serverkey = server_key.encode()
