"""What the proxy learns of costs, and how it divides tasks between hardware classes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.proxy.costs import HELD_S, Costs
from actors.proxy.messages import Assign, Assigned, CostsState, DescribeCosts, Served, TrajectoryEnded, UndoMapping
from actors.proxy.routing import Apportionment
from hwprobe.cost import ModelSize
from hwprobe.costmodel import CostModel
from hwprobe.demand import SEEN
from hwprobe.fitting import Work
from tests.proxy.support import world
from tests.support.loops import run, until

BOTH = {"H20", "H800"}


def costs(**affinity: str) -> Costs:
    return Costs(CostModel.prior(ModelSize(), BOTH), affinity)


@settings(deadline=None, max_examples=50)
@given(st.floats(0.01, 0.99), st.integers(1, 300))
def test_shares_hold_over_every_stretch(share: float, count: int) -> None:
    apportionment = Apportionment()
    apportionment.order({"math": {"H20": share, "H800": 1 - share}})
    picked = Counter(apportionment.pick("math", None, BOTH) for _ in range(count))
    assert abs(picked["H20"] - share * count) <= 1.0


def test_a_trajectory_stays_with_its_prefix_while_that_class_has_a_share() -> None:
    apportionment = Apportionment()
    apportionment.order({"math": {"H20": 0.1, "H800": 0.9}})
    assert {apportionment.pick("math", "H20", BOTH) for _ in range(20)} == {"H20"}
    apportionment.order({"math": {"H20": 0.0, "H800": 1.0}})
    assert apportionment.pick("math", "H20", BOTH) == "H800"
    assert apportionment.pick("math", None, {"H20"}) is None, "whatever serves"


def test_tasks_without_shares_go_where_they_are_declared() -> None:
    known = costs(default="H20", games="H800")
    known.assign(Assign({"math": {"H20": 0.0, "H800": 1.0}}, "learned"), 0.0)
    assert [known.preferred(task, None, BOTH) for task in ("math", "games", "web")] == ["H800", "H800", "H20"]
    known.prefer("web", "H800")
    assert known.preferred("web", None, BOTH) == "H800"


def test_orders_are_taken_back_one_by_one_and_then_only_people_change_anything() -> None:
    known = costs()
    first, second = {"math": {"H20": 1.0, "H800": 0.0}}, {"math": {"H20": 0.0, "H800": 1.0}}
    assert known.assign(Assign(first, "learned", "cheaper"), 0.0) == Assigned(1, first)
    assert known.assign(Assign(second, "advised"), 1.0) == Assigned(2, second)
    assert [(order.number, order.by, order.before) for order in known.describe(1.0).orders] == [
        (1, "learned", {}),
        (2, "advised", first),
    ]
    assert known.undo(2.0) == Assigned(2, first)
    held = known.assign(Assign(second, "learned"), 3.0)
    assert (held.shares, held.refused) == (
        first,
        "a person took the last order back; nothing changes for another 599 s",
    )
    assert known.describe(3.0).held_s == HELD_S - 1
    assert known.undo(4.0) == Assigned(1, {})
    with pytest.raises(ValueError, match="no order for the mapping is left"):
        known.undo(5.0)
    assert known.assign(Assign(second, "learned"), 4.0 + HELD_S) == Assigned(3, second)


def test_a_successor_goes_on_with_shares_orders_and_a_persons_hold_by_its_own_clock() -> None:
    """The clock of the one before stood at 1000 s when it described itself, 30 s ago; this one's stands at 5 s."""
    before, after = costs(default="H20"), costs(default="H20")
    first, second = {"math": {"H20": 0.5, "H800": 0.5}}, {"math": {"H20": 0.0, "H800": 1.0}}
    before.assign(Assign(first, "learned", "cheaper"), 900.0)
    before.assign(Assign(second, "learned"), 950.0)
    before.undo(980.0)
    before.prefer("web", "H800")
    for number in range(SEEN):
        before.asked("math", f"t{number}", 300, 900.0, 0)
        before.answered(f"t{number}", 50, 901.0)
    described = before.describe(1000.0)
    assert after.inherit(described, 30.0, 5.0)
    found = after.describe(5.0)
    assert (found.shares, found.number, found.held_s) == (first, 2, HELD_S - 20.0 - 30.0)
    assert [(order.number, order.at_s) for order in found.orders] == [(1, 5.0 - 130.0)]
    assert found.state.tasks["math"].prompt == 300
    assert [after.preferred(task, None, BOTH) for task in ("web", "games")] == ["H800", "H20"]
    assert "a person took" in after.assign(Assign(second, "learned"), 6.0).refused
    assert after.undo(7.0) == Assigned(1, {})
    assert not after.inherit(described, 31.0, 8.0), "once"
    assert after.describe(8.0).shares == {}


def test_a_proxy_with_orders_of_its_own_inherits_nothing() -> None:
    before, after = costs(), costs()
    before.assign(Assign({"math": {"H20": 1.0, "H800": 0.0}}, "learned"), 0.0)
    mine = {"math": {"H20": 0.0, "H800": 1.0}}
    after.assign(Assign(mine, "learned"), 0.0)
    assert not after.inherit(before.describe(1.0), 0.0, 1.0)
    assert after.describe(1.0).shares == mine


