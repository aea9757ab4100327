"""The bound of a step's gradient: worked out by hand from where it starts, where it ends, and over how many steps."""

from __future__ import annotations

import pytest

from actors.settings import TrainSettings
from actors.trainer.stability import clip_threshold


@pytest.mark.parametrize(
    ("version", "threshold"),
    [(0, 2.0), (1, 1.975), (10, 1.75), (20, 1.5), (39, 1.025), (40, 1.0), (41, 1.0), (999, 1.0)],
)
def test_the_threshold_falls_from_two_to_one_over_all_steps(version: int, threshold: float) -> None:
    assert clip_threshold(TrainSettings(steps=40), version) == pytest.approx(threshold, abs=1e-12)


def test_start_end_and_length_of_the_fall_are_the_jobs() -> None:
    settings = TrainSettings(steps=1000, max_grad_norm=5.0, final_grad_norm=0.5, grad_norm_steps=9)
    assert [clip_threshold(settings, version) for version in (0, 4, 9, 10)] == [5.0, 3.0, 0.5, 0.5]


def test_a_threshold_that_starts_below_the_end_stays_where_it_starts() -> None:
    settings = TrainSettings(steps=10, max_grad_norm=0.5)
    assert {clip_threshold(settings, version) for version in range(12)} == {0.5}
