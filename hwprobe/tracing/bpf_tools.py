"""The tools with BPF, by bpftrace.

Invariant: what threads did in sum is from the kernel's counters, as without BPF; BPF adds what counters do not tell:
stacks, single waits and calls, distributions. What was still going on at the end counts up to the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hwprobe.tracing.bpftrace import Maps, frames, record, split_key
from hwprobe.tracing.children import ChildFailed, Interruption
from hwprobe.tracing.folded import ASLEEP, fold
from hwprobe.tracing.kernel import Kernel
from hwprobe.tracing.looks import Gathered, Looks, ThreadSpan
from hwprobe.tracing.order import Order, Site, finished, gather, queued
from hwprobe.tracing.programs import MOST_PROCESSES, program
from hwprobe.tracing.report import Entry, Report, Tool
from hwprobe.tracing.sampled import Traffic
from hwprobe.tracing.syscall_names import call_name
from hwprobe.tracing.tables import call_rows, cpu_rows, fault_rows, offcpu_rows
from hwprobe.tracing.threads import kernel_stack, waits_in

LOOKS_HZ = 1.0
"""Only to find new threads, and to have counters of those that end."""

SCHEDULER = ("__schedule", "schedule")

Seen = tuple[Maps, Looks, Gathered]


def _record(
    order: Order, site: Site, kernel: Kernel, interruption: Interruption, after: Callable[[], None] = lambda: None
) -> Seen:
    """Run the tool's program beside looks at the threads. Raises ``ChildFailed``."""
    pids = site.targets.look()
    if len(pids) > MOST_PROCESSES:
        raise ChildFailed(f"{len(pids)} processes are more than one program can follow ({MOST_PROCESSES}): name fewer")
    text = program(
        order.tool,
        pids,
        order.seconds,
        children=order.children,
        threshold_us=int(order.threshold_ms * 1000),
    )
    looks = Looks(site.targets, proc=site.proc)
    done: list[Gathered] = []

    def watch(over: Callable[[], bool]) -> None:
        done.append(gather(order, site, "bpf", looks, interruption, rate_hz=LOOKS_HZ, over=over, after=after))

    maps = record(text, kernel, interruption, watch)
    return maps, looks, done[0]


def offcpu(order: Order, site: Site, kernel: Kernel, interruption: Interruption) -> Report:
    maps, looks, gathered = _record(order, site, kernel, interruption)
    spans = looks.spans()
    longest = {int(tid): us for tid, us in maps.table("@longest").items()}
    folded: Counter[str] = Counter()
    for key, us in maps.table("@us").items():
        _, (name, *stacks) = split_key(key, 1)
        folded[fold((name, *_waiting("".join(stacks))))] += us
    for tid, name, stack, us in _unfinished(maps, gathered):
        folded[fold((name, *_waiting(stack)))] += us
        longest[tid] = max(us, longest.get(tid, 0))
    for span in _asleep_throughout(spans, maps):
        found = kernel_stack(span.facts.pid, span.facts.tid, site.proc)
        place = found or (waits_in(span.facts.pid, span.facts.tid, site.proc) or "",)
        folded[fold((span.facts.name, ASLEEP, *place))] += span.blocked_ns // 1000
    return finished(
        order,
        "bpf",
        gathered,
        looks,
        entries=offcpu_rows(spans, longest),
        unit="us",
        folded=folded,
        notes=maps.notes,
    )


def _waiting(stack: str) -> tuple[str, ...]:
    """A stack without the scheduler's own frames, in which every wait ends."""
    found = frames(stack)
    while found and found[-1] in SCHEDULER:
        found = found[:-1]
    return found


