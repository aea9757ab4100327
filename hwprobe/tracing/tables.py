"""Rows of reports from threads' counters.

Invariant: rows are ordered by what the tool is about, the largest first; a row that would hold nothing but zeros is
left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hwprobe.tracing.looks import ThreadSpan
from hwprobe.tracing.report import Entry
from hwprobe.tracing.syscall_names import WAITING


def ms(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 3)


def offcpu_rows(spans: Sequence[ThreadSpan], longest_us: Mapping[int, int] | None = None) -> tuple[Entry, ...]:
    """Each thread's time: waiting for something, waiting for a CPU, running. Those that only slept come last."""
    rows = []
    for span in spans:
        figures = {"waited_ms": ms(span.blocked_ns), "in_queue_ms": ms(span.wait_ns), "ran_ms": ms(span.run_ns)}
        if longest_us is not None and span.facts.tid in longest_us:
            figures["longest_ms"] = longest_us[span.facts.tid] / 1000
        rows.append(Entry(span.facts.label, figures))
    asleep = {span.facts.label for span in spans if not span.slices}
    return tuple(sorted(_by(rows, "waited_ms"), key=lambda row: row.name in asleep))


def runqueue_rows(spans: Iterable[ThreadSpan], longest_us: Mapping[int, int] | None = None) -> tuple[Entry, ...]:
    """Each thread's waits for a CPU."""
    rows = []
    for span in spans:
        if not span.slices and not span.wait_ns:
            continue
        figures = {
            "waited_ms": ms(span.wait_ns),
            "times": float(span.slices),
            "mean_ms": ms(span.wait_ns / max(1, span.slices)),
            "share_percent": round(100 * span.wait_ns / max(1, span.wall_ns), 1),
            "ran_ms": ms(span.run_ns),
        }
        if longest_us is not None and span.facts.tid in longest_us:
            figures["longest_ms"] = longest_us[span.facts.tid] / 1000
        rows.append(Entry(span.facts.label, figures))
    return _by(rows, "waited_ms")


def fault_rows(spans: Iterable[ThreadSpan], seconds: float) -> tuple[Entry, ...]:
    """Each process's page faults."""
    minor: Counter[int] = Counter()
    major: Counter[int] = Counter()
    names: dict[int, str] = {}
    for span in spans:
        pid = span.facts.pid
        minor[pid] += span.minor_faults
        major[pid] += span.major_faults
        if span.facts.tid == pid or pid not in names:
            names[pid] = span.facts.name
    rows = [
        Entry(
            f"{names[pid]} {pid}",
            {
                "faults": float(minor[pid] + major[pid]),
                "from_disk": float(major[pid]),
                "per_s": round((minor[pid] + major[pid]) / max(seconds, 1e-9), 1),
            },
        )
        for pid in names
        if minor[pid] + major[pid]
    ]
    return _by(rows, "faults")


def call_rows(rows: Iterable[tuple[str, str, dict[str, float]]], total: str) -> tuple[Entry, ...]:
    """(thread's name, call, figures): calls that are made in order to wait come last."""
    ordered = sorted(rows, key=lambda row: (row[1] in WAITING, -row[2][total], row[0], row[1]))
    return tuple(Entry(f"{name} {call}", figures) for name, call, figures in ordered)


def cpu_rows(spans: Iterable[ThreadSpan]) -> tuple[Entry, ...]:
    """Each thread's CPU time."""
    rows = [
        Entry(
            span.facts.label,
            {"ran_ms": ms(span.run_ns), "share_percent": round(100 * span.run_ns / max(1, span.wall_ns), 1)},
        )
        for span in spans
        if span.run_ns
    ]
    return _by(rows, "ran_ms")


def _by(rows: list[Entry], figure: str) -> tuple[Entry, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.figures[figure], row.name)))
