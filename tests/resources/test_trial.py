"""The mapping beside every other one, played on virtual time: how good it is, how soon after a shift of the load."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.mapping import CASES, CHANCES, CLOSE, PLAYED, Case, Judge, Timed, judge
from coordinator.resources.trial import try_out
from hwprobe.advice import Advisor
from hwprobe.mapping import Learned

LIMIT = 100
"""Decisions in which it has to recover."""


def check(case: Case, seeds: range, games: int, chances: Sequence[int]) -> None:
    mixes = [case.mix(tasks) for tasks in (case.before, case.after)]
    judges = [Judge(mix, case.candidate, case.costs(), games, chances) for mix in mixes]
    bests = [one.best() for one in judges]
    for seed in seeds:
        outcome = judge(case, seed, judges, bests, Timed())
        assert outcome.found >= CLOSE, outcome
        assert outcome.learned_after is not None, outcome
        assert outcome.recovered >= CLOSE, outcome
        assert outcome.recovered_after is not None, outcome
        assert outcome.recovered_after < LIMIT, outcome
        assert outcome.declared < CLOSE, "what was declared was good already, so nothing was learned"


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_the_mapping_is_within_five_percent_of_every_other_and_recovers_from_a_shift(case: Case) -> None:
    check(case, range(1), 600, CHANCES[:1])


@pytest.mark.deep
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_so_it_is_whatever_the_seed(case: Case) -> None:
    check(case, range(1, 11), PLAYED, CHANCES)


def test_the_same_seed_decides_alike() -> None:
    case = CASES[0]
    plays = [
        try_out(
            Learned(),
            [(case.mix(case.before), 20)],
            case.candidate,
            case.costs(),
            declared=case.declared,
            seed=5,
        )
        for _ in range(2)
    ]
    assert plays[0] == plays[1]


def test_advice_that_would_be_worse_leaves_the_mapping_as_good_as_the_learned_one() -> None:
    """A model that always says the opposite of what is good."""
    case = CASES[0]

    async def contrary(text: str) -> str:
        return '{"shares": {"games": {"H20": 1.0}, "math": {"H800": 1.0}}, "why": "the other way round"}'

    advisor = Advisor(contrary, every=10)
    (decisions,) = try_out(
        advisor, [(case.mix(case.before), 60)], case.candidate, case.costs(), declared=case.declared, seed=0
    )
    (learned,) = try_out(
        Learned(), [(case.mix(case.before), 60)], case.candidate, case.costs(), declared=case.declared, seed=0
    )
    assert [heard.outcome for heard in advisor.log if heard.outcome != "refused"] == []
    assert len(advisor.log) >= 3
    assert decisions[-1].shares == learned[-1].shares
