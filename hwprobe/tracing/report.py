"""What a tool found, as plain facts.

Invariant: ``how`` and ``notes`` say where every figure comes from and what is missing; times are milliseconds, the
weights of stacks are in ``unit``.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Tool = Literal["offcpu", "runqueue", "syscalls", "faults", "retransmits", "stacks"]
TOOLS: tuple[Tool, ...] = get_args(Tool)

How = Literal["bpf", "py-spy", "sampling"]
"""``sampling``: the kernel's counters before and after, and looks at the threads in between."""

ABOUT: dict[Tool, str] = {
    "offcpu": "where threads wait, and for how long",
    "runqueue": "how long threads that could run wait for a CPU",
    "syscalls": "system calls that take long",
    "faults": "page faults",
    "retransmits": "TCP segments that were sent again",
    "stacks": "where CPU time goes: stacks, of Python too with py-spy",
}


class Entry(msgspec.Struct, frozen=True):
    """A row of the table: a thread, a process, a call or a connection."""

    name: str
    figures: dict[str, float]


class Bucket(msgspec.Struct, frozen=True):
    """How often something took at least ``least_ms`` and less than that of the next bucket."""

    least_ms: float
    count: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One tool's findings over ``seconds``."""

    tool: Tool
    how: How
    seconds: float
    processes: int  # that were watched, those that came later included
    threads: int
    entries: tuple[Entry, ...] = ()  # the largest first
    histogram: tuple[Bucket, ...] = ()
    unit: str = ""  # of the weights of ``folded``
    folded: dict[str, int] = {}  # outermost frame first, joined by ";" -> weight
    interrupted: bool = False  # ended before its time by Ctrl-C or SIGTERM
    notes: tuple[str, ...] = ()
