"""One thread at one moment, from ``/proc``.

Invariant: a thread that has gone, or a file that is not ours to read, is None; nothing is guessed.

Sources: Documentation/filesystems/proc.rst (``stat``, ``wchan``, ``syscall``, ``stack``) and
Documentation/scheduler/sched-stats.rst: ``/proc/PID/schedstat`` holds the nanoseconds spent on the CPU, those spent
waiting in a run queue, and the number of times that the thread was put on a CPU.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from hwprobe.sysfs import read_text
from hwprobe.tracing.targets import stat_fields

TICKS = os.sysconf("SC_CLK_TCK")
FRAME = re.compile(r"^\[<[0-9a-fx]+>\]\s+([^\s+]+)")


class ThreadFacts(msgspec.Struct, frozen=True, gc=False):
    """Counters since the thread began."""

    pid: int
    tid: int
    name: str
    state: str  # R running or runnable, S sleeping, D waiting without being interruptible, ...
    run_ns: int
    wait_ns: int  # in a run queue
    slices: int  # times that it got a CPU
    minor_faults: int
    major_faults: int
    started_s: float  # since boot

    @property
    def label(self) -> str:
        return f"{self.name} {self.pid}" if self.pid == self.tid else f"{self.name} {self.pid}/{self.tid}"


def read_thread(pid: int, tid: int, proc: Path) -> ThreadFacts | None:
    """None where it has gone. Without schedstat the CPU time is that of ``stat`` (ticks), and waiting is unknown: 0."""
    folder = proc / str(pid) / "task" / str(tid)
    text = read_text(folder / "stat")
    fields = stat_fields(text)
    if text is None or fields is None:
        return None
    schedstat = (read_text(folder / "schedstat") or "").split()
    if len(schedstat) == 3:
        run_ns, wait_ns, slices = (int(number) for number in schedstat)
    else:
        run_ns, wait_ns, slices = (int(fields[11]) + int(fields[12])) * 1_000_000_000 // TICKS, 0, 0
    name = text.partition("(")[2].rpartition(")")[0]
    return ThreadFacts(
        pid,
        tid,
        name,
        fields[0],
        run_ns,
        wait_ns,
        slices,
        int(fields[7]),
        int(fields[9]),
        int(fields[19]) / TICKS,
    )


def threads_of(pid: int, proc: Path) -> list[int]:
    """Numbers of a process's threads; none where it has gone."""
    try:
        return [int(entry) for entry in os.listdir(proc / str(pid) / "task")]
    except OSError:
        return []


def kernel_stack(pid: int, tid: int, proc: Path) -> tuple[str, ...] | None:
    """Where a thread is in the kernel, outermost first; None where that may not be read (it takes CAP_SYS_ADMIN)."""
    try:
        lines = (proc / str(pid) / "task" / str(tid) / "stack").read_text().splitlines()
    except OSError:
        return None
    frames = [match[1] for match in map(FRAME.match, lines) if match is not None]
    return tuple(reversed(frames)) or None


def waits_in(pid: int, tid: int, proc: Path) -> str | None:
    """The kernel function that a thread sleeps in; None where it does not, or the kernel does not say."""
    text = read_text(proc / str(pid) / "task" / str(tid) / "wchan")
    return None if text in (None, "", "0") else text


def call_of(pid: int, tid: int, proc: Path) -> tuple[int, str] | None:
    """Number and arguments of the system call that a thread is blocked in; None where it is in none. Raises
    ``PermissionError`` where it may not be read (it takes the right to ptrace)."""
    try:
        words = (proc / str(pid) / "task" / str(tid) / "syscall").read_text().split()
    except PermissionError:
        raise
    except OSError:
        return None
    if len(words) < 9 or words[0] == "-1":  # "running", or blocked outside of a call (a page fault)
        return None
    return int(words[0]), " ".join(words[1:7])
