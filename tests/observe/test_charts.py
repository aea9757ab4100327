"""Ticks, thinning and scales, by hand."""

from __future__ import annotations

import math

import pytest

from coordinator.observe.charts import thinned, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (0.0, 100.0, [0, 50, 100]),
        (-0.07, 0.05, [-0.05, 0.0, 0.05]),
        (1587.0, 2130.0, [1600, 1800, 2000]),
        (3.0, 3.0, [3.0]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 4) == pytest.approx(expected)


def test_whole_ticks_never_split_a_step() -> None:
    assert ticks(1.0, 3.0, 6, whole=True) == [1.0, 2.0, 3.0]


def test_few_points_are_drawn_as_they_are() -> None:
    points = [(float(n), 1.0) for n in range(400)]
    assert thinned(points) == (points, None)


def test_many_points_become_means_within_the_band_of_their_extremes() -> None:
    points = [(float(n), float(n % 10)) for n in range(4000)]
    means, band = thinned(points, buckets=4)
    assert means == [(999.0, 4.5), (1999.0, 4.5), (2999.0, 4.5), (3999.0, 4.5)]
    assert band is not None
    assert (band.low[0], band.high[0]) == ((999.0, 0.0), (999.0, 9.0))


def test_a_spike_and_a_gap_survive_thinning() -> None:
    values = [1.0] * 1000 + [math.nan] * 1000 + [1.0] * 999 + [50.0] + [1.0] * 1000
    means, band = thinned([(float(n), value) for n, value in enumerate(values)], buckets=40)
    assert [math.isnan(y) for _, y in means] == [False] * 10 + [True] * 10 + [False] * 20
    assert band is not None
    assert max(y for _, y in band.high) == 50.0
