"""What this kernel and this machine's programs offer to the tools, before anything is traced.

Invariant: each way is either possible or has a reason why not; that it is possible means that its parts are there, and
a tool that then cannot attach says so and goes the next way.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from pathlib import Path

import msgspec

from hwprobe.sysfs import read_text
from hwprobe.tracing.children import ChildFailed, run
from hwprobe.tracing.report import TOOLS, How, Tool

TRACEFS = "/sys/kernel/tracing"
INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, linux/proc_ns.h
CAP_SYS_ADMIN, CAP_PERFMON, CAP_BPF = 21, 38, 39  # linux/capability.h
ASK_S = 30.0

# Mounts tracefs where only this child and its children see it.
PRIVATE_TRACEFS = ("unshare", "--mount", "--propagation", "private", "sh", "-c")
MOUNT = f"mount -t tracefs tracefs {TRACEFS} && "

TRACEPOINTS: dict[Tool, tuple[str, ...]] = {
    "offcpu": ("sched/sched_switch", "sched/sched_process_fork"),
    "runqueue": (
        "sched/sched_switch",
        "sched/sched_wakeup",
        "sched/sched_wakeup_new",
        "sched/sched_process_fork",
    ),
    "syscalls": ("raw_syscalls/sys_enter", "raw_syscalls/sys_exit", "sched/sched_process_fork"),
    "faults": ("sched/sched_process_fork",),  # and the software event of perf
    "retransmits": ("tcp/tcp_retransmit_skb",),
    "stacks": ("sched/sched_process_fork",),  # and a timer
}


class Offer(msgspec.Struct, frozen=True):
    """One way to run one tool."""

    tool: Tool
    how: How
    possible: bool
    detail: str  # what it gives, or why it is not possible


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. A reason is "" where nothing is in the way."""

    release: str
    bpftrace: str = ""  # its version; "" where there is none
    no_bpf: str = ""  # why BPF cannot be used at all
    mount: bool = False  # tracefs has to be mounted first, in a mount namespace of one's own
    tracepoints: frozenset[str] = frozenset()  # of those that the tools want
    kprobes: bool = False
    schedstat: bool = False
    kernel_stacks: bool = False  # of other processes, from /proc
    calls: bool = False  # /proc/PID/syscall is there
    ss: bool = False
    py_spy: str = ""  # its path


def look(proc: Path = Path("/proc")) -> Kernel:
    """Detect; runs bpftrace and py-spy for their versions only."""
    version, no_bpf = _bpftrace()
    no_bpf = no_bpf or _rights(proc) or _namespace(proc)
    mount, tracepoints, kprobes = False, frozenset[str](), False
    if not no_bpf:
        try:
            mount, tracepoints, kprobes = _tracefs()
        except ChildFailed as error:
            no_bpf = f"tracefs is not mounted and cannot be: {error}"
    own = proc / "self"
    return Kernel(
        release=platform.release(),
        bpftrace=version,
        no_bpf=no_bpf,
        mount=mount,
        tracepoints=tracepoints,
        kprobes=kprobes,
        schedstat=len((read_text(own / "schedstat") or "").split()) == 3,
        kernel_stacks=bool(read_text(own / "stack")),
        calls=(own / "syscall").exists(),
        ss=shutil.which("ss") is not None,
        py_spy=shutil.which("py-spy") or _beside_python("py-spy"),
    )


def _bpftrace() -> tuple[str, str]:
    if shutil.which("bpftrace") is None:
        return "", "bpftrace is not installed (apt-get install bpftrace)"
    try:
        words = run(["bpftrace", "--version"], ASK_S)
    except ChildFailed as error:
        return "", str(error)
    match = re.search(r"v?(\d+\.\d+\S*)", words)
    return (match[1] if match else "unknown"), ""


def _beside_python(name: str) -> str:
    """A program of this environment that is not on the path."""
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else ""


