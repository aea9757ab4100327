"""Overlap of generation and training, by hand."""

from __future__ import annotations

import pytest

from actors.telemetry import Span
from coordinator.observe.overlap import overlap


def span(lane: str, kind: str, start: float, end: float) -> Span:
    return Span(lane=lane, kind=kind, start=start, end=end)


def test_training_inside_a_generation_overlaps_wholly() -> None:
    found = overlap([span("engine-0", "generate", 0, 10), span("trainer", "train", 2, 5)])
    assert (found.generating_s, found.training_s, found.both_s, found.share) == (10, 3, 3, 1.0)


def test_taking_turns_does_not_overlap() -> None:
    turns = [
        span("engine-0", "generate", 0, 2),
        span("trainer", "train", 2, 3),
        span("engine-0", "generate", 3, 5),
        span("trainer", "train", 5, 6),
    ]
    assert overlap(turns).both_s == 0
    assert overlap(turns).share == 0


def test_two_engines_at_once_count_once() -> None:
    spans = [
        span("engine-0", "generate", 0, 4),
        span("engine-1", "generate", 3, 6),
        span("trainer", "train", 2, 5),
        span("trainer", "train", 5.5, 8),
    ]
    found = overlap(spans)  # generating 0-6, training 2-5 and 5.5-8: both in 2-5 and 5.5-6
    assert (found.generating_s, found.training_s, found.both_s) == (6, 5.5, 3.5)
    assert found.share == pytest.approx(3.5 / 5.5)


def test_one_long_generation_meets_every_training() -> None:
    spans = [span("engine-0", "generate", 0, 100)] + [span("trainer", "train", 10 * i, 10 * i + 1) for i in range(10)]
    assert overlap(spans).both_s == 10


def test_other_kinds_do_not_count() -> None:
    spans = [span("engine-0", "evaluate", 0, 10), span("weightsync", "publish", 0, 10), span("trainer", "train", 0, 1)]
    assert overlap(spans).both_s == 0


def test_spans_of_no_length_and_an_empty_run_are_nothing() -> None:
    assert overlap([span("engine-0", "generate", 5, 4), span("trainer", "train", 1, 9)]).both_s == 0
    assert overlap([]).share == 0


def test_order_of_the_spans_does_not_matter() -> None:
    spans = [span("trainer", "train", 4, 6), span("engine-0", "generate", 5, 9), span("engine-0", "generate", 0, 4.5)]
    assert overlap(spans) == overlap(spans[::-1])
    assert overlap(spans).both_s == 1.5
