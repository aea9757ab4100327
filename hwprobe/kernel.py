"""What the kernel lets this process do: control groups, BPF, namespaces, performance counters.

Invariant: looked up, never tried: nothing is created, loaded or mounted; what cannot be read is ``None``, empty, False.
"""

from __future__ import annotations

from pathlib import Path

from hwprobe.hardware import Kernel
from hwprobe.sysfs import entries, read_int, read_text

# linux/capability.h
CAP_SYS_ADMIN, CAP_PERFMON, CAP_BPF = 21, 38, 39


def read_kernel(sysfs: Path, proc: Path, cgroup: Path) -> Kernel:
    settings = proc / "sys" / "kernel"
    held = _capabilities(proc / "self" / "status")
    unprivileged = read_int(settings / "unprivileged_bpf_disabled")
    may = CAP_SYS_ADMIN in held or CAP_BPF in held
    return Kernel(
        release=read_text(settings / "osrelease"),
        controllers=_controllers(proc, cgroup),
        bpf=unprivileged is not None and (may or unprivileged == 0),
        btf=(sysfs / "kernel" / "btf" / "vmlinux").exists(),
        tracefs=any((sysfs / "kernel" / place / "events").is_dir() for place in ("tracing", "debug/tracing")),
        perf=_may_trace(held, read_int(settings / "perf_event_paranoid")),
        namespaces=tuple(one.name for one in entries(proc / "self" / "ns") if not one.name.endswith("_for_children")),
        user_namespaces=read_int(proc / "sys" / "user" / "max_user_namespaces"),
    )


def _may_trace(held: set[int], paranoid: int | None) -> bool:
    """``perf_event_open`` on the whole host, by capability or where the kernel is not paranoid (sysctl/kernel.rst)."""
    return paranoid is not None and (paranoid < 1 or bool(held & {CAP_SYS_ADMIN, CAP_PERFMON}))


def _capabilities(status: Path) -> set[int]:
    """Numbers of those in effect."""
    line = next((line for line in (read_text(status) or "").splitlines() if line.startswith("CapEff:")), "")
    try:
        mask = int(line.partition(":")[2], 16)
    except ValueError:
        return set()
    return {number for number in range(mask.bit_length()) if mask >> number & 1}


def _controllers(proc: Path, cgroup: Path) -> tuple[str, ...]:
    """Of cgroup v2, and those that are bound to a v1 hierarchy, in the form ``memory(v1)``."""
    unified = next(
        (text for base in (cgroup, cgroup / "unified") if (text := read_text(base / "cgroup.controllers")) is not None),
        "",
    )
    v1 = []
    for line in (read_text(proc / "cgroups") or "").splitlines():
        fields = line.split()
        if len(fields) == 4 and not line.startswith("#") and fields[1] != "0" and fields[3] == "1":
            v1.append(f"{fields[0]}(v1)")
    return (*unified.split(), *v1)