def _rights(proc: Path) -> str:
    if os.geteuid() != 0:
        return "bpftrace runs as root only"
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", read_text(proc / "self" / "status") or "", re.MULTILINE)
    held = int(match[1], 16) if match else 0
    if held >> CAP_SYS_ADMIN & 1 or (held >> CAP_BPF & 1 and held >> CAP_PERFMON & 1):
        return ""
    return "this root has neither CAP_SYS_ADMIN nor CAP_BPF and CAP_PERFMON (a container without privileges)"


def _namespace(proc: Path) -> str:
    """BPF programs see the numbers of the host's initial namespace."""
    try:
        own = os.readlink(proc / "self" / "ns" / "pid")
    except OSError:
        return ""
    if own == INITIAL_PID_NAMESPACE:
        return ""
    return "in a container with process numbers of its own, which BPF does not see (run it on the host, or --pid=host)"


def _tracefs() -> tuple[bool, frozenset[str], bool]:
    """Whether it has to be mounted, the wanted tracepoints that exist, and kprobes. Raises ``ChildFailed``."""
    wanted = sorted({name for names in TRACEPOINTS.values() for name in names})
    root = Path(TRACEFS)
    if (root / "events").is_dir():
        found = frozenset(name for name in wanted if (root / "events" / name / "id").exists())
        return False, found, (root / "kprobe_events").exists()
    script = f'{MOUNT}cd {TRACEFS} && for name; do [ ! -e "$name" ] || echo "$name"; done'
    paths = {f"events/{name}/id": name for name in wanted} | {"kprobe_events": ""}
    seen = run([*PRIVATE_TRACEFS, script, "sh", *paths], ASK_S).split()
    return True, frozenset(paths[path] for path in seen if paths.get(path)), "kprobe_events" in seen


def no_bpf_for(kernel: Kernel, tool: Tool) -> str:
    """Why one tool cannot use BPF; "" where it can."""
    if kernel.no_bpf:
        return kernel.no_bpf
    missing = [name for name in TRACEPOINTS[tool] if name not in kernel.tracepoints]
    return f"this kernel has no tracepoint {', '.join(missing)}" if missing else ""


_BPF_GIVES: dict[Tool, str] = {
    "offcpu": "every wait with its kernel stack",
    "runqueue": "every wait: its distribution and the longest of each thread",
    "syscalls": "every call: number, total, longest, distribution",
    "faults": "every fault with its stack",
    "retransmits": "every segment, also of connections that have closed meanwhile",
    "stacks": "99 samples a second of kernel and native frames",
}
_SAMPLING_GIVES: dict[Tool, str] = {
    "offcpu": "waiting times from the kernel's counters (exact), where they were spent from samples",
    "runqueue": "total and mean from the kernel's counters (exact); no distribution",
    "syscalls": "calls that a thread was found in at several looks: their least duration",
    "faults": "numbers from the kernel's counters (exact); no stacks",
    "retransmits": "counters of each open connection (exact), by ss",
    "stacks": "kernel stacks of threads on and off the CPU, by looks",
}


def offers(kernel: Kernel) -> tuple[Offer, ...]:
    """Every way of every tool, the best first."""
    found = []
    for tool in TOOLS:
        if tool == "stacks":
            missing = "py-spy is not installed (pip install py-spy)"
            detail = "Python frames, of Python processes" if kernel.py_spy else missing
            found.append(Offer(tool, "py-spy", bool(kernel.py_spy), detail))
        reason = no_bpf_for(kernel, tool)
        found.append(Offer(tool, "bpf", not reason, reason or _BPF_GIVES[tool]))
        reason = _no_sampling(kernel, tool)
        found.append(Offer(tool, "sampling", not reason, reason or _SAMPLING_GIVES[tool]))
    return tuple(found)


def _no_sampling(kernel: Kernel, tool: Tool) -> str:
    if tool in ("offcpu", "runqueue") and not kernel.schedstat:
        return "this kernel keeps no /proc/PID/schedstat (CONFIG_SCHED_INFO)"
    if tool == "syscalls" and not kernel.calls:
        return "this kernel has no /proc/PID/syscall (CONFIG_HAVE_ARCH_TRACEHOOK)"
    if tool == "retransmits" and not kernel.ss:
        return "ss is not installed (apt-get install iproute2)"
    return ""
