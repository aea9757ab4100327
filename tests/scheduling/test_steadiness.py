"""The alpha monitor on scripted evaluations; every outcome is worked out by hand beside its test."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from coordinator.job import SchedulingSettings
from coordinator.observe.records import EvalRecord
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.rolling import RollingScheduler
from coordinator.steadiness import AlphaMonitor
from tests.scheduling.support import Written, rules, started, store_all

SWINGS = [0.5, 0.7] * 10
"""Mean 0.6, standard deviation 0.1: they fluctuate by 1/6, 16.7%."""


def evaluation(version: int, success: float, return_mean: float = 0.0) -> EvalRecord:
    return EvalRecord(version=version, episodes=100, success=success, return_mean=return_mean, turns_mean=1.0)


class Run:
    """What happens to alpha, evaluation by evaluation."""

    def __init__(self, alpha: int, settings: SchedulingSettings | None = None) -> None:
        self.settings = settings or SchedulingSettings()
        self.monitor = AlphaMonitor(self.settings)
        self.alpha = alpha
        self.records: list[EvalRecord] = []
        self.said: dict[int, str] = {}  # after so many evaluations

    def go(self, values: Iterable[float]) -> list[int]:
        """Alpha after each."""
        alphas = []
        for value in values:
            verdict = self.monitor.judge(evaluation(len(self.records), value), self.alpha)
            self.alpha = verdict.alpha
            self.records.append(verdict.record)
            alphas.append(self.alpha)
            if verdict.said:
                self.said[len(self.records)] = verdict.said
        return alphas

    def resume(self) -> None:
        self.monitor = AlphaMonitor(self.settings, self.records)


def test_nothing_happens_before_there_are_twenty_evaluations() -> None:
    run = Run(alpha=2)
    assert run.go(SWINGS[:19]) == [2] * 19
    assert {record.fluctuation for record in run.records} == {None}
    assert run.go(SWINGS[19:]) == [1]
    assert run.records[-1].fluctuation == pytest.approx(1 / 6)
    assert run.said == {
        20: "the last 20 evaluations fluctuate by 16.7%: alpha was 2 and is now 1, until they do by less than 5% "
        "(scheduling.watch_alpha)"
    }


def test_evaluations_that_fluctuate_by_less_than_fifteen_percent_change_nothing() -> None:
    run = Run(alpha=2)  # mean 0.6, deviation 0.08: 13.3%
    assert set(run.go([0.52, 0.68] * 30)) == {2}
    assert run.said == {}


def test_alpha_falls_one_by_one_until_evaluations_are_steady() -> None:
    """Of the window k values still swing: 0.1 sqrt(k/20) / 0.6. After 35 evaluations k = 5, 8.3%; after 38 two are
    left, 5.3%; after 39 one, 3.6%: what falls every fifth evaluation from the 20th on falls four times."""
    run = Run(alpha=9)
    run.go(SWINGS)
    assert run.go([0.6] * 30) == [8] * 4 + [7] * 5 + [6] * 5 + [5] * 16
    assert list(run.said) == [20, 25, 30, 35, 39]
    assert "below 5%: alpha stays at 5" in run.said[39]
    assert [record.lowering for record in run.records] == [False] * 19 + [True] * 19 + [False] * 12


def test_between_five_and_fifteen_percent_it_goes_on_only_where_it_began() -> None:
    run = Run(alpha=3)  # from 0.55 to 0.65: 8.3%
    assert set(run.go([0.55, 0.65] * 20)) == {3}
    run = Run(alpha=3)
    run.go(SWINGS)
    assert run.go([0.55, 0.65] * 10)[-1] == 0  # at 25 and 30


def test_alpha_ends_at_zero_and_that_is_said() -> None:
    run = Run(alpha=1)
    assert set(run.go(SWINGS * 3)[19:]) == {0}
    run = Run(alpha=0)
    assert set(run.go(SWINGS * 3)) == {0}
    assert list(run.said) == [20]
    assert "alpha is 0 already, so staleness is not why" in run.said[20]


def test_where_nothing_succeeds_the_mean_return_counts() -> None:
    monitor = AlphaMonitor(SchedulingSettings())
    for index in range(20):
        verdict = monitor.judge(evaluation(index, 0.0, return_mean=(-1.0, -3.0)[index % 2]), 1)
    assert verdict.alpha == 0
    assert verdict.record.fluctuation == pytest.approx(0.5)


def test_a_mean_of_zero_says_nothing() -> None:
    assert set(Run(alpha=1).go([0.0] * 40)) == {1}


def test_a_run_that_climbs_is_steady_about_its_trend() -> None:
    climb = [0.2 + 0.03 * step for step in range(20)]  # mean 0.485, deviation 0.03 sqrt(399/12) = 0.173: 35.7%
    assert Run(alpha=1).go(climb)[-1] == 0
    run = Run(alpha=1, settings=SchedulingSettings(steady_about="trend"))
    assert run.go(climb)[-1] == 1
    assert run.records[-1].fluctuation == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("after", range(60))
def test_a_run_that_is_resumed_anywhere_goes_on_as_one_that_was_not_interrupted(after: int) -> None:
    values = [*SWINGS, *[0.6] * 12, *SWINGS, *[0.6] * 8]
    whole, resumed = Run(alpha=9), Run(alpha=9)
    whole.go(values)
    resumed.go(values[:after])
    resumed.resume()
    resumed.go(values[after:])
    assert resumed.records == whole.records
    assert resumed.said == whole.said


def test_what_a_person_has_raised_is_judged_by_evaluations_since() -> None:
    run = Run(alpha=2)
    run.go(SWINGS)
    run.alpha = 4
    assert set(run.go(SWINGS[:19])) == {4}
    assert run.records[-1].lowered_to == -1
    assert run.go([0.7]) == [3]


def test_a_monitor_that_is_off_only_measures() -> None:
    run = Run(alpha=2, settings=SchedulingSettings(watch_alpha=False))
    assert set(run.go(SWINGS)) == {2}
    assert run.records[-1].fluctuation == pytest.approx(1 / 6)
    assert run.said == {}


def test_a_lowered_bound_throws_out_what_is_too_old_for_it_and_the_ledger_says_why() -> None:
    written = Written()
    made = RollingScheduler(rules(alpha=2, groups=1, size=1), Ledger(written))
    made.open()
    tickets = started(made)  # three groups, of version 0
    store_all(made, tickets)
    for version in (1, 2):
        made.take()
        made.trained(version)
    assert made.counts() == (2, 1)  # two more were admitted in place of those that were trained on
    made.set_rules(rules(alpha=1, groups=1, size=1), why="evaluations fluctuate")
    assert made.counts()[1] == 0
    assert made.ledger.balance().evicted == {"stale": 1}
    event = next(each for each in written.events if each.event == "ruled")
    assert (event.alpha, event.detail) == (1, "evaluations fluctuate")
