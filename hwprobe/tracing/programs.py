"""The bpftrace programs.

Invariant: each follows the given processes and what they fork, ends by itself ``SPARE_S`` after its time (should its
tracer be gone), says ``ready`` once it is attached, and prints only maps that its reader in ``bpf_tools`` knows. Keys
begin with numbers and end with what may hold commas: a thread's name, then a stack.

``pid`` is a process, ``tid`` a thread. In ``sched_switch`` the current thread is the one that leaves the CPU, so its
stack says what it waits for; it is kept until the thread comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

from hwprobe.tracing.report import Tool

SPARE_S = 60
MOST_PROCESSES = 400
"""Each is an instruction or twenty in a program of limited length."""

READY = "ready"

RUNNABLE = "(args->prev_state & 0xff) == 0"
"""``sched_switch`` reports 0 or TASK_REPORT_MAX (0x100) for a thread that was preempted."""


def program(tool: Tool, pids: Sequence[int], seconds: float, *, children: bool, threshold_us: int) -> str:
    """The text for bpftrace."""
    body, kept = _BODIES[tool]
    cleared = "".join(f"clear({name}); " for name in ("@watched", "@told", *kept))
    watched = " ".join(f"@watched[{pid}] = 1;" for pid in pids)
    fork = "tracepoint:sched:sched_process_fork /@watched[pid]/ { @watched[args->child_pid] = 1; }\n"
    return (
        f"BEGIN {{ {watched} }}\n"
        f"{fork if children else ''}"
        f"{body.replace('THRESHOLD', str(threshold_us))}"
        f'interval:ms:100 {{ if (@told == 0) {{ @told = 1; printf("{READY}\\n"); }} }}\n'
        f"interval:s:{int(seconds) + SPARE_S} {{ exit(); }}\n"
        f"END {{ @now = nsecs; {cleared}}}\n"
    )


_OFFCPU = (
    f"""
tracepoint:sched:sched_switch {{
    if (@watched[pid] && !({RUNNABLE})) {{ @since[tid] = nsecs; @where[tid] = kstack(32); @who[tid] = comm; }}
    $since = @since[args->next_pid];
    if ($since) {{
        @us[args->next_pid, args->next_comm, @where[args->next_pid]] = sum((nsecs - $since) / 1000);
        @longest[args->next_pid] = max((nsecs - $since) / 1000);
        delete(@since[args->next_pid]);
    }}
}}
""",
    (),
)

_RUNQUEUE = (
    f"""
tracepoint:sched:sched_wakeup, tracepoint:sched:sched_wakeup_new /@mine[args->pid]/ {{ @queued[args->pid] = nsecs; }}
tracepoint:sched:sched_switch {{
    if (@watched[pid]) {{
        @mine[tid] = 1;
        if ({RUNNABLE}) {{ @queued[tid] = nsecs; }}
    }}
    $since = @queued[args->next_pid];
    if ($since) {{
        $us = (nsecs - $since) / 1000;
        @waits = hist($us);
        @longest[args->next_pid] = max($us);
        delete(@queued[args->next_pid]);
    }}
}}
""",
    ("@mine", "@queued"),
)

_SYSCALLS = (
    """
tracepoint:raw_syscalls:sys_enter /@watched[pid]/ { @since[tid] = nsecs; @call[tid] = args->id; @who[tid] = comm; }
tracepoint:raw_syscalls:sys_exit /@since[tid]/ {
    $us = (nsecs - @since[tid]) / 1000;
    @us[args->id, comm] = sum($us);
    @times[args->id, comm] = count();
    @longest[args->id, comm] = max($us);
    if ($us >= THRESHOLD) { @slow[args->id, comm] = sum($us); @slow_times[args->id, comm] = count(); }
    @waits = hist($us);
    delete(@since[tid]);
}
""",
    (),
)

_FAULTS = (
    """
software:page-faults:1 /@watched[pid]/ { @faults[pid, comm, ustack(16)] = count(); }
""",
    (),
)

_RETRANSMITS = (
    """
tracepoint:tcp:tcp_retransmit_skb {
    @segments[args->sport, args->dport, ntop(args->saddr_v6), ntop(args->daddr_v6)] = count();
}
""",
    (),
)

_STACKS = (
    """
profile:hz:99 /@watched[pid]/ { @cpu[pid, comm, ustack(48), kstack(48)] = count(); }
""",
    (),
)

_BODIES: dict[Tool, tuple[str, tuple[str, ...]]] = {
    "offcpu": _OFFCPU,
    "runqueue": _RUNQUEUE,
    "syscalls": _SYSCALLS,
    "faults": _FAULTS,
    "retransmits": _RETRANSMITS,
    "stacks": _STACKS,
}
