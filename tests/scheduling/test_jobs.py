"""Several jobs on the places of one cluster."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.scheduling.jobs import Claim, Quota, allot, bounds, lowered


def claim(job: str, wanted: int, used: int = 0, **quota: float) -> Claim:
    return Claim(job, Quota(**quota), used, wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ([claim("a", 100), claim("b", 100)], {"a": 50, "b": 50}),
        ([claim("a", 10), claim("b", 200)], {"a": 10, "b": 90}),
        ([claim("a", 200, weight=3.0), claim("b", 200)], {"a": 75, "b": 25}),
        ([claim("a", 200, priority=1), claim("b", 200)], {"a": 100, "b": 0}),
        ([claim("a", 200, priority=1), claim("b", 200, least=20)], {"a": 80, "b": 20}),
        ([claim("a", 200, priority=1, most=30), claim("b", 200)], {"a": 30, "b": 70}),
        ([claim("a", 200, least=80, priority=1), claim("b", 200, least=80)], {"a": 80, "b": 20}),
        ([claim("a", 5, least=50), claim("b", 200)], {"a": 5, "b": 95}),  # what it cannot use, others do
        ([claim("a", 10), claim("b", 20)], {"a": 10, "b": 20}),
        ([], {}),
    ],
)
def test_a_hundred_places_are_shared_as_agreed(claims: list[Claim], expected: dict[str, int]) -> None:
    assert allot(claims, 100) == expected


QUOTAS = st.builds(
    Quota,
    priority=st.integers(0, 2),
    weight=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
    least=st.integers(0, 20),
    most=st.none() | st.integers(0, 60),
)
CLAIMS = st.lists(st.tuples(QUOTAS, st.integers(0, 80)), max_size=6).map(
    lambda drawn: [Claim(f"j{number}", quota, 0, wanted) for number, (quota, wanted) in enumerate(drawn)]
)


@given(CLAIMS, st.integers(0, 200))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_what_is_agreed_holds_for_any_jobs(claims: list[Claim], places: int) -> None:
    given_out = allot(claims, places)
    can_use = {
        each.job: each.wanted if each.quota.most is None else min(each.wanted, each.quota.most) for each in claims
    }
    assert sum(given_out.values()) == min(places, sum(can_use.values()))
    assert all(given_out[job] <= can_use[job] for job in given_out)
    sure = {each.job: min(each.quota.least, can_use[each.job]) for each in claims}
    if sum(sure.values()) <= places:
        assert all(given_out[job] >= sure[job] for job in given_out)
    for high in claims:
        for low in claims:
            satisfied = given_out[high.job] == can_use[high.job]
            if high.quota.priority > low.quota.priority and given_out[low.job] > sure[low.job]:
                assert satisfied
            beyond = given_out[low.job] > sure[low.job]
            if high.quota.priority == low.quota.priority and not satisfied and beyond:  # low has no more than its share
                assert (given_out[low.job] - 1) / low.quota.weight <= (given_out[high.job] + 1) / high.quota.weight


@given(CLAIMS, st.integers(1, 100), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_place_is_given_twice_and_no_trajectory_cut_while_claims_change(
    claims: list[Claim], places: int, seed: int
) -> None:
    """Jobs start what they may whenever they like, also between being asked and being bound; trajectories end when they
    like. Once claims stand still, every job may use its target."""
    chance = random.Random(seed)
    used = {each.job: 0 for each in claims}
    bound = {each.job: 0 for each in claims}
    wanted = {each.job: each.wanted for each in claims}

    def claimed() -> list[Claim]:
        return [
            Claim(each.job, each.quota, used[each.job], max(wanted[each.job], used[each.job]), bound[each.job])
            for each in claims
        ]

    def life_goes_on() -> None:
        for job in list(used):
            if chance.random() < 0.5:
                used[job] -= min(used[job], 1)
            if chance.random() < 0.5:
                used[job] += max(0, min(bound[job], wanted[job]) - used[job])
        assert sum(used.values()) <= places

    for turn in range(300):
        if turn < 150 and claims and chance.random() < 0.2:
            wanted[chance.choice(claims).job] = chance.randint(0, 80)
        targets = allot(claimed(), places)
        life_goes_on()
        bound |= {each.job: lowered(each, targets[each.job]) for each in claimed()}
        life_goes_on()
        bound |= bounds(claimed(), targets, places)
        life_goes_on()
    assert bound == allot(claimed(), places)
