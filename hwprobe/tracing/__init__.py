"""Where the time of a node's processes goes: off the CPU, in the run queue, in slow calls, page faults, retransmits.

    bin/trace check                             what this kernel offers, tool by tool
    bin/trace offcpu --run runs/latest          every process of a run, for ten seconds
    bin/trace stacks --pid 4711 --svg out.svg   a flame graph of one process and its children

Invariant: how a figure was come by is said with it. What the kernel does not offer is named and left out, never
estimated as if it had been measured. BPF (bpftrace) is used where it attaches, else the kernel's own counters
(``/proc/PID/schedstat``, ``stat``, ``tcp_info``), which are exact, and looks at what threads wait for: samples.
"""

from hwprobe.tracing.report import Bucket, Entry, How, Report, Tool

__all__ = ["Bucket", "Entry", "How", "Report", "Tool"]
