"""Which process of which machine this is, so that others can tell whether its memory is theirs to map.

Invariant: two processes that name the same machine and the same namespace of processes mean the same process by the
same number; with its time of start that is one process and never a later one of the same number.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

import msgspec


class Host(msgspec.Struct, frozen=True, array_like=True):
    """One process, as others on its machine see it."""

    boot: str  # the machine, since it was last started
    processes: int  # the namespace in which ``pid`` is a process: containers have their own
    pid: int
    started: int  # clock ticks after the start of the machine


class Watched:
    """Another process of this machine, by a descriptor that tells its end (pidfd_open(2)): whoever asks again and again
    would else read /proc each time, which costs many times as much."""

    __slots__ = ("__weakref__", "_descriptor", "_poll")

    def __init__(self, host: Host) -> None:
        """Raises ``OSError`` where it does not run any more, or the system has no such descriptors."""
        if not hasattr(os, "pidfd_open"):
            raise OSError("no descriptors for processes here")
        self._descriptor = os.pidfd_open(host.pid)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        if _started(host.pid) != host.started:  # a later one of the same number
            raise ProcessLookupError(f"process {host.pid} is not the one that is meant")

    def runs(self) -> bool:
        return not self._poll.poll(0)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def this_host() -> Host | None:
    """This process; None where the system (other than Linux) does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.stat("/proc/self/ns/pid").st_ino
        started = _started(os.getpid())
    except OSError:
        return None
    return None if started is None else Host(boot, processes, os.getpid(), started)


def runs(host: Host, seen_from: Host) -> bool | None:
    """Whether a process still runs; None where that cannot be told from another one."""
    if (host.boot, host.processes) != (seen_from.boot, seen_from.processes):
        return None
    return _started(host.pid) == host.started


def _started(pid: int) -> int | None:
    """When a process started; None where there is none (or only what is left of it until its parent asks)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # proc(5): fields 3 and 22
