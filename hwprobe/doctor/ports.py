"""Ports of this host: are those free that a run is to listen at, and are there enough for connections.

Invariant: nothing listens any longer than the look takes, and nothing is sent.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from hwprobe.doctor.findings import Examined
from hwprobe.sysfs import read_text

LISTENS = "0A"  # TCP_LISTEN, net/tcp_states.h
FEWEST = 4096
FULL_SHARE = 0.8


def look(wanted: Sequence[int], host: str = "127.0.0.1", proc: Path = Path("/proc")) -> Examined:
    """``wanted``: ports that something is to listen at, on this address."""
    examined = Examined()
    for port in wanted:
        _free(host, port, proc, examined)
    _enough(proc, examined)
    return examined


def _free(host: str, port: int, proc: Path, examined: Examined) -> None:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended are no hindrance
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder = who_listens(port, proc)
            cause, remedy = f"{holder or 'another process'} listens there", "end it, or choose another port (--port)"
        elif error.errno == errno.EACCES:
            cause, remedy = "ports below 1024 are for root", "choose a port above 1024 (--port)"
        else:
            cause, remedy = f"{host} is no address of this host", "name one of its own (--host; ip address)"
        examined.error(f"port {port}", f"cannot listen at {host}:{port}: {error.strerror}", cause, remedy)
    else:
        examined.note(f"port {port} is free")


def _enough(proc: Path, examined: Examined) -> None:
    words = (read_text(proc / "sys" / "net" / "ipv4" / "ip_local_port_range") or "").split()
    if len(words) != 2:
        return
    first, last = map(int, words)
    many, used = last - first + 1, _used(proc)
    if many < FEWEST:
        examined.warning(
            "ip_local_port_range",
            f"expected at least {FEWEST} ports for connections, found {many} ({first} to {last})",
            "every connection to one and the same place takes one of them, also for a minute after its end",
            "sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
        )
    elif used > FULL_SHARE * many:
        examined.warning(
            "ip_local_port_range",
            f"{used} connections for {many} ports ({first} to {last})",
            "connections are opened and closed at a high rate, or leak; new ones will fail: Cannot assign requested "
            "address",
            "see to whom (ss -tan state time-wait), and widen net.ipv4.ip_local_port_range",
        )
    else:
        examined.note(f"{many} ports for connections, {used} in use")


def _used(proc: Path) -> int:
    """TCP sockets, also those whose connection has just ended."""
    text = read_text(proc / "net" / "sockstat") or ""
    found = re.search(r"^TCP: inuse (\d+) .*?\btw (\d+)", text, re.MULTILINE)
    return int(found[1]) + int(found[2]) if found is not None else 0


def who_listens(port: int, proc: Path = Path("/proc")) -> str:
    """ "process 4711 (java)", where this process may see it; else ""."""
    inodes = set(_inodes(port, proc))
    if not inodes:
        return ""
    for process in proc.iterdir():
        if process.name.isdigit() and _holds(process, inodes):
            return f"process {process.name} ({read_text(process / 'comm') or 'unknown'})"
    return ""


def _inodes(port: int, proc: Path) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        for line in (read_text(proc / "net" / name) or "").splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9]


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:  # gone, or not ours
        return False
    for descriptor in descriptors:
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            return True
    return False
