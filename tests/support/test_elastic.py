"""A batch that waits to fill, beside one that does not, at the same arrivals."""

from __future__ import annotations

from benchmarks.proxy.elastic import FILL, GAP_S, answers, high_load, low_load


def test_arrivals_are_as_far_apart_as_they_should_be_and_repeat() -> None:
    times = [at for at, _ in answers(2000, 1)]
    assert times == sorted(times)
    assert abs(times[-1] / 2000 - GAP_S) < 0.05
    assert answers(50, 1) == answers(50, 1)


def test_waiting_until_a_batch_is_full_costs_what_the_arrivals_say() -> None:
    """The k-th of a batch waits for the arrival of the last: nobody is answered sooner than that, and the first of a
    batch waits longest."""
    count = 2 * FILL
    times = [at for at, _ in answers(count, 0)]
    last = [times[number // FILL * FILL + FILL - 1] for number in range(count)]
    filled = low_load("H20", count, fills=True)
    assert all(took > full - at for took, at, full in zip(filled, times, last, strict=True))
    assert sum(filled) > sum(low_load("H20", count, fills=False))


def test_a_higher_ceiling_answers_more_in_the_same_time() -> None:
    low, high = (high_load("H20", ceiling, 48)[0] for ceiling in (4, 48))
    assert high < low
