"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from coordinator.observe import text
from tests.observe.samples import sample, step


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0.00"), (0.424, "0.42"), (-3.14159, "-3.14"), (0.0000131, "1.31e-05"), (-0.004, "-0.004"),
        (1_840_000.0, "1.84e+06"), (math.nan, "-"), (math.inf, "-"),
    ],
)  # fmt: skip
def test_numbers(value: float, expected: str) -> None:
    assert text.number(value) == expected


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(0.0, "0%"), (0.001, "1%"), (0.42, "42%"), (0.999, "99%"), (1.0, "100%"), (math.nan, "-")],
)
def test_all_and_nothing_are_never_rounded_to(fraction: float, expected: str) -> None:
    assert text.percent(fraction) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0:00"), (38.4, "0:38"), (59.6, "1:00"), (725, "12:05"), (10_809, "3:00:09"), (-5, "0:00"), (math.nan, "-")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert text.duration(seconds) == expected


def test_losses_name_their_reasons_most_frequent_first() -> None:
    assert text.lost({"env_failed": 1, "stale": 2, "aborted": 2, "none": 0}) == "5 (aborted 2, stale 2, env_failed 1)"
    assert text.lost({}) == "0"


def test_arrows_follow_the_trend_and_ignore_what_is_too_small_or_not_a_number() -> None:
    assert [text.arrow(0.40, now) for now in (0.42, 0.38, 0.402, math.nan)] == ["^", "v", "=", "="]
    assert text.arrow(None, 0.4) == "="


def test_a_sparkline_spans_its_least_and_greatest_value() -> None:
    assert text.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert text.sparkline([10, math.nan, 17]) == "▁ █"
    assert text.sparkline([5, 5]) == "▁▁"
    assert text.sparkline([math.nan]) == " "
    assert text.sparkline([], 4) == ""


def test_a_sparkline_keeps_the_newest_values() -> None:
    assert text.sparkline([100, 0, 7], width=2) == "▁█"


def test_the_time_left_follows_the_pace_of_the_last_twenty_steps() -> None:
    slow_start = [step(1, elapsed_s=100.0)] + [step(n, elapsed_s=100.0 + 0.5 * n) for n in range(2, 41)]
    assert text.seconds_left(slow_start, total=60) == pytest.approx(20 * 0.5)
    assert math.isnan(text.seconds_left(slow_start[:1], total=60))
    assert math.isnan(text.seconds_left([], total=60))


def test_a_step_on_one_line() -> None:
    records = [step(11, elapsed_s=10.0, reward_trend=0.38), step(12, elapsed_s=10.8)]
    assert text.step_line(records, 60) == (
        "step 12/60  v12  reward 0.42 ^  success 42%  1840 tok/s  stale 0.9  in flight 64"
        "  lost 3 (stale 2, env_failed 1)  eta 0:38"
    )  # 48 steps at 0.8 s


def test_a_step_whose_numbers_went_bad_is_still_a_line() -> None:
    bad = step(3, reward_mean=math.nan, reward_trend=math.nan, success_rate=math.nan, tokens_per_s=math.inf, lost={})
    assert text.step_line([bad], 60) == (
        "step 3/60  v3  reward - =  success -  - tok/s  stale 0.9  in flight 64  lost 0"
    )  # fmt: skip


def test_a_sample_reads_as_a_dialogue() -> None:
    assert text.sample_text(sample("t-7", reward=0.5)) == (
        "trajectory t-7  version 3  reward 0.50  success\n"
        "\n--- observation ---\nS.\n.G\n"
        "\n--- action ---\nright\n"
    )  # fmt: skip


def test_text_from_outside_cannot_act_on_a_terminal() -> None:
    hostile = "\x1b[41mred\x1b[0m \x1b]0;title\x07 \ud800 \u202egnp\ttab\nline é \x9b2J"
    assert text.readable(hostile) == "red \\x1b]0;title\\x07 \\ud800 \\u202egnp\ttab\nline é \\x9b2J"
