"""TCP connections of processes and how often the kernel sent a segment again, by ``ss``, without BPF.

Invariant: counters are the kernel's own (``tcp_info``), per connection: exact while a connection is open; those that
open and close between two looks are missed, which the report says. Each network namespace is looked at from inside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hwprobe.sysfs import read_text
from hwprobe.tracing.children import run

ASK_S = 30.0
USERS = re.compile(r"pid=(\d+)")
RETRANS = re.compile(r"\bretrans:\d+/(\d+)")
SEGMENTS = re.compile(r"\bsegs_out:(\d+)")


class Connection(msgspec.Struct, frozen=True):
    """One connection at one moment."""

    local: str  # address:port
    peer: str
    pids: tuple[int, ...]
    retransmits: int
    segments_out: int

    @property
    def name(self) -> str:
        return f"{self.local} > {self.peer}"


def parse_ss(text: str) -> list[Connection]:
    """Of ``ss --tcp --info --processes --numeric --no-header``: a line for the connection, then an indented one."""
    joined: list[str] = []
    for line in text.splitlines():
        if line[:1].isspace() and joined:
            joined[-1] += " " + line.strip()
        elif line.strip():
            joined.append(line)
    return [found for found in map(_connection, joined) if found is not None]


def _connection(line: str) -> Connection | None:
    words = line.split()
    if len(words) < 5:
        return None
    again, sent = RETRANS.search(line), SEGMENTS.search(line)
    return Connection(
        _plain(words[3]),
        _plain(words[4]),
        tuple(dict.fromkeys(int(pid) for pid in USERS.findall(line))),
        int(again[1]) if again else 0,
        int(sent[1]) if sent else 0,
    )


def _plain(address: str) -> str:
    """IPv4 that travels in IPv6 sockets is IPv4, and a scope is no part of an address."""
    return re.sub(r"^\[::ffff:([0-9.]+)\]", r"\1", re.sub(r"%[^:\]]+", "", address))


def connections(pids: Iterable[int], proc: Path = Path("/proc")) -> list[Connection]:
    """Those of the given processes. Raises ``ChildFailed``."""
    wanted = set(pids)
    found = []
    for namespace, pid in _namespaces(wanted, proc).items():
        inside = ["nsenter", f"--net={proc}/{pid}/ns/net"] if namespace != _namespace(os.getpid(), proc) else []
        command = [*inside, "ss", "--tcp", "--info", "--processes", "--numeric", "--no-header"]
        found += [one for one in parse_ss(run(command, ASK_S)) if wanted & set(one.pids)]
    return found


def _namespaces(pids: set[int], proc: Path) -> dict[str, int]:
    """Each network namespace, and a process in it."""
    return {name: pid for pid in sorted(pids) if (name := _namespace(pid, proc))}


def _namespace(pid: int, proc: Path) -> str:
    try:
        return os.readlink(proc / str(pid) / "ns" / "net")
    except OSError:
        return ""


def sent_segments(pid: int, proc: Path = Path("/proc")) -> tuple[int, int] | None:
    """TCP segments that a process's network namespace has sent, and those that it has sent again."""
    lines = [line.split() for line in (read_text(proc / str(pid) / "net" / "snmp") or "").splitlines()]
    tcp = [words[1:] for words in lines if words and words[0] == "Tcp:"]
    if len(tcp) != 2:
        return None
    figures = dict(zip(*tcp, strict=False))
    try:
        return int(figures["OutSegs"]), int(figures["RetransSegs"])
    except (KeyError, ValueError):
        return None


class Meter:
    """Differences of the connections' counters since the first look, or since a connection was opened."""

    def __init__(self, found: Iterable[Connection]) -> None:
        self._first: dict[str, Connection] = {one.name: one for one in found}
        self._last = dict(self._first)

    def look(self, found: Iterable[Connection]) -> None:
        for one in found:
            first = self._first.get(one.name)
            if first is None or one.segments_out < first.segments_out:  # new, or another one at the same addresses
                self._first[one.name] = msgspec.structs.replace(one, retransmits=0, segments_out=0)
            self._last[one.name] = one

    def changes(self) -> list[Connection]:
        return [
            msgspec.structs.replace(
                last,
                retransmits=last.retransmits - self._first[name].retransmits,
                segments_out=last.segments_out - self._first[name].segments_out,
            )
            for name, last in self._last.items()
        ]
