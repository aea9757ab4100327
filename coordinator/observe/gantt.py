"""The timeline: who did what when, one lane a process.

Invariant: what is drawn is bounded whatever the number of spans (near ones of a kind are joined, and the joint bar is
as opaque as its lane was busy within it), and every bar says what it stands for. Long times in which nobody did
anything, as between the sittings of a resumed run, are cut out and marked.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from actors.telemetry import Span
from coordinator.observe.overlap import Interval, length, union
from coordinator.observe.page import escaped
from coordinator.observe.text import duration, percent

COLOURS = {"generate": 1, "train": 2, "swap": 3, "publish": 4, "evaluate": 5, "reset": 6}
OTHER_COLOUR = 7
LONGEST_IDLE_S = 60.0
WIDTH = 1000.0
MOST_BARS = 4000
MOST_LANES = 40
DETAIL_STEPS = 6


class TimeAxis:
    """Maps seconds since the epoch to 0 ... WIDTH, idle times longer than ``LONGEST_IDLE_S`` cut out."""

    def __init__(self, busy: Sequence[Interval]) -> None:
        """``busy`` is disjoint, ascending and not empty."""
        self.pieces: list[Interval] = []
        for start, end in busy:
            if self.pieces and start - self.pieces[-1][1] <= LONGEST_IDLE_S:
                self.pieces[-1] = (self.pieces[-1][0], end)
            else:
                self.pieces.append((start, end))
        self.seconds = max(length(self.pieces), 1e-6)
        self._starts = [start for start, _ in self.pieces]
        self._before = [0.0, *accumulate(end - start for start, end in self.pieces)]

    def elapsed(self, time: float) -> float:
        """Seconds from the start of the axis, without what was cut out."""
        place = max(0, bisect_right(self._starts, time) - 1)
        start, end = self.pieces[place]
        return self._before[place] + max(0.0, min(time, end) - start)

    def x(self, time: float) -> float:
        return WIDTH * self.elapsed(time) / self.seconds

    def cuts(self) -> list[float]:
        """Where time was cut out, as x."""
        return [self.x(start) for start, _ in self.pieces[1:]]


class Bar(msgspec.Struct, frozen=True):
    """What is drawn: one span, or several of a kind that lie close together."""

    start: float
    end: float
    busy_s: float
    spans: int
    first: Span


def timeline(spans: Sequence[Span]) -> str:
    """The whole run, and below it the last steps enlarged where there are many."""
    spans = sorted((span for span in spans if span.end >= span.start), key=lambda span: span.start)
    if not spans:
        return '<div class="card"><p class="muted">no spans yet</p></div>'
    trained = [span.start for span in spans if span.kind == "train"]
    figures = [_figure("The whole run", spans)]
    if len(trained) >= 2 * DETAIL_STEPS:
        since = trained[-DETAIL_STEPS]
        recent = [msgspec.structs.replace(span, start=max(span.start, since)) for span in spans if span.end > since]
        figures.append(_figure(f"The last {DETAIL_STEPS} steps", recent))
    return "".join(figures)


def joined(spans: Sequence[Span], gap_s: float) -> list[Bar]:
    """Spans of one lane and kind, ascending by start, as bars that are at least ``gap_s`` apart."""
    bars: list[Bar] = []
    first, reach, busy_s, count = spans[0], spans[0].start, 0.0, 0
    for span in spans:
        if span.start - reach >= gap_s:
            bars.append(Bar(first.start, reach, busy_s, count, first))
            first, reach, busy_s, count = span, span.start, 0.0, 0
        if span.end > reach:
            busy_s += span.end - max(span.start, reach)
            reach = span.end
        count += 1
    return [*bars, Bar(first.start, reach, busy_s, count, first)]


def _figure(title: str, spans: Sequence[Span]) -> str:
    axis = TimeAxis(union((span.start, span.end) for span in spans))
    lanes = sorted({span.lane for span in spans}, key=_lane_order)
    kinds = sorted({span.kind for span in spans}, key=lambda kind: (COLOURS.get(kind, OTHER_COLOUR), kind))
    rows_of_bars = min(len({(span.lane, span.kind) for span in spans}), MOST_LANES * len(kinds))
    gap_s = axis.seconds / max(100, min(800, 2 * MOST_BARS // rows_of_bars))
    by_lane: dict[str, list[Span]] = {lane: [] for lane in lanes}
    for span in spans:
        by_lane[span.lane].append(span)
    rows = [_lane(lane, by_lane[lane], axis, gap_s) for lane in lanes[:MOST_LANES]]
    marks = time_ticks(axis.seconds)
    labels = [
        f'<i style="left:{100 * mark / axis.seconds:.2f}%">{_clock(mark, marks[1] if len(marks) > 1 else 1.0)}</i>'
        for mark in marks
    ]
    legend = "".join(
        f'<small class="key" style="--c:var(--c{_colour(kind)})">{escaped(kind)}</small>' for kind in kinds
    )
    notes = [f"{len(lanes) - MOST_LANES} more lanes are in timeline.jsonl"] if len(lanes) > MOST_LANES else []
    if axis.cuts():
        notes.append(f"dashed: idle times longer than {LONGEST_IDLE_S:.0f} s were cut out")
    note = f'<p class="muted">{"; ".join(notes)}</p>' if notes else ""
    return (
        f'<figure class="card"><figcaption>{escaped(title)}{legend}</figcaption><div class="lanes">{"".join(rows)}'
        f'<div class="axis">{"".join(labels)}</div></div>{note}</figure>'
    )


def _lane(lane: str, spans: Sequence[Span], axis: TimeAxis, gap_s: float) -> str:
    kinds: dict[str, list[Span]] = {}
    for span in spans:
        kinds.setdefault(span.kind, []).append(span)
    shortest_last = sorted(kinds, key=lambda kind: -sum(span.end - span.start for span in kinds[kind]))
    bars = [_bar(bar, axis) for kind in shortest_last for bar in joined(kinds[kind], gap_s)]
    cuts = [f'<path class="cut" d="M{x:.1f} 0V10"/>' for x in axis.cuts()]
    busy = length(union((span.start, span.end) for span in spans)) / axis.seconds
    name = escaped(lane)
    return (
        f'<div class="lane"><div class="lane-name" title="{name}">{name}</div>'
        f'<div class="bar"><svg viewBox="0 0 {WIDTH:g} 10" preserveAspectRatio="none" role="img" aria-label="{name}">'
        f'{"".join(bars)}{"".join(cuts)}</svg></div><div class="lane-busy">{percent(busy)}</div></div>'
    )


def _bar(bar: Bar, axis: TimeAxis) -> str:
    left = axis.x(bar.start)
    width = max(2.0, axis.x(bar.end) - left)
    share = bar.busy_s / (bar.end - bar.start) if bar.end > bar.start else 1.0
    opacity = "" if share > 0.99 else f' fill-opacity="{0.25 + 0.75 * share:.2f}"'
    return (
        f'<rect x="{left:.1f}" width="{width:.1f}" height="10" style="--c:var(--c{_colour(bar.first.kind)})"{opacity}>'
        f"<title>{escaped(_described(bar, axis))}</title></rect>"
    )


def _described(bar: Bar, axis: TimeAxis) -> str:
    when = f"at {duration(axis.elapsed(bar.start))}"
    span = bar.first
    if bar.spans > 1:
        return f"{bar.spans} x {span.kind}: {bar.busy_s:.2f} s within {bar.end - bar.start:.2f} s {when}"
    version = f" v{span.version}" if span.version >= 0 else ""
    detail = f": {span.detail}" if span.detail else ""
    return f"{span.kind}{version} {span.end - span.start:.2f} s {when}{detail}"


def time_ticks(seconds: float, most: int = 7) -> list[float]:
    """At most ``most`` + 1 times from 0 on, as far apart as a clock's face would have them."""
    steps = (
        0.01,
        0.02,
        0.05,
        0.1,
        0.2,
        0.5,
        1,
        2,
        5,
        10,
        15,
        30,
        60,
        120,
        300,
        600,
        900,
        1800,
        3600,
        7200,
        14400,
        43200,
    )
    step = next((step for step in steps if seconds / step <= most), 86400.0 * math.ceil(seconds / most / 86400))
    return [index * step for index in range(math.floor(seconds / step + 1e-9) + 1)]


def _clock(seconds: float, step: float) -> str:
    return duration(seconds) if step >= 1 else f"{seconds:.2f} s"


def _colour(kind: str) -> int:
    return COLOURS.get(kind, OTHER_COLOUR)


def _lane_order(lane: str) -> tuple[int, list[tuple[int, str]]]:
    order = {"engine": 0, "env": 1, "reward": 2, "trainer": 3, "weightsync": 4}
    parts = re.findall(r"\d+|\D+", lane)
    return (
        order.get(re.split(r"[-.:/]", lane)[0], 5),
        [(int(part), "") if part.isdigit() else (-1, part) for part in parts],
    )
