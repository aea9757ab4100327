"""Which processes are traced: some by number, or those of a run, and what they start.

Invariant: a process that does not exist, or is not on this host, is an error before anything is traced; children that
appear later are followed from the next look on, unless they are not wanted.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hwprobe.sysfs import read_text


class NoTarget(RuntimeError):
    """There is nothing to trace; one line for the user."""


class _Owner(msgspec.Struct, frozen=True):
    """What a run's control process writes into ``owner.lock``."""

    pid: int
    host: str


class Targets:
    """The processes that are traced."""

    def __init__(self, roots: Iterable[int], *, children: bool = True, proc: Path = Path("/proc")) -> None:
        """Raises ``NoTarget``."""
        self._proc = proc
        self._children = children
        self.seen: set[int] = set()
        self._roots = tuple(dict.fromkeys(roots))
        gone = [str(pid) for pid in self._roots if not (proc / str(pid) / "stat").exists()]
        if gone:
            raise NoTarget(f"no such process: {', '.join(gone)}")
        if not self._roots:
            raise NoTarget("no process to trace: name some by --pid, or a run by --run")
        self.look()

    def look(self) -> tuple[int, ...]:
        """Those that live now. A child stays one of ours when its parent goes, once it was seen."""
        if self._children:
            parents = self._parents()
            found = set(self._roots) | self.seen
            grown = True
            while grown:
                more = {pid for pid, parent in parents.items() if parent in found} - found
                found |= more
                grown = bool(more)
            alive = sorted(pid for pid in found if pid in parents and pid != os.getpid())
        else:
            alive = [pid for pid in self._roots if (self._proc / str(pid)).exists()]
        self.seen.update(alive)
        return tuple(alive)

    def _parents(self) -> dict[int, int]:
        parents = {}
        for entry in os.listdir(self._proc):
            if entry.isdecimal():
                fields = stat_fields(read_text(self._proc / entry / "stat"))
                if fields is not None:
                    parents[int(entry)] = int(fields[1])
        return parents


def stat_fields(text: str | None) -> list[str] | None:
    """What follows the name in ``/proc/PID/stat``: state, parent, ... A name may hold spaces and brackets. None where
    there is no such process, or only its corpse."""
    if text is None:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > 20 and fields[0] not in "ZX" else None


def of_run(run: Path, proc: Path = Path("/proc")) -> int:
    """The control process of a run on this host: it holds ``owner.lock`` open. Raises ``NoTarget``."""
    lock = run / "owner.lock"
    try:
        owner = msgspec.json.decode(lock.read_bytes(), type=_Owner)
    except OSError as error:
        raise NoTarget(f"{run}: not the directory of a run ({lock.name}: {error.strerror})") from None
    except msgspec.MsgspecError:
        raise NoTarget(f"{run}: nobody has signed {lock.name}: is the run still starting?") from None
    if owner.host != socket.gethostname():
        raise NoTarget(f"{run}: its control process is on {owner.host}, this is {socket.gethostname()}: trace it there")
    if not _holds(proc / str(owner.pid), lock):
        raise NoTarget(f"{run}: no run is going on there (process {owner.pid} does not hold {lock.name} any more)")
    return owner.pid


def _holds(process: Path, file: Path) -> bool:
    """Whether a process has a file open; a process's number may be another's by now."""
    wanted = file.resolve()
    try:
        return any(Path(os.readlink(entry)) == wanted for entry in (process / "fd").iterdir())
    except PermissionError:  # somebody else's process: its number is all that we have
        return True
    except OSError:
        return False
