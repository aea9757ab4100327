"""The share of CPU and memory that control groups leave to this process.

Invariant: a limit is the tightest on the way from this process's group to the root, in whichever hierarchy (v1, v2 or
both) its controller lives; where nothing is limited, or nothing can be read, the limit is ``None``.

Sources: Documentation/admin-guide/cgroup-v2.rst (``cpu.max``, ``memory.max``, ``cpuset.cpus.effective``) and
Documentation/admin-guide/cgroup-v1 with Documentation/scheduler/sched-bwc.rst (``cpu.cfs_quota_us``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from hwprobe.cpulist import parse_cpulist
from hwprobe.hardware import CgroupVersion
from hwprobe.sysfs import read_int, read_text

V1_UNLIMITED_BYTES = 1 << 60  # v1 spells "no limit" as the largest multiple of a page that fits 63 bits


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of this process; ``None`` is no limit."""

    version: CgroupVersion = "none"
    cpus: float | None = None  # CPU time per time
    cpuset: tuple[int, ...] | None = None
    memory_bytes: int | None = None


def read_limits(root: Path, proc: Path) -> Limits:
    """``root`` is where control groups are mounted (/sys/fs/cgroup), ``proc`` names this process's groups."""
    own = _own_groups(proc / "self" / "cgroup")
    unified = next((base for base in (root, root / "unified") if (base / "cgroup.controllers").is_file()), None)
    v1 = {name: base for name in ("cpu", "cpuset", "memory") if (base := _v1_mount(root, name, own)) is not None}
    quotas: list[float | None] = []
    memory: list[int | None] = []
    cpusets: list[tuple[int, ...] | None] = []
    if unified is not None:
        for group in _upwards(unified, own.get("", "/")):
            quotas.append(_v2_quota(group))
            memory.append(read_int(group / "memory.max"))
            cpusets.append(_cpuset(group / "cpuset.cpus.effective"))
    quotas.extend(_v1_quota(group) for group in _v1_groups(v1, own, "cpu"))
    memory.extend(_v1_memory(group) for group in _v1_groups(v1, own, "memory"))
    cpusets.extend(_v1_cpuset(group) for group in _v1_groups(v1, own, "cpuset"))
    return Limits(
        version=_version(unified is not None, bool(v1)),
        cpus=min((quota for quota in quotas if quota is not None), default=None),
        cpuset=next((cpuset for cpuset in cpusets if cpuset), None),  # the innermost: it is a subset of the others
        memory_bytes=min((limit for limit in memory if limit is not None), default=None),
    )


def _version(has_v2: bool, has_v1: bool) -> CgroupVersion:
    if has_v1:
        return "hybrid" if has_v2 else "v1"
    return "v2" if has_v2 else "none"


def _own_groups(path: Path) -> dict[str, str]:
    """Controller (``""`` for v2) -> this process's group below the mount, and ``"=cpu"`` -> the hierarchy's name."""
    groups: dict[str, str] = {}
    for line in (read_text(path) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0":
            groups[""] = group
            continue
        for controller in controllers.split(","):
            groups[controller] = group
            groups["=" + controller] = controllers
    return groups


def _v1_mount(root: Path, controller: str, own: dict[str, str]) -> Path | None:
    """Where a v1 controller is mounted: under its own name, or under the joined name (``cpu,cpuacct``)."""
    names = (controller, own.get("=" + controller, controller))
    return next((root / name for name in names if (root / name).is_dir()), None)


def _v1_groups(mounts: dict[str, Path], own: dict[str, str], controller: str) -> Iterable[Path]:
    if controller not in mounts:
        return ()
    return _upwards(mounts[controller], own.get(controller, "/"))


def _upwards(base: Path, group: str) -> Iterator[Path]:
    """The group's directory and its parents down to ``base``. A container often sees its group as the mount's root
    while /proc still names the path on the host: what does not exist below ``base`` is skipped."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        directory = base.joinpath(*parts[:depth])
        if directory.is_dir():
            yield directory


def _v2_quota(group: Path) -> float | None:
    quota, _, period = (read_text(group / "cpu.max") or "max").partition(" ")
    try:
        return int(quota) / int(period or "100000")
    except (ValueError, ZeroDivisionError):  # "max"
        return None


def _v1_quota(group: Path) -> float | None:
    quota = read_int(group / "cpu.cfs_quota_us")
    period = read_int(group / "cpu.cfs_period_us")
    if quota is None or quota <= 0 or not period:
        return None
    return quota / period


def _v1_memory(group: Path) -> int | None:
    limit = read_int(group / "memory.limit_in_bytes")
    return limit if limit is not None and limit < V1_UNLIMITED_BYTES else None


def _v1_cpuset(group: Path) -> tuple[int, ...] | None:
    return _cpuset(group / "cpuset.effective_cpus") or _cpuset(group / "cpuset.cpus")


def _cpuset(path: Path) -> tuple[int, ...] | None:
    try:
        return parse_cpulist(read_text(path) or "") or None
    except ValueError:
        return None


def own_directories(root: Path, proc: Path, controller: str) -> tuple[Path, ...]:
    """This process's group and its parents, innermost first, in every hierarchy that has the controller."""
    own = _own_groups(proc / "self" / "cgroup")
    unified = next((base for base in (root, root / "unified") if (base / "cgroup.controllers").is_file()), None)
    found = list(_upwards(unified, own.get("", "/"))) if unified is not None else []
    mount = _v1_mount(root, controller, own)
    return (*found, *(_upwards(mount, own.get(controller, "/")) if mount is not None else ()))