def _unfinished(maps: Maps, gathered: Gathered) -> list[tuple[int, str, str, int]]:
    """(thread, name, stack, microseconds) of waits that had not ended."""
    now, names, places = maps.values.get("@now", 0), maps.texts("@who"), maps.texts("@where")
    found = []
    for tid, since in maps.table("@since").items():
        us = min((now - since) // 1000, int(gathered.seconds * 1e6))
        found.append((int(tid), names.get(tid, f"thread {tid}"), places.get(tid, ""), us))
    return found


def _asleep_throughout(spans: list[ThreadSpan], maps: Maps) -> list[ThreadSpan]:
    """Threads that BPF cannot know of, since they never left a CPU while it watched."""
    open_waits = maps.table("@since")
    return [span for span in spans if not span.slices and str(span.facts.tid) not in open_waits]


def runqueue(order: Order, site: Site, kernel: Kernel, interruption: Interruption) -> Report:
    maps, looks, gathered = _record(order, site, kernel, interruption)
    longest_us = {int(tid): us for tid, us in maps.table("@longest").items()}
    waits = maps.histograms.get("@waits", ())
    return queued(order, "bpf", gathered, looks, longest_us, histogram=waits, notes=maps.notes)


def syscalls(order: Order, site: Site, kernel: Kernel, interruption: Interruption) -> Report:
    maps, looks, gathered = _record(order, site, kernel, interruption)
    total, times, longest = (Counter(maps.table(name)) for name in ("@us", "@times", "@longest"))
    slow, slow_us = Counter(maps.table("@slow_times")), Counter(maps.table("@slow"))
    calls = maps.table("@call")
    for tid, name, _, us in _unfinished(maps, gathered):
        key = f"{calls.get(str(tid), -1)},{name}"
        total[key] += us
        times[key] += 1
        longest[key] = max(us, longest[key])
        if us >= order.threshold_ms * 1000:
            slow[key] += 1
            slow_us[key] += us
    rows = []
    for key in total:
        (number,), (name,) = split_key(key, 1)
        figures = {
            "slow": float(slow[key]),
            "calls": float(times[key]),
            "total_ms": total[key] / 1000,
            "longest_ms": longest[key] / 1000,
        }
        rows.append((name, call_name(number), figures))
    folded: Counter[str] = Counter()
    for key, us in slow_us.items():
        (number,), (name,) = split_key(key, 1)
        folded[fold((name, call_name(number)))] += us
    return finished(
        order,
        "bpf",
        gathered,
        looks,
        entries=call_rows(rows, "total_ms"),
        histogram=maps.histograms.get("@waits", ()),
        unit="us",
        folded=folded,
        notes=maps.notes,
    )


def faults(order: Order, site: Site, kernel: Kernel, interruption: Interruption) -> Report:
    maps, looks, gathered = _record(order, site, kernel, interruption)
    folded: Counter[str] = Counter()
    for key, count in maps.table("@faults").items():
        _, (name, *stacks) = split_key(key, 1)
        folded[fold((name, *frames("".join(stacks))))] += count
    return finished(
        order,
        "bpf",
        gathered,
        looks,
        entries=fault_rows(looks.spans(), gathered.seconds),
        unit="faults",
        folded=folded,
        notes=maps.notes,
    )


def retransmits(order: Order, site: Site, kernel: Kernel, interruption: Interruption) -> Report:
    """BPF counts segments of the whole machine; whose they are is known from the connections that ``ss`` shows."""
    traffic = Traffic(site)
    maps, looks, gathered = _record(order, site, kernel, interruption, after=traffic.look)
    ours = {one.name: one for one in traffic.changes()}
    counted: Counter[str] = Counter()
    for key, count in maps.table("@segments").items():
        (source, target), (rest,) = split_key(key, 2)
        local, _, peer = rest.partition(",")
        counted[f"{_address(local, source)} > {_address(peer, target)}"] += count
    mine = {name: count for name, count in counted.items() if name in ours}
    rows = [Entry(name, {"retransmits": float(count)}) for name, count in mine.items()]
    rows.sort(key=lambda row: (-row.figures["retransmits"], row.name))
    others = counted.total() - sum(mine.values())
    if others:
        rows.append(Entry("connections of other processes, or already closed", {"retransmits": float(others)}))
    return finished(
        order,
        "bpf",
        gathered,
        looks,
        entries=tuple(rows),
        unit="segments",
        folded={fold((ours[name].local, ours[name].peer)): count for name, count in mine.items()},
        notes=(*maps.notes, *traffic.notes()),
    )


def _address(address: str, port: int) -> str:
    """As ``ss`` spells it."""
    address = address.removeprefix("::ffff:") if "." in address else address
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def stacks(order: Order, site: Site, kernel: Kernel, interruption: Interruption) -> Report:
    maps, looks, gathered = _record(order, site, kernel, interruption)
    folded: Counter[str] = Counter()
    for key, count in maps.table("@cpu").items():
        _, (name, *stacks) = split_key(key, 1)
        folded[fold((name, *(frame for stack in stacks for frame in frames(stack))))] += count
    return finished(
        order,
        "bpf",
        gathered,
        looks,
        entries=cpu_rows(looks.spans()),
        unit="samples",
        folded=folded,
        notes=maps.notes,
    )


WAYS: dict[Tool, Callable[[Order, Site, Kernel, Interruption], Report]] = {
    "offcpu": offcpu,
    "runqueue": runqueue,
    "syscalls": syscalls,
    "faults": faults,
    "retransmits": retransmits,
    "stacks": stacks,
}