def test_the_proxy_learns_from_requests_answers_and_engines_reports() -> None:
    """Two engines that are scripted: the H20 decodes at half of what it is known for."""

    async def story() -> None:
        async with world({"e20": "H20", "e800": "H800"}, {"default": "H20"}) as made:
            for name in ("e20", "e800"):
                await made.serve(name)
            assert await made.add("a/0", domain="math") == "e20"
            work = Work(busy_s=2 * 16.4e9 / 3.2e12, steps=1, decode_tokens=1)
            for _ in range(40):
                made.node.tell(made.proxy.ref, Served("e20", [], 0, work=work))
            made.node.tell(made.proxy.ref, Served("e20", ["a/0"], 3, sampled=[3]))
            made.node.tell(made.proxy.ref, TrajectoryEnded("a"))
            ref = made.proxy.ref

            async def described() -> CostsState:
                return await made.node.ask(ref, DescribeCosts(), timeout_s=5.0)

            await until(lambda: made.proxy._costs.describe(0.0).state.tasks["math"].ended)
            found = await described()
            assert found.state.classes["H20"].reached().bandwidth == pytest.approx(0.4, rel=0.05)
            assert found.state.classes["H800"].reports == 0
            task = found.state.tasks["math"]
            assert (task.prompt, task.response, task.turns, task.ended) == (2, 3, 1, 1)
            assert found.in_flight == 0

            shares = {"math": {"H20": 0.0, "H800": 1.0}}
            assert await made.node.ask(ref, Assign(shares, "learned", "cheaper"), timeout_s=5.0) == Assigned(1, shares)
            assert await made.add("b/0", domain="math") == "e800"
            assert await made.node.ask(ref, UndoMapping(), timeout_s=5.0) == Assigned(1, {})
            assert await made.add("c/0", domain="math") == "e20"
            with pytest.raises(ValueError, match="no order for the mapping is left"):
                await made.node.ask(ref, UndoMapping(), timeout_s=5.0)
            counters = (await made.describe()).counters
            assert (counters["mappings_ordered"], counters["mappings_undone"]) == (1, 1)

    run(story())


def test_ordered_shares_are_obeyed_until_a_class_is_full_and_what_goes_elsewhere_is_counted() -> None:
    """Four places an engine: of six, two and four; then one more finds its class full."""

    async def story() -> None:
        async with world({"e20": "H20", "e800": "H800"}, {"default": "H800"}) as made:
            for name in ("e20", "e800"):
                await made.serve(name)
            shares = {"math": {"H20": 2 / 3, "H800": 1 / 3}}
            await made.node.ask(made.proxy.ref, Assign(shares, "learned"), timeout_s=5.0)
            went = [await made.add(f"t{number}/0", domain="math") for number in range(6)]
            assert Counter(went) == {"e20": 4, "e800": 2}
            assert "affinity_fallbacks" not in (await made.describe()).counters
            await made.node.ask(made.proxy.ref, Assign({"math": {"H20": 1.0}}, "learned"), timeout_s=5.0)
            assert await made.add("late/0", domain="math") == "e800"
            counters = (await made.describe()).counters
            assert (counters["affinity_fallbacks"], counters["affinity_fallbacks_full"]) == (1, 1)

    run(story())


def test_an_answer_that_is_told_after_the_trajectory_has_ended_is_learned_from() -> None:
    """As engines tell: up to 50 ms after whoever asked has the answer."""

    async def story() -> None:
        async with world({"e": "H20"}, {"default": "H20"}) as made:
            await made.serve("e")
            ref = made.proxy.ref
            for number in range(SEEN):
                await made.add(f"t{number}/0", domain="math")
                made.node.tell(ref, TrajectoryEnded(f"t{number}"))
            await until(lambda: made.proxy._costs.describe(0.0).in_flight == 0)
            asked = [f"t{number}/0" for number in range(SEEN)]
            made.node.tell(ref, Served("e", asked, 3 * SEEN, sampled=[3] * SEEN))
            await until(lambda: not made.proxy._where)
            task = (await made.node.ask(ref, DescribeCosts(), timeout_s=5.0)).state.tasks["math"]
            assert (task.known, task.response, task.turns, task.ended) == (True, 3, 1, SEEN)

    run(story())


def test_a_trajectory_whose_class_lost_its_share_goes_on_elsewhere_with_its_next_turn() -> None:
    async def story() -> None:
        async with world({"e20": "H20", "e800": "H800"}, {}) as made:
            for name in ("e20", "e800"):
                await made.serve(name)
            ref = made.proxy.ref
            shares = {"math": {"H20": 1.0, "H800": 0.0}}
            await made.node.ask(ref, Assign(shares, "learned"), timeout_s=5.0)
            assert await made.add("a/0", domain="math") == "e20"
            await until(lambda: "a/0" in made.hosts["e20"].held)
            made.hosts["e20"].answer("a/0")
            await until(lambda: not made.proxy._where)
            await made.node.ask(ref, Assign({"math": {"H20": 0.0, "H800": 1.0}}, "learned"), timeout_s=5.0)
            assert await made.add("a/1", domain="math") == "e800"

    run(story())
