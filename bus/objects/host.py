"""Which process of which machine this is, so that others can tell whether its memory is theirs to map.

Invariant: two processes that name the same machine and the same namespace of processes mean the same process by the
same number; with its time of start that is one process and never a later one of the same number.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class Host(msgspec.Struct, frozen=True, array_like=True):
    """One process, as others on its machine see it."""

    boot: str  # the machine, since it was last started
    processes: int  # the namespace in which ``pid`` is a process: containers have their own
    pid: int
    started: int  # clock ticks after the start of the machine


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
