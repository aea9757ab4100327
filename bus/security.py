"""CURVE keys of a cluster: one key file joins every node of a job, and nothing plain listens beyond loopback.

The file holds one key pair that all nodes share: whoever has it can join, and nobody else can even connect, since a
CURVE client must know the server's public key. Keep it at mode 0600.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import msgspec
import zmq


class ClusterKey(msgspec.Struct, frozen=True):
    """A CURVE key pair, Z85-encoded."""

    public: str
    secret: str


class SecurityError(RuntimeError):
    """A set-up that would expose a node; the message says what to change."""


def make_key(path: Path) -> ClusterKey:
    """Create a key file that only its owner can read. Raises ``FileExistsError`` rather than overwrite one."""
    public, secret = zmq.curve_keypair()
    key = ClusterKey(public=public.decode(), secret=secret.decode())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(key))
    return key


def read_key(path: Path) -> ClusterKey:
    """Read a key file. Raises ``SecurityError`` where it is missing, malformed or readable by others."""
    try:
        mode = path.stat().st_mode
        key = msgspec.json.decode(path.read_bytes(), type=ClusterKey)
    except OSError as error:
        raise SecurityError(f"key file {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise SecurityError(f"key file {path}: not a key file: {error}") from None
    if mode & 0o077:
        raise SecurityError(f"key file {path}: open to others (mode {mode & 0o777:o}); run chmod 600 on it")
    if not _is_pair(key):
        raise SecurityError(f"key file {path}: its two keys do not belong together; make a new one with bin/keys")
    return key


def _is_pair(key: ClusterKey) -> bool:
    try:
        return zmq.curve_public(key.secret.encode()) == key.public.encode()
    except (zmq.ZMQError, ValueError):  # not a key at all
        return False


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


def secure(socket: zmq.Socket[bytes], key: ClusterKey | None, *, server: bool) -> None:
    """Put CURVE on a socket before it binds or connects."""
    if key is None:
        return
    socket.curve_publickey = key.public.encode()
    socket.curve_secretkey = key.secret.encode()
    if server:
        socket.curve_server = True
    else:
        socket.curve_serverkey = key.public.encode()
