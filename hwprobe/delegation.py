"""A control group of one's own for each child process: the limits of cgroup v2, where the kernel lets this process set
them.

Invariant: what ``Groups.confine`` returns as set has been written to the kernel and read back; everything else is in
``refused``, with the reason. Nothing outside ``<own group>/rollart-<pid>`` is changed, except that the processes of
this group move into ``<own group>/rollart-rest`` where the kernel demands it (a group whose children are limited may
hold no processes itself) and that controllers are passed on to children.

Source: Documentation/admin-guide/cgroup-v2.rst (cpu.max, memory.max, pids.max, io.max, "No Internal Process
Constraint", "Delegation").
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hwprobe.sysfs import read_text

CONTROLLERS = ("cpu", "memory", "pids", "io")
PERIOD_US = 100_000
REST = "rollart-rest"


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one process may use; ``None`` is no limit."""

    cpus: float | None = None  # CPU time per time
    memory_bytes: int | None = None
    pids: int | None = None  # processes and threads
    io_bytes_s: int | None = None  # to and from the disk of ``io_path``, each
    io_path: str = "."  # a file or directory on that disk

    def wanted(self) -> tuple[str, ...]:
        """The controllers that it takes."""
        values = {"cpu": self.cpus, "memory": self.memory_bytes, "pids": self.pids, "io": self.io_bytes_s}
        return tuple(name for name, value in values.items() if value is not None)


class Standing(msgspec.Struct, frozen=True):
    """What this process may do with control groups."""

    group: str | None  # its own group's directory; None where there is no cgroup v2
    controllers: tuple[str, ...]  # that it can pass on to children
    missing: dict[str, str]  # controller -> why not


