"""The soak's verdict: what it calls growth, and what not."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.soak import Series, judge, lasting, slope

EVERY_S = 30.0
SAMPLES = 120  # an hour


def series(unit: str, *, an_hour: float, noise: float, start: float = 500.0) -> Series:
    noise_of = random.Random(5)
    seconds = [EVERY_S * index for index in range(SAMPLES)]
    values = [start + an_hour * second / 3600 + noise_of.gauss(0.0, noise) for second in seconds]
    return Series("engine-0 anonymous", unit, seconds, values)


def test_a_slope_without_noise_is_exact() -> None:
    gradient, half = slope([0.0, 1800.0, 3600.0, 7200.0], [1.0, 2.0, 3.0, 5.0])
    assert (gradient, half) == pytest.approx((2.0, 0.0))


def test_an_interval_holds_what_textbook_least_squares_gives_for_independent_noise() -> None:
    """Standard error of a slope: sigma / sqrt(sum of squared distances from the middle), here in hours."""
    made = series("MB", an_hour=40.0, noise=3.0)
    gradient, half = slope(made.seconds, made.values)
    spread = sum((second / 3600 - 59.5 * EVERY_S / 3600) ** 2 for second in made.seconds)
    expected = 1.96 * 3.0 / math.sqrt(spread)
    assert gradient == pytest.approx(40.0, abs=2 * expected)
    assert half == pytest.approx(expected, rel=0.35)


@pytest.mark.parametrize(
    ("unit", "an_hour", "noise", "flat"),
    [
        ("MB", 0.0, 5.0, True),
        ("MB", 4.0, 0.1, True),  # certain, and too little to matter
        ("MB", 60.0, 5.0, False),
        ("MB", -60.0, 5.0, True),
        ("descriptors", 0.0, 0.0, True),
        ("descriptors", 12.0, 0.5, False),
        ("threads", 3.0, 0.3, False),
    ],
)
def test_growth_is_what_is_certain_and_more_than_is_let_pass(
    unit: str, an_hour: float, noise: float, flat: bool
) -> None:
    assert judge(series(unit, an_hour=an_hour, noise=noise), 900.0).flat is flat


def test_a_warm_up_is_left_out() -> None:
    made = series("MB", an_hour=0.0, noise=1.0)
    warm = [
        value + 400.0 if second >= 600.0 else value for second, value in zip(made.seconds, made.values, strict=True)
    ]
    verdict = judge(Series("x", "MB", made.seconds, warm), 900.0)
    assert verdict.flat
    assert verdict.first == pytest.approx(900.0, abs=5.0)


def test_a_process_that_went_before_the_warm_up_was_over_is_not_judged() -> None:
    assert not lasting(Series("reporting anonymous", "MB", [30.0, 60.0], [90.0, 91.0]), warm_up_s=900.0)
    assert lasting(Series("reporting anonymous", "MB", [30.0, 960.0], [90.0, 91.0]), warm_up_s=900.0)
