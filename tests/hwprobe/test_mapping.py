"""Which class plays which task: the network by hand, the learned division beside every other, and advice."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from hwprobe.advice import Advisor, question, read
from hwprobe.cost import ModelSize, device_cost
from hwprobe.costmodel import CostModel
from hwprobe.demand import TaskFit
from hwprobe.fitting import Work
from hwprobe.flow import EnginePool, Network, TaskShape
from hwprobe.mapping import PROBE, QUIET, Declared, Divided, Learned, View, cleaned, describe, difference, network_of

MODEL = ModelSize()
GAMES = TaskFit(
    starts=50, prompt=1500, prompts=9, observation=600, observations=9, response=40, responses=9, turns=12, ended=9
)
MATH = TaskFit(starts=50, prompt=300, prompts=9, response=2500, responses=9, turns=1, ended=9)
ENGINES = {"H20": (2, 128), "H800": (2, 128)}


def known(**tasks: TaskFit) -> CostModel:
    model = CostModel.prior(MODEL, ENGINES)
    model.demand.tasks.update(tasks or {"games": GAMES, "math": MATH})
    return model


def view(**more: Any) -> View:
    return View(**{"engines": ENGINES, "declared": {}, "current": {}, "in_flight": 64, **more})


# ---- the network ----------------------------------------------------------------------------------------------------


def test_a_lone_engine_decodes_at_its_steps_pace() -> None:
    """10 answers of 1000 tokens at once on an H20: 10 / (1000 steps) with the caches half full."""
    pool = EnginePool(cost=device_cost("H20", MODEL), engines=1)
    network = Network(MODEL, {"t": TaskShape(prompt=1, response=1000)}, {"H20": pool}, 10)
    step_s = (16.4e9 + 10 * 501 * 147_456) / 3.2e12
    assert network.rate({"t": {"H20": 1.0}}) == pytest.approx(10 / (1000 * step_s), rel=0.01)


def test_a_division_between_classes_is_the_best_that_a_fine_grid_has() -> None:
    model = known()
    network = network_of(model, view())
    assert network is not None
    found, rate = network.divided({task: {"H20": 1.0, "H800": 0.0} for task in ("games", "math")})
    steps = [step / 50 for step in range(51)]
    grid = [
        network.rate({"games": {"H20": g, "H800": 1 - g}, "math": {"H20": m, "H800": 1 - m}})
        for g, m in itertools.product(steps, repeat=2)
    ]
    assert rate >= 0.995 * max(grid)
    assert network.rate(found) == rate
    assert found["games"]["H800"] > 0.8, "prefill belongs on compute"
    assert found["math"]["H20"] > 0.8, "decoding belongs on bandwidth"


def test_three_classes_are_divided_two_at_a_time() -> None:
    """The best of a grid in fifths: 21 divisions of each task, 441 of both."""
    model = known()
    three = {"A100": (2, 128), "H20": (2, 128), "H800": (1, 128)}
    network = network_of(model, view(engines=three))
    assert network is not None
    even = {task: dict.fromkeys(three, 1 / 3) for task in ("games", "math")}
    found, rate = network.divided(even)
    fifths = [(a / 5, b / 5, (5 - a - b) / 5) for a in range(6) for b in range(6 - a)]
    grid = [
        network.rate({task: dict(zip(three, shares, strict=True)) for task, shares in (("games", g), ("math", m))})
        for g, m in itertools.product(fifths, repeat=2)
    ]
    assert rate >= 0.98 * max(grid)
    assert all(sum(of_task.values()) == pytest.approx(1.0) for of_task in found.values())


# ---- learned --------------------------------------------------------------------------------------------------------


def test_declared_is_what_the_user_says_whatever_it_costs() -> None:
    proposal = asyncio.run(Declared().propose(known(), view(declared={"default": "H20"})))
    assert proposal.shares == {}


def test_the_learned_mapping_begins_with_what_is_declared_and_leaves_it_only_for_a_gain() -> None:
    right, wrong = {"games": "H800", "math": "H20"}, {"games": "H20", "math": "H800"}
    learned = Learned()
    changed = learned.decide(known(), view(declared=wrong))
    assert changed.expected > 1.5 * changed.before
    again = learned.decide(known(), view(declared=wrong, current=changed.shares))
    assert again.shares == changed.shares
    model = known()
    kept = Learned().decide(model, view(declared=right))
    network = network_of(model, view())
    assert network is not None
    best = network.divided({task: {name: float(name == right[task]) for name in ENGINES} for task in right})[1]
    assert (kept.shares == {}) == (best <= 1.02 * kept.before)


def test_a_task_that_little_is_known_of_stays_where_it_is_declared() -> None:
    few = TaskFit(starts=1, prompt=1500, prompts=1, response=40, responses=7)
    assert Learned().decide(known(games=few), view(declared={"games": "H20"})).shares == {}


def test_where_one_class_serves_there_is_nothing_to_decide() -> None:
    now = {"games": {"H20": 1.0}}
    proposal = Learned().decide(known(), view(engines={"H20": (2, 128), "H800": (0, 128)}, current=now))
    assert proposal.shares == now


def test_what_went_to_a_class_that_is_gone_goes_elsewhere() -> None:
    three = {"A100": {"A100": 1.0}}
    gone = view(current={"games": three["A100"], "math": three["A100"]})
    proposal = Learned().decide(known(), gone)
    assert {name for of_task in proposal.shares.values() for name in of_task} == {"H20", "H800"}


def test_a_class_that_is_not_heard_of_gets_a_little_until_it_is() -> None:
    """Everything is on the H20, where it seems to belong: the H800 is taken to be 1000 times slower than it is."""
    model = known(math=MATH)
    slow = model.fit("H800").prior
    work = Work(busy_s=100 * slow.step_s(MODEL, 8, 2000) * 1000, steps=100, decode_tokens=800, context_tokens=1.6e6)
    for _ in range(30):
        model.worked("H800", work)
    learned, current = Learned(), {"math": {"H20": 1.0, "H800": 0.0}}
    for _ in range(QUIET):
        model.worked("H20", Work(busy_s=1.0, prefill_tokens=1000))
        assert difference(learned.decide(model, view(current=current)).shares, current) == 0
    model.worked("H20", Work(busy_s=1.0, prefill_tokens=1000))
    probing = learned.decide(model, view(current=current))
    assert probing.shares["math"]["H800"] == pytest.approx(PROBE)
    assert "H800 has not been heard of" in probing.why
    quick = Work(busy_s=100 * slow.step_s(MODEL, 8, 2000), steps=100, decode_tokens=800, context_tokens=1.6e6)
    for _ in range(30):
        model.worked("H800", quick)
    assert learned.decide(model, view(current=probing.shares)).shares["math"]["H800"] > 0.3


def test_a_pause_in_which_nobody_plays_makes_no_class_silent() -> None:
    model = known(math=MATH)
    learned, current = Learned(), {"math": {"H20": 1.0, "H800": 0.0}}
    for name in ENGINES:
        model.worked(name, Work(busy_s=1.0, prefill_tokens=1000))
    before = learned.decide(model, view(current=current)).shares
    for _ in range(2 * QUIET):
        found = learned.decide(model, view(current=current))
        assert (found.shares, "heard of" in found.why) == (before, False)


def test_shares_are_rounded_and_what_is_next_to_nothing_is_left_out() -> None:
    assert cleaned({"t": {"a": 0.9995, "b": 0.0005}}) == {"t": {"a": 1.0, "b": 0.0}}
    assert sum(cleaned({"t": {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}})["t"].values()) == pytest.approx(1.0, abs=1e-9)
    text = describe({"math": {"H20": 0.75, "H800": 0.25}, "games": {"H20": 0.0, "H800": 1.0}})
    assert text == "games to H800, math to H20 75% and H800 25%"


# ---- advised --------------------------------------------------------------------------------------------------------


def best() -> dict[str, dict[str, float]]:
    return Learned().decide(known(), view(declared={"games": "H20", "math": "H800"})).shares


def advice(shares: object, why: str = "prefill wants compute") -> str:
    return json.dumps({"shares": shares, "why": why})


async def decisions(advisor: Advisor, count: int, model: CostModel | None = None) -> list[str]:
    """By whom each was, with the time that an answer needs in between."""
    wrong, current = {"games": "H20", "math": "H800"}, Divided()
    found = []
    for _ in range(count):
        proposal = await advisor.propose(model or known(), view(declared=wrong, current=current))
        current = proposal.shares
        found.append(proposal.by)
        await asyncio.sleep(0.001)
    return found


def says(*answers: str) -> Callable[[str], Any]:
    left = list(answers)

    async def ask(text: str) -> str:
        assert '"classes"' in text
        return left.pop(0)

    return ask


def test_advice_that_is_as_good_is_taken_from_the_next_decision_on() -> None:
    advisor = Advisor(says(advice(best())))
    assert asyncio.run(decisions(advisor, 3)) == ["learned", "advised", "advised"]
    (heard,) = advisor.log
    assert (heard.outcome, heard.reason) == ("taken", "prefill wants compute")
    assert heard.expected == pytest.approx(heard.learned, rel=0.02)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("Sure! " + advice({}), "expected one JSON object with shares and why"),
        (advice({}) + advice({}), "expected one JSON object"),
        ('{"shares": {}, "confidence": 1}', "unknown field"),
        ('{"shares": {"games": "H800"}}', "Expected `object`"),
        (advice({"games": {"H800": 1.0}}), "no shares for math"),
        (advice({"games": {"H800": 1.0}, "math": {"H20": 1.0}, "chess": {"H20": 1.0}}), "found chess"),
        (advice({"games": {"H800": 1.0}, "math": {"B200": 1.0}}), "expected the classes H20, H800, found B200"),
        (advice({"games": {"H800": 0.7}, "math": {"H20": 1.0}}), "add up to 1"),
        (advice({"games": {"H800": 1.5, "H20": -0.5}, "math": {"H20": 1.0}}), "from 0 to 1"),
        (advice({"games": {"H20": 1.0}, "math": {"H800": 1.0}}), "trajectories/s of it, and"),
    ],
)
def test_an_answer_that_is_not_exactly_right_is_refused_by_name_and_nothing_comes_of_it(
    answer: str, reason: str
) -> None:
    advisor = Advisor(says(answer))
    assert asyncio.run(decisions(advisor, 4)) == ["learned"] * 4
    (heard,) = advisor.log
    assert heard.outcome == "refused"
    assert reason in heard.reason
    assert heard.answer == answer


def test_an_adviser_that_fails_or_never_answers_costs_nothing() -> None:
    async def fails(text: str) -> str:
        raise RuntimeError("no engine is left")

    async def hangs(text: str) -> str:
        await asyncio.Event().wait()
        return ""

    failing, hanging = Advisor(fails), Advisor(hangs, ask_timeout_s=0.001)
    assert asyncio.run(decisions(failing, 3)) == ["learned"] * 3
    assert failing.log[0].reason == "RuntimeError: no engine is left"
    assert asyncio.run(decisions(hanging, 8)) == ["learned"] * 8
    assert hanging.log[0].reason == "no answer within 0.001 s"


def test_it_is_asked_again_after_so_many_decisions_and_the_same_answer_is_known() -> None:
    good = advice(best())
    advisor = Advisor(says(good, "nonsense", good), every=3)
    assert asyncio.run(decisions(advisor, 12))[2:] == ["advised"] * 10
    assert [heard.outcome for heard in advisor.log] == ["taken", "refused", "known"]


def test_advice_is_withdrawn_when_it_is_not_good_any_more() -> None:
    """The H800 becomes five times slower than it was."""
    advisor = Advisor(says(advice(best())))
    model = known()

    async def story() -> list[str]:
        first = await decisions(advisor, 2, model)
        prior = model.fit("H800").prior
        for _ in range(40):
            model.worked("H800", Work(busy_s=5 * prior.prefill_s(MODEL, 10_000), prefill_tokens=10_000))
        return [*first, *await decisions(advisor, 1, model)]

    assert asyncio.run(story()) == ["learned", "advised", "learned"]
    assert [heard.outcome for heard in advisor.log] == ["taken", "withdrawn"]


def test_a_question_holds_what_is_known_and_the_form_of_an_answer() -> None:
    model, seen = known(), view(declared={"default": "H20"})
    network = network_of(model, seen)
    assert network is not None
    text = question(model, network, seen)
    facts = json.loads(text.splitlines()[1])
    assert facts["classes"] == {"H20": {"engines": 2, "places": 128}, "H800": {"engines": 2, "places": 128}}
    assert facts["tasks"]["games"]["prefill_tokens"] == 1500 + 11 * 600
    assert facts["tasks"]["games"]["engine_seconds"]["H20"]["prefill"] == pytest.approx(
        2 * 8.2e9 * 8100 / (0.8 * 148e12), rel=0.01
    )
    assert facts["now"]["games"] == {"H20": 1.0, "H800": 0.0}
    assert read(' {"shares": {"games": {"H20": 1}}}\n').shares == {"games": {"H20": 1.0}}
