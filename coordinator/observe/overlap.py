"""How much of a run's training happened while engines were generating, from the spans of its timeline.

Invariant: a pure function of the spans; time counts once however many lanes are busy at that time.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from actors.telemetry import Span

Interval = tuple[float, float]


class Overlap(msgspec.Struct, frozen=True):
    """Seconds in which at least one lane was busy with it."""

    generating_s: float
    training_s: float
    both_s: float

    @property
    def share(self) -> float:
        """Part of the training time in which engines generated, 0 to 1; 0 where nothing was trained."""
        return self.both_s / self.training_s if self.training_s > 0 else 0.0


def overlap(spans: Iterable[Span], *, generating: str = "generate", training: str = "train") -> Overlap:
    """Compare two kinds of spans. Spans of no length (a clock that was set back) count for nothing."""
    by_kind: dict[str, list[Interval]] = {generating: [], training: []}
    for span in spans:
        if span.kind in by_kind and span.end > span.start:
            by_kind[span.kind].append((span.start, span.end))
    generated, trained = union(by_kind[generating]), union(by_kind[training])
    return Overlap(length(generated), length(trained), length(intersection(generated, trained)))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time as disjoint intervals, ascending."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Points in both; either side is disjoint and ascending, as ``union`` returns it."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: Iterable[Interval]) -> float:
    """Total seconds of disjoint intervals."""
    return sum(end - start for start, end in intervals)
