"""Long lives: hours of calls and faults in virtual time leave nothing behind and lose nothing without a reason."""

import pytest

from tests.bus.storm import LASTING, NODES, Outcome, storm


def check(outcome: Outcome) -> None:
    assert outcome.violations == []
    first, last = outcome.held[len(outcome.held) // 4], outcome.held[-1]
    assert last.unfinished == 0
    assert last.answers <= NODES * NODES * 16
    assert last.tasks <= first.tasks + NODES * NODES
    assert last.timers <= first.timers + NODES * NODES
    assert last.objects <= 1.1 * first.objects


def test_hours_of_faults_leave_nothing_behind() -> None:
    outcome = storm(20_000, hours=2, seed=1)
    check(outcome)
    assert outcome.delivered > 15_000
    assert outcome.deaths > 20 * (NODES - LASTING)


def test_a_storm_repeats_exactly() -> None:
    assert storm(2_000, hours=0.2, seed=2).digest == storm(2_000, hours=0.2, seed=2).digest


@pytest.mark.deep
def test_a_day_of_faults_leaves_nothing_behind() -> None:
    """A tenth of what ``python -m tests.bus.storm --events 10000000`` does, which docs/benchmarks.md records."""
    outcome = storm(1_000_000, hours=24, seed=1)
    check(outcome)
    assert outcome.delivered > 900_000