def standing(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Standing:
    """Reads only."""
    unified = next((base for base in (root, root / "unified") if (base / "cgroup.controllers").is_file()), None)
    if unified is None:
        return Standing(None, (), dict.fromkeys(CONTROLLERS, f"no cgroup v2 is mounted at {root}"))
    own = _own_group(unified, proc)
    there = set((read_text(own / "cgroup.controllers") or "").split())
    missing: dict[str, str] = {}
    for name in CONTROLLERS:
        if name not in there:
            missing[name] = _why_absent(name, root, unified)
        elif not os.access(own, os.W_OK) or not os.access(own / "cgroup.subtree_control", os.W_OK):
            missing[name] = f"{own} is not delegated to this user (systemd: Delegate=yes)"
    return Standing(str(own), tuple(name for name in CONTROLLERS if name not in missing), missing)


def _own_group(unified: Path, proc: Path) -> Path:
    """A container often sees its group as the mount's root while /proc still names the path on the host."""
    lines = (read_text(proc / "self" / "cgroup") or "").splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    own = unified / path.lstrip("/")
    return own if own.is_dir() else unified


def _why_absent(name: str, root: Path, unified: Path) -> str:
    v1 = {"io": "blkio"}.get(name, name)
    if unified != root and (root / v1).is_dir():
        return f"the controller is bound to cgroup v1 ({root / v1}), which is not used"
    return "the parent group does not pass this controller on (cgroup.subtree_control)"


class Groups:
    """The control groups of this process's children."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc"), pid: int | None = None) -> None:
        self.standing = standing(root, proc)
        self._pid = os.getpid() if pid is None else pid
        self._base: Path | None = None
        self._enabled: frozenset[str] = frozenset()
        self._failed: dict[str, str] = {}
        self._made: list[Path] = []

    def confine(self, name: str, pid: int, share: Share) -> dict[str, str]:
        """Put a process (and whatever it will start) into the group ``name`` with these limits; returns controller ->
        why it could not be set. Raises nothing for what the kernel does."""
        wanted = share.wanted()
        refused = {c: self.standing.missing[c] for c in wanted if c in self.standing.missing}
        possible = [c for c in wanted if c not in refused]
        if not possible:
            return refused
        try:
            base = self._open(possible)
        except OSError as error:
            return refused | dict.fromkeys(possible, f"no groups can be made: {error}")
        refused |= {c: self._failed[c] for c in possible if c in self._failed}
        group = base / name
        try:
            group.mkdir(exist_ok=True)
        except OSError as error:
            return refused | dict.fromkeys(possible, f"{group}: {error.strerror}")
        if group not in self._made:
            self._made.append(group)
        for controller in possible:
            if controller not in refused:
                try:
                    _limit(group, controller, share)
                except (OSError, ValueError) as error:
                    refused[controller] = f"{group}: {error}"
        try:
            (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            return refused | dict.fromkeys(possible, f"process {pid} could not be moved to {group}: {error.strerror}")
        return refused

    def _open(self, controllers: Iterable[str]) -> Path:
        """The directory that the groups are in, with these controllers passed on as far as possible."""
        own = Path(self.standing.group or "")
        base = self._base
        if base is None:
            base = own / f"rollart-{self._pid}"
            base.mkdir(exist_ok=True)
            self._base = base
        for controller in controllers:
            if controller in self._enabled or controller in self._failed:
                continue
            try:
                self._pass_on(own, controller)
                (base / "cgroup.subtree_control").write_text(f"+{controller}")
                self._enabled |= {controller}
            except OSError as error:
                self._failed[controller] = f"{own}: {controller} cannot be passed on: {error.strerror}"
        return base

    def _pass_on(self, own: Path, controller: str) -> None:
        control = own / "cgroup.subtree_control"
        if controller in (read_text(control) or "").split():
            return
        try:
            control.write_text(f"+{controller}")
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            self._make_way(own)
            control.write_text(f"+{controller}")

    def _make_way(self, own: Path) -> None:
        """Processes of this group go into a leaf: the kernel limits children only of groups without any."""
        rest = own / REST
        rest.mkdir(exist_ok=True)
        for pid in (read_text(own / "cgroup.procs") or "").split():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                (rest / "cgroup.procs").write_text(pid)

    def close(self) -> list[str]:
        """Remove the groups; returns those that still hold processes."""
        left = []
        for group in [*self._made, *([self._base] if self._base is not None else [])]:
            try:
                group.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                left.append(str(group))
        self._made.clear()
        return left


def _limit(group: Path, controller: str, share: Share) -> None:
    """Write one limit and read it back. Raises ``OSError``, ``ValueError``."""
    if controller == "cpu" and share.cpus is not None:
        _write(group / "cpu.max", f"{max(1000, round(share.cpus * PERIOD_US))} {PERIOD_US}")
    elif controller == "memory" and share.memory_bytes is not None:
        page = os.sysconf("SC_PAGE_SIZE")
        _write(group / "memory.max", str(share.memory_bytes // page * page))
        if (group / "memory.swap.max").exists():
            _write(group / "memory.swap.max", "0")
        _write(group / "memory.oom.group", "1")  # a worker without one of its processes is no worker
    elif controller == "pids" and share.pids is not None:
        _write(group / "pids.max", str(share.pids))
    elif controller == "io" and share.io_bytes_s is not None:
        device = disk_of(Path(share.io_path))
        limit = f"rbps={share.io_bytes_s} wbps={share.io_bytes_s}"
        (group / "io.max").write_text(f"{device} {limit}")
        found = read_text(group / "io.max") or ""
        if f"{device} {limit}" not in found:
            raise ValueError(f"io.max: wrote {device} {limit}, found {found!r}")


def _write(path: Path, value: str) -> None:
    path.write_text(value)
    found = read_text(path)
    if found != value:
        raise ValueError(f"{path.name}: wrote {value}, found {found!r}")


def disk_of(path: Path, sysfs: Path = Path("/sys"), device: int | None = None) -> str:
    """``major:minor`` of the whole disk that a path is on: io.max knows no partitions. Raises ``ValueError`` for a file
    system without a disk of its own (tmpfs, overlay, network)."""
    if device is None:
        info = os.stat(path)
        device = info.st_rdev if stat.S_ISBLK(info.st_mode) else info.st_dev
    number = device
    name = f"{os.major(number)}:{os.minor(number)}"
    entry = sysfs / "dev" / "block" / name
    if not entry.exists():
        raise ValueError(f"{path} is on no block device ({name}), whose traffic could be limited")
    if (entry / "partition").exists():
        return (entry.resolve().parent / "dev").read_text().strip()
    return name
