"""Plain text for people: columns that line up, numbers that read."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, nothing: str) -> str:
    """Columns under a head; numbers to the right. ``nothing``: what to say where there are no rows."""
    if not rows:
        return nothing
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(head[column]), *(len(row[column]) for row in texts)) for column in range(len(head))]
    right = [all(isinstance(row[column], int | float | None) for row in rows) for column in range(len(head))]
    lines = [head, *texts]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_the_right else cell.ljust(width)
            for cell, width, to_the_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def seconds(value: float | None) -> str:
    """Three digits with a unit: 830 us, 12.0 ms, 4.20 s."""
    if value is None:
        return "-"
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if value * factor < 1000:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s"


def size(value: float) -> str:
    """1.5 MiB and the like."""
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def quantile(counts: Sequence[int], bounds_s: Sequence[float], share: float) -> str:
    """The upper bound of the bucket in which that share of a histogram is reached; "-" for an empty one."""
    total = sum(counts)
    if not total:
        return "-"
    reached = 0
    for count, bound in zip(counts, bounds_s, strict=False):
        reached += count
        if reached >= share * total:
            return f"<{seconds(bound)}"
    return f">{seconds(bounds_s[-1])}"


def counted(counts: dict[str, int], *, nothing: str = "none") -> str:
    """ "stale 3, env_failed 1" """
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or nothing
