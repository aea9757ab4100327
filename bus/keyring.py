"""The key file of a cluster: which keys its holder has, and which are let in under which names.

Invariants: at any time all holders of up-to-date files agree on the one key with which a node answers, whatever they
have read before; a key that is not listed, or has retired, lets nobody in; a name that is listed with a key of its own
can be claimed with no other key.

Every node that has the cluster's file may join, under any name that is not listed on its own. The file of one node
(``bin/keys node``) holds a key of its own instead of the cluster's, good for that name and those of its children
(``NAME.*``). While keys are rotated a file holds the old pair and the new one: both are let in, the old one speaks,
until it retires. Times are seconds since 1970.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
import zmq


class SecurityError(RuntimeError):
    """A set-up that would expose a node; the message says what to change."""


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A CURVE key pair, Z85-encoded."""

    public: str
    secret: str
    until: float | None = None  # when it retires


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key that is let in."""

    public: str
    node: str = ""  # the one node it belongs to, with its children; empty: any name that is not listed on its own
    until: float | None = None


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the file holds; both lists oldest first."""

    pairs: list[Pair]
    allow: list[Listed]
    node: str = ""  # whose file it is; empty: the cluster's

    def at(self, now: float) -> Ring:
        """The keys that are good at a time."""
        return Ring(
            pair=next((pair for pair in self.pairs if _good(pair.until, now)), None),
            allow=tuple(entry for entry in self.allow if _good(entry.until, now)),
        )

    def next_change(self, now: float) -> float | None:
        """When the next key retires, if any does."""
        ends = [*(pair.until for pair in self.pairs), *(entry.until for entry in self.allow)]
        return min((end for end in ends if end is not None and end > now), default=None)


class Ring(msgspec.Struct, frozen=True):
    """The keys that are good at one time."""

    pair: Pair | None  # with which its holder speaks
    allow: tuple[Listed, ...]

    def lists(self, public: str) -> bool:
        return any(entry.public == public for entry in self.allow)

    def owners(self, name: str) -> list[Listed]:
        """The keys with which a node of this name may come, oldest first: its own ones, or else the cluster's."""
        fitting = [entry for entry in self.allow if not entry.node or covers(entry.node, name)]
        closest = max((entry.node for entry in fitting), key=len, default="")
        return [entry for entry in fitting if entry.node == closest]

    def may_be(self, public: str, name: str) -> bool:
        """Whether a key is one of this node's."""
        return any(entry.public == public for entry in self.owners(name))

    def server_key(self, name: str) -> str:
        """The public key with which a node of this name answers. Raises ``SecurityError`` where none is known."""
        owners = self.owners(name)
        if not owners:
            raise SecurityError(f"the key file lists no key that is good for node {name!r} any more")
        return owners[0].public


def covers(node: str, name: str) -> bool:
    """Whether a node's key is good for a name: its own, and its children's."""
    return name == node or name.startswith(f"{node}.")


def _good(until: float | None, now: float) -> bool:
    return until is None or now < until


# ---- the file --------------------------------------------------------------------------------------------------------


def new_pair() -> Pair:
    public, secret = zmq.curve_keypair()
    return Pair(public=public.decode(), secret=secret.decode())


def new_cluster() -> KeyFile:
    """A cluster with one key."""
    pair = new_pair()
    return KeyFile(pairs=[pair], allow=[Listed(pair.public)])


def create(path: Path, content: KeyFile) -> None:
    """Write a file that only its owner can read. Raises ``FileExistsError`` rather than overwrite one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(_encoded(content))


def replace(path: Path, content: KeyFile) -> None:
    """Write a key file anew, as a whole or not at all: nodes that run read it again."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        create(beside, content)
        os.replace(beside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()


def _encoded(content: KeyFile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


def load(path: Path) -> KeyFile:
    """Raises ``SecurityError`` where it is missing, malformed or readable by others."""
    try:
        mode = path.stat().st_mode
        content = msgspec.json.decode(path.read_bytes(), type=KeyFile)
    except OSError as error:
        raise SecurityError(f"key file {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise SecurityError(f"key file {path}: not a key file: {error}; make one with bin/keys make") from None
    if mode & 0o077:
        raise SecurityError(f"key file {path}: open to others (mode {mode & 0o777:o}); run chmod 600 on it")
    if not content.pairs or not content.allow:
        raise SecurityError(f"key file {path}: not a key file: it holds no keys; make one with bin/keys make")
    if not all(_is_pair(pair) for pair in content.pairs):
        raise SecurityError(f"key file {path}: its two keys do not belong together; make a new one with bin/keys make")
    return content


def _is_pair(pair: Pair) -> bool:
    try:
        return zmq.curve_public(pair.secret.encode()) == pair.public.encode()
    except (zmq.ZMQError, ValueError):  # not a key at all
        return False


# ---- changes ---------------------------------------------------------------------------------------------------------


def rotate(content: KeyFile, *, now: float, overlap_s: float) -> KeyFile:
    """A new pair for the cluster; those before it retire after the overlap, those that have retired are left out.
    Raises ``SecurityError`` for the file of one node."""
    _check_cluster(content, "rotated")
    end = now + overlap_s
    pair = new_pair()
    kept = [entry if entry.node else _retire(entry, end) for entry in content.allow if _good(entry.until, now)]
    return KeyFile(
        pairs=[*(_retire_pair(old, end) for old in content.pairs if _good(old.until, now)), pair],
        allow=[*kept, Listed(pair.public)],
    )


def add_node(content: KeyFile, name: str) -> tuple[KeyFile, KeyFile]:
    """The cluster's file with a node listed in it, and that node's own. Raises ``SecurityError``."""
    _check_cluster(content, "given nodes")
    if not name or "/" in name:
        raise SecurityError(f"{name!r} cannot be the name of a node")
    if any(entry.node == name for entry in content.allow):
        raise SecurityError(f"node {name!r} is listed already; bin/keys remove takes it off the list")
    pair = new_pair()
    cluster = msgspec.structs.replace(content, allow=[*content.allow, Listed(pair.public, name)])
    return cluster, KeyFile(pairs=[pair], allow=cluster.allow, node=name)


def update_node(content: KeyFile, own: KeyFile) -> KeyFile:
    """A node's file with the cluster's present list. Raises ``SecurityError`` where the node is not on it."""
    _check_cluster(content, "given nodes")
    listed = {entry.public for entry in content.allow if entry.node == own.node}
    if not own.node or not any(pair.public in listed for pair in own.pairs):
        raise SecurityError(f"it is not the file of a node of this cluster (its node is {own.node!r})")
    return msgspec.structs.replace(own, allow=content.allow)


def remove_node(content: KeyFile, name: str) -> KeyFile:
    """The cluster's file without a node. Raises ``SecurityError`` where it is not listed."""
    _check_cluster(content, "relieved of nodes")
    kept = [entry for entry in content.allow if not name or entry.node != name]
    if len(kept) == len(content.allow):
        raise SecurityError(f"node {name!r} is not listed")
    return msgspec.structs.replace(content, allow=kept)


def _check_cluster(content: KeyFile, what: str) -> None:
    if content.node:
        raise SecurityError(f"it is the file of node {content.node!r}: only the cluster's can be {what}")


def _retire_pair(pair: Pair, end: float) -> Pair:
    return msgspec.structs.replace(pair, until=_earlier(pair.until, end))


def _retire(entry: Listed, end: float) -> Listed:
    return msgspec.structs.replace(entry, until=_earlier(entry.until, end))


def _earlier(until: float | None, end: float) -> float:
    return end if until is None else min(until, end)
