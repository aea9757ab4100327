"""The guarantees of delivery, over networks that lose, double, overtake, part and crash: see ``semantics``."""

import pytest
from hypothesis import HealthCheck, example, given, settings

from tests.bus.histories import play
from tests.bus.plans import Ask, End, Plan, Wait, Weather, plans
from tests.bus.semantics import violations


def check(plan: Plan) -> None:
    found = violations(play(plan))
    if found:
        raise AssertionError("\n".join(found))


patient = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


BEGUN_BY_AN_EARLIER_INCARNATION = Plan(
    1,
    Weather(),
    [
        Ask(0, 1, 0, "any", retries=10, timeout_s=20.0, delay_s=3.0),
        Wait(0.1),
        End(1, killed=True, again=True, same_place=True, late_s=3.0),
    ],
)


@example(BEGUN_BY_AN_EARLIER_INCARNATION)
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=patient)
@given(plans)
def test_every_history_keeps_the_guarantees(plan: Plan) -> None:
    check(plan)


@pytest.mark.deep
@settings(max_examples=10_000, deadline=None, derandomize=True, suppress_health_check=patient)
@given(plans)
def test_ten_thousand_histories_keep_the_guarantees(plan: Plan) -> None:
    check(plan)
