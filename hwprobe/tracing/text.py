"""Reports for a terminal: plain text, without colours.

Invariant: notes come last and are never shortened; tables are, and say by how much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hwprobe.tracing.folded import innermost, ordered
from hwprobe.tracing.kernel import Kernel, Offer
from hwprobe.tracing.report import ABOUT, Bucket, Report

ROWS = 20
STACKS = 12
FRAMES, LETTERS = 4, 110  # of a stack's innermost
BAR = 40


def render(report: Report) -> str:
    """The whole report."""
    blocks = [
        f"{report.tool}: {ABOUT[report.tool]}\n"
        f"by {report.how}, {report.seconds:.1f} s{' (interrupted)' if report.interrupted else ''},"
        f" {_count(report.processes, 'process', 'processes')}, {_count(report.threads, 'thread', 'threads')}"
    ]
    if report.entries:
        blocks.append(_entries(report))
    if report.histogram:
        blocks.append(_histogram(report.histogram))
    if report.folded:
        blocks.append(_stacks(report))
    if not report.entries and not report.folded:
        blocks.append("nothing of that kind happened")
    if report.notes:
        blocks.append("\n".join(f"note: {note}" for note in report.notes))
    return "\n\n".join(blocks)


def _entries(report: Report) -> str:
    columns = list(dict.fromkeys(name for entry in report.entries for name in entry.figures))
    rows = [
        (entry.name, *(_number(entry.figures[name]) if name in entry.figures else "-" for name in columns))
        for entry in report.entries[:ROWS]
    ]
    lines = _table((" ".join(("WHO",)), *(name.upper() for name in columns)), rows)
    return "\n".join([*lines, *_rest(len(report.entries) - ROWS, "rows")])


def _histogram(buckets: Sequence[Bucket]) -> str:
    most = max(bucket.count for bucket in buckets) or 1
    rows = [
        (f">= {_number(bucket.least_ms)} ms", str(bucket.count), "#" * -(-BAR * bucket.count // most))
        for bucket in buckets
    ]
    return "\n".join(_table(("TOOK", "TIMES", ""), rows))


def _stacks(report: Report) -> str:
    total = sum(report.folded.values()) or 1
    scale, unit = (1000, "ms") if report.unit == "us" else (1, report.unit)
    rows = [
        (_number(weight / scale), f"{100 * weight / total:.1f}%", innermost(stack, FRAMES, LETTERS))
        for stack, weight in ordered(report.folded)[:STACKS]
    ]
    lines = _table((unit.upper(), "SHARE", "WHERE"), rows)
    return "\n".join([*lines, *_rest(len(report.folded) - STACKS, "stacks")])


def render_offers(kernel: Kernel, found: Iterable[Offer]) -> str:
    """What this machine offers."""
    rows = [(offer.tool, offer.how, "yes" if offer.possible else "no", offer.detail) for offer in found]
    kprobes = "" if kernel.kprobes or kernel.no_bpf else ", no kprobes (none are used)"
    mount = ", tracefs is mounted privately for each trace" if kernel.mount else ""
    heading = f"Linux {kernel.release}, bpftrace {kernel.bpftrace or 'none'}{mount}{kprobes}"
    return "\n".join([heading, "", *_table(("TOOL", "WAY", "WORKS", "WHAT IT GIVES, OR WHY NOT"), rows)])


def _rest(count: int, what: str) -> list[str]:
    return [f"... and {count} more {what}"] if count > 0 else []


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 or not _right(header[column]) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


def _right(title: str) -> bool:
    """Whether a column holds numbers."""
    return title not in ("WAY", "WORKS", "WHERE", "WHAT IT GIVES, OR WHY NOT", "")


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"
