"""The timeline joins, cuts and orders; values by hand."""

from __future__ import annotations

import re

import pytest

from actors.telemetry import Span
from coordinator.observe.gantt import TimeAxis, joined, time_ticks, timeline


def span(lane: str, kind: str, start: float, end: float, version: int = -1) -> Span:
    return Span(lane=lane, kind=kind, start=start, end=end, version=version)


def test_near_spans_are_joined_and_remember_how_busy_they_were() -> None:
    spans = [
        span("t", "train", 0, 1),
        span("t", "train", 1.5, 2),
        span("t", "train", 1.8, 3),
        span("t", "train", 9, 10),
    ]
    bars = joined(spans, gap_s=1.0)
    assert [(bar.start, bar.end, bar.busy_s, bar.spans) for bar in bars] == [(0, 3, 2.5, 3), (9, 10, 1.0, 1)]


def test_a_span_inside_another_adds_nothing() -> None:
    (bar,) = joined([span("t", "train", 0, 10), span("t", "train", 2, 3), span("t", "train", 9, 12)], gap_s=0.5)
    assert (bar.end, bar.busy_s, bar.spans) == (12, 12, 3)


def test_spans_further_apart_than_the_gap_stay_alone() -> None:
    assert len(joined([span("t", "train", n, n + 0.5) for n in range(5)], gap_s=0.5)) == 5


def test_a_day_between_two_sittings_is_cut_out() -> None:
    axis = TimeAxis([(1000.0, 1060.0), (90_000.0, 90_040.0)])
    assert axis.seconds == 100
    assert [axis.elapsed(time) for time in (1000, 1030, 1060, 50_000, 90_000, 90_020, 90_040)] == [
        0, 30, 60, 60, 60, 80, 100,
    ]  # fmt: skip
    assert axis.cuts() == [600]


def test_a_pause_of_a_minute_is_not_cut_out() -> None:
    axis = TimeAxis([(0.0, 10.0), (70.0, 80.0)])
    assert (axis.seconds, axis.cuts()) == (80, [])


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.35, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35]),
        (6, [0, 1, 2, 3, 4, 5, 6]),
        (95, [0, 15, 30, 45, 60, 75, 90]),
        (3000, [0, 600, 1200, 1800, 2400, 3000]),
        (1_000_000, [0, 172_800, 345_600, 518_400, 691_200, 864_000]),
    ],
)
def test_time_ticks_are_those_of_a_clock(seconds: float, expected: list[float]) -> None:
    assert time_ticks(seconds) == pytest.approx(expected)


def test_lanes_are_engines_first_and_in_the_order_of_their_numbers() -> None:
    names = ["weightsync", "trainer", "engine-10", "monitor", "engine-2", "env"]
    html = timeline([span(name, "generate", 0, 1) for name in names])
    assert re.findall(r'lane-name" title="([^"]+)"', html) == [
        "engine-2", "engine-10", "env", "trainer", "weightsync", "monitor",
    ]  # fmt: skip


def test_a_bar_lies_where_its_span_was_and_says_what_it_is() -> None:
    html = timeline([span("engine-0", "generate", 100, 104), span("trainer", "train", 101, 102, version=7)])
    assert (
        '<rect x="250.0" width="250.0" height="10" style="--c:var(--c2)"><title>train v7 1.00 s at 0:01</title>' in html
    )
    assert '<div class="lane-busy">25%</div>' in html


def test_a_joint_bar_is_as_opaque_as_its_lane_was_busy() -> None:
    dense = [span("trainer", "train", n / 1000, n / 1000 + 0.0004) for n in range(100_000)]
    html = timeline([*dense, span("engine-0", "generate", 0, 100)])
    whole_run = html[: html.index("The last 6 steps")]
    opacities = re.findall(r'fill-opacity="([\d.]+)"', whole_run)
    assert opacities == ["0.55"]  # 0.25 + 0.75 * 0.4
    assert "100000 x train: 40.00 s within 100.00 s at 0:00" in whole_run


def test_the_last_steps_are_enlarged_once_there_are_many() -> None:
    steps = [span("trainer", "train", n, n + 0.5, version=n + 1) for n in range(12)]
    assert "The last 6 steps" not in timeline(steps[:11])
    detail = timeline(steps).partition("The last 6 steps")[2]
    assert re.findall(r"train v(\d+)", detail) == ["7", "8", "9", "10", "11", "12"]


def test_more_lanes_than_fit_are_counted() -> None:
    html = timeline([span(f"engine-{n}", "generate", 0, 1) for n in range(45)])
    assert html.count('class="lane"') == 40
    assert "5 more lanes are in timeline.jsonl" in html


def test_spans_of_a_clock_that_was_set_back_are_left_out() -> None:
    assert "no spans yet" in timeline([span("trainer", "train", 5, 4)])
    assert "<rect" in timeline([span("trainer", "train", 5, 5)])
