"""The tools without BPF: the kernel's counters before and after, and looks at the threads in between.

Invariant: totals of time and numbers of faults and segments are the kernel's and exact; what is a sample (where a
thread waits, which call it is in) is called so in the report's notes, and a duration that is only known to be at
least so long is named ``..._at_least_ms``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from hwprobe.tracing.children import ChildFailed, Interruption
from hwprobe.tracing.folded import ASLEEP, fold
from hwprobe.tracing.looks import Looks, ThreadSpan, now_ns
from hwprobe.tracing.order import Order, Site, finished, gather, queued
from hwprobe.tracing.report import Entry, Report, Tool
from hwprobe.tracing.sockets import Connection, Meter, connections, sent_segments
from hwprobe.tracing.syscall_names import call_name
from hwprobe.tracing.tables import call_rows, cpu_rows, fault_rows, ms, offcpu_rows
from hwprobe.tracing.threads import ThreadFacts, call_of, kernel_stack, waits_in

COUNTERS_HZ = 1.0  # where only counters are read: new threads and connections are found so often
NOT_SEEN = "(never seen waiting)"


class Waits:
    """Where threads were seen to wait, to be scaled to how long they did."""

    def __init__(self, site: Site) -> None:
        self._proc = site.proc
        self._weights: dict[tuple[int, int], Counter[str]] = {}
        self.stackless = 0  # looks at which the stack was not ours to read

    def visit(self, facts: ThreadFacts, passed_ns: int) -> None:
        if facts.state not in "SDI":
            return
        stack = kernel_stack(facts.pid, facts.tid, self._proc)
        if stack is None:
            self.stackless += 1
            stack = (waits_in(facts.pid, facts.tid, self._proc) or "(the kernel does not say where)",)
        weights = self._weights.setdefault((facts.pid, facts.tid), Counter())
        weights[fold(stack)] += passed_ns

    def folded(self, spans: list[ThreadSpan]) -> dict[str, int]:
        """Microseconds."""
        stacks: Counter[str] = Counter()
        for span in spans:
            weights = self._weights.get((span.facts.pid, span.facts.tid))
            if not weights or not weights.total():
                weights = Counter({NOT_SEEN: 1})
            total = weights.total()
            asleep = () if span.slices else (ASLEEP,)
            for stack, weight in weights.items():
                stacks[fold((span.facts.name, *asleep, *stack.split(";")))] += span.blocked_ns * weight // total // 1000
        return {stack: weight for stack, weight in stacks.items() if weight}

    def notes(self) -> tuple[str, ...]:
        if not self.stackless:
            return ()
        return ("kernel stacks take root: at some looks only the function that a thread sleeps in is known",)


def offcpu(order: Order, site: Site, interruption: Interruption) -> Report:
    waits = Waits(site)
    looks = Looks(site.targets, waits.visit, site.proc)
    gathered = gather(order, site, "sampling", looks, interruption, rate_hz=order.rate_hz)
    spans = looks.spans()
    return finished(
        order,
        "sampling",
        gathered,
        looks,
        entries=offcpu_rows(spans),
        unit="us",
        folded=waits.folded(spans),
        notes=(f"times are the kernel's counters; where it was spent is from {gathered.looks} looks", *waits.notes()),
    )


def runqueue(order: Order, site: Site, interruption: Interruption) -> Report:
    looks = Looks(site.targets, proc=site.proc)
    gathered = gather(order, site, "sampling", looks, interruption, rate_hz=COUNTERS_HZ)
    note = "totals are the kernel's counters; single waits, and with them the longest, are not known"
    return queued(order, "sampling", gathered, looks, notes=(note,))


def faults(order: Order, site: Site, interruption: Interruption) -> Report:
    looks = Looks(site.targets, proc=site.proc)
    gathered = gather(order, site, "sampling", looks, interruption, rate_hz=COUNTERS_HZ)
    spans = looks.spans()
    folded: Counter[str] = Counter()
    for span in spans:
        folded[fold((span.facts.name, "read from disk"))] += span.major_faults
        folded[fold((span.facts.name, "without a disk"))] += span.minor_faults
    return finished(
        order,
        "sampling",
        gathered,
        looks,
        entries=fault_rows(spans, gathered.seconds),
        unit="faults",
        folded=folded,
        notes=("numbers are the kernel's counters; what touched the pages is not known",),
    )


class _Call(msgspec.Struct):
    """A call that a thread was found in."""

    number: int
    words: str  # its arguments
    slices: int  # of the thread: it has not run since
    first_ns: int
    last_ns: int
    name: str

    @property
    def lasted_ns(self) -> int:
        return self.last_ns - self.first_ns


class Calls:
    """System calls that threads were found in at two looks or more, without having run in between."""

    def __init__(self, site: Site, threshold_ms: float) -> None:
        self._proc = site.proc
        self._threshold_ns = threshold_ms * 1e6
        self._open: dict[int, _Call] = {}
        self._lasted: dict[tuple[str, str], list[int]] = {}
        self.denied = 0

    def visit(self, facts: ThreadFacts, passed_ns: int) -> None:
        try:
            found = call_of(facts.pid, facts.tid, self._proc) if facts.state != "R" else None
        except PermissionError:
            self.denied += 1
            return
        now, call = now_ns(), self._open.get(facts.tid)
        if found is not None and call is not None and (call.number, call.words, call.slices) == (*found, facts.slices):
            call.last_ns = now
            return
        self._close(facts.tid)
        if found is not None:
            self._open[facts.tid] = _Call(*found, facts.slices, now, now, facts.name)

    def _close(self, tid: int) -> None:
        call = self._open.pop(tid, None)
        if call is not None and call.lasted_ns > 0:
            self._lasted.setdefault((call.name, call_name(call.number)), []).append(call.lasted_ns)

    def finish(self) -> dict[tuple[str, str], list[int]]:
        """(thread's name, call) -> how long each lasted at least, in nanoseconds, of those that were slow."""
        for tid in list(self._open):
            self._close(tid)
        slow = {key: [one for one in lasted if one >= self._threshold_ns] for key, lasted in self._lasted.items()}
        return {key: lasted for key, lasted in slow.items() if lasted}


def syscalls(order: Order, site: Site, interruption: Interruption) -> Report:
    calls = Calls(site, order.threshold_ms)
    looks = Looks(site.targets, calls.visit, site.proc)
    gathered = gather(order, site, "sampling", looks, interruption, rate_hz=order.rate_hz)
    if calls.denied and not calls.finish():
        raise ChildFailed("/proc/PID/syscall may not be read: it takes root, or the right to ptrace the processes")
    found = calls.finish()
    rows = [
        (
            name,
            call,
            {
                "slow": float(len(lasted)),
                "total_at_least_ms": ms(sum(lasted)),
                "longest_at_least_ms": ms(max(lasted)),
            },
        )
        for (name, call), lasted in found.items()
    ]
    between_ms = 1000 * gathered.seconds / max(1, gathered.looks)
    notes = [f"durations are from looks {between_ms:.0f} ms apart: calls much shorter than that are not seen"]
    if calls.denied:
        notes.append("calls of some processes may not be read: it takes root")
    return finished(
        order,
        "sampling",
        gathered,
        looks,
        entries=call_rows(rows, "total_at_least_ms"),
        unit="us",
        folded={fold(key): sum(lasted) // 1000 for key, lasted in found.items()},
        notes=tuple(notes),
    )


class Traffic:
    """The connections of the traced processes while they are traced."""

    def __init__(self, site: Site) -> None:
        """Raises ``ChildFailed``."""
        self._site = site
        self._meter = Meter(connections(site.targets.look(), site.proc))
        self._sent = sent_segments(self._pid(), site.proc)
        self.failures: Counter[str] = Counter()

    def _pid(self) -> int:
        return min(self._site.targets.seen, default=0)

    def look(self) -> None:
        try:
            self._meter.look(connections(self._site.targets.look(), self._site.proc))
        except ChildFailed as error:
            self.failures[str(error)] += 1

    def changes(self) -> list[Connection]:
        return self._meter.changes()

    def rows(self) -> tuple[Entry, ...]:
        """Connections on which something was sent again, and all TCP of the first process's network namespace."""
        rows = [_row(one.name, one.retransmits, one.segments_out) for one in self.changes() if one.retransmits]
        rows.sort(key=lambda row: (-row.figures["retransmits"], row.name))
        now = sent_segments(self._pid(), self._site.proc)
        if self._sent is not None and now is not None:
            rows.append(_row("all of the machine (or container)", now[1] - self._sent[1], now[0] - self._sent[0]))
        return tuple(rows)

    def notes(self) -> tuple[str, ...]:
        return tuple(f"{count} looks at the connections failed: {reason}" for reason, count in self.failures.items())


def _row(name: str, again: int, sent: int) -> Entry:
    share = round(100 * again / max(1, sent), 2)
    return Entry(name, {"retransmits": float(again), "segments": float(sent), "share_percent": share})


def retransmits(order: Order, site: Site, interruption: Interruption) -> Report:
    traffic = Traffic(site)
    looks = Looks(site.targets, proc=site.proc)
    gathered = gather(order, site, "sampling", looks, interruption, rate_hz=COUNTERS_HZ, after=traffic.look)
    return finished(
        order,
        "sampling",
        gathered,
        looks,
        entries=traffic.rows(),
        unit="segments",
        folded={fold((one.local, one.peer)): one.retransmits for one in traffic.changes() if one.retransmits},
        notes=("connections that opened and closed between two looks are missing", *traffic.notes()),
    )


def stacks(order: Order, site: Site, interruption: Interruption) -> Report:
    waits = Waits(site)
    looks = Looks(site.targets, waits.visit, site.proc)
    gathered = gather(order, site, "sampling", looks, interruption, rate_hz=order.rate_hz)
    spans = looks.spans()
    folded = Counter(waits.folded(spans))
    for span in spans:
        folded[fold((span.facts.name, "(on a CPU)"))] += span.run_ns // 1000
        folded[fold((span.facts.name, "(in the run queue)"))] += span.wait_ns // 1000
    return finished(
        order,
        "sampling",
        gathered,
        looks,
        entries=cpu_rows(spans),
        unit="us",
        folded=folded,
        notes=("the programs' own frames are not known; waiting threads have their kernel stacks", *waits.notes()),
    )


WAYS: dict[Tool, Callable[[Order, Site, Interruption], Report]] = {
    "offcpu": offcpu,
    "runqueue": runqueue,
    "syscalls": syscalls,
    "faults": faults,
    "retransmits": retransmits,
    "stacks": stacks,
}
