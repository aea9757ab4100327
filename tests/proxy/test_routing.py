"""Where a request goes, beside what a scan over all engines says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core import Ref
from actors.proxy.engines.protocol import EngineLimits, GenerateRequest
from actors.proxy.entry import Claim, EngineEntry, State
from actors.proxy.messages import Add
from actors.proxy.pool import Pool
from actors.proxy.routing import Choice, Need, choose, preferred_class
from bus.message import NodeAddress
from hwprobe.cost import ModelSize, device_cost
from hwprobe.costmodel import CostModel, Rates
from hwprobe.fitting import Work

CLASSES = ("H800", "H20", "CPU")
MODEL = CostModel.prior(ModelSize(), CLASSES)
ANYBODY = Ref(NodeAddress("somebody", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", 1), "asker")
S = 1_000_000_000


def entry(name: str, of: str = "H20", *, places: int = 4, version: int = 0, state: State = "serving") -> EngineEntry:
    made = EngineEntry(name, of, MODEL.rates(of).room)
    made.limits = EngineLimits(places, 100_000)
    made.version, made.state = version, state
    return made


def add(id_: str) -> Add:
    return Add(GenerateRequest(id_, id_, np.zeros(1, np.int32), 1), ANYBODY)


def give(engine: EngineEntry, *nanoseconds: int, tokens: int = 100) -> EngineEntry:
    """Requests that cost so much."""
    for one in nanoseconds:
        engine.give(add(f"{engine.name}/{len(engine.in_flight)}"), Claim(one // 2, one - one // 2, 10, tokens))
    return engine


def chosen(*engines: EngineEntry, need: Need | None = None, **more: Any) -> tuple[str, str] | None:
    choice = choose(Pool(engines).groups(), need or Need(100, 1.0), MODEL.rates, **more)
    return None if choice is None else (choice.engine.name, choice.fallback)


def test_a_domain_gets_the_class_declared_for_it_and_others_the_default() -> None:
    affinity = {"code": "H800", "default": "H20"}
    assert preferred_class(affinity, "code") == "H800"
    assert preferred_class(affinity, "games") == "H20"
    assert preferred_class({"code": "H800"}, "games") is None


def test_the_engine_with_the_least_work_ahead_is_taken_however_many_requests_that_is() -> None:
    assert chosen(give(entry("a"), 9 * S), give(entry("b"), S, S, S)) == ("b", "")


def test_of_equally_loaded_ones_the_first_by_name_is_taken() -> None:
    assert chosen(entry("b"), entry("a")) == ("a", "")


def test_without_a_declared_class_long_prompts_go_to_flops_and_long_answers_to_bandwidth() -> None:
    """By the brief's figures prefill is 3.2 times as fast on the H800, and decoding 1.41 times as fast on the H20."""
    engines = entry("a", "H800"), entry("b", "H20")
    assert chosen(*engines, need=Need(20_000, 1.0)) == ("a", "")
    assert chosen(*engines, need=Need(200, 1000.0)) == ("b", "")


def test_what_a_request_costs_by_hand() -> None:
    """8.2e9 parameters at 2 FLOPs each over 0.8 x 148 TFLOP/s; 16.4 GB of weights and 147,456 bytes a token of cache
    over 0.8 x 4 TB/s. 1,000 tokens of a prompt, 400 of them known, and 10 to sample."""
    token_s, weights_s, context_s = 16.4e9 / 118.4e12, 16.4e9 / 3.2e12, 147_456 / 3.2e12
    need, rates = Need(1000, 10.0), MODEL.rates("H20")
    step_s = weights_s + 8 * 1005 * context_s
    claim = need.claim(rates, 400, 8)
    assert claim.prefill_ns == pytest.approx(600 * token_s * S, rel=1e-6)
    assert claim.decode_ns == pytest.approx(10 * step_s / 8 * S, rel=1e-6)
    assert (claim.sampled, claim.length) == (10, 1010)
    least = need.claim(rates, 1000, 8).prefill_ns
    assert least == pytest.approx(token_s * S, rel=1e-5), "the last token is computed anyway"


def test_a_delay_by_hand() -> None:
    """The same on an engine with two requests of 0.3 s each: so one more is a batch of three, of which it has a third
    of the steps, and two such requests would wait for what it takes."""
    token_s, weights_s, context_s = 16.4e9 / 118.4e12, 16.4e9 / 3.2e12, 147_456 / 3.2e12
    (group,) = Pool([give(entry("a", places=8), 3 * S // 10, 3 * S // 10)]).groups()
    prefill_s, decode_s = 600 * token_s, 10 * (weights_s + 3 * 1005 * context_s)
    expected_s = 0.6 + 2 * (prefill_s + decode_s / 3) + prefill_s + decode_s
    found = Need(1000, 10.0).delay_ns(6 * S // 10, group, MODEL.rates("H20"), 400)
    assert found == pytest.approx(expected_s * S, rel=1e-6)


def test_what_is_ahead_shrinks_as_tokens_are_told_and_is_gone_with_the_request() -> None:
    engine = entry("a")
    engine.give(add("a/0"), Claim(prefill_ns=1000, decode_ns=600, sampled=6, length=50))
    assert (engine.outstanding, engine.ahead) == (1600, 1600)
    engine.advanced([("a/0", 0), ("b/0", 3)])
    assert engine.outstanding == 1600, "its prompt may not have been computed yet"
    engine.advanced([("a/0", 2)])
    assert engine.outstanding == 400
    engine.advanced([("a/0", 99)])
    assert engine.outstanding == 100, "longer than was expected: one token more"
    engine.take("a/0")
    assert (engine.outstanding, engine.context) == (0, 0)


@given(st.sampled_from(["H800", "H20", "A100"]), st.floats(1, 512), st.floats(1, 1e5))
def test_rates_are_the_cost_of_the_device(name: str, batch: float, context: float) -> None:
    model = ModelSize()
    cost, rates = device_cost(name, model), CostModel.prior(model, [name]).rates(name)
    assert rates.step_s(batch, context) == pytest.approx(cost.step_s(model, batch, context))
    assert rates.token_s * context == pytest.approx(cost.prefill_s(model, context))
    assert rates.room == cost.cache_tokens(model)


def test_rates_follow_what_engines_report() -> None:
    model = CostModel.prior(ModelSize(), ["H20"])
    before = model.rates("H20")
    for _ in range(60):
        model.worked("H20", Work(busy_s=2 * 1000 * before.token_s, prefill_tokens=1000))
    assert model.rates("H20").token_s == pytest.approx(2 * before.token_s, rel=0.05)


def test_the_preferred_class_is_taken_though_another_would_be_a_little_sooner() -> None:
    engines = entry("a", "H20"), give(entry("b", "H800"), S // 100)
    assert chosen(*engines, need=Need(1000, 1.0), preferred="H800") == ("b", "")


def test_another_class_is_taken_where_it_is_twice_as_soon_and_that_is_told() -> None:
    engines = entry("a", "H20"), give(entry("b", "H800"), 2 * S)
    assert chosen(*engines, preferred="H800") == ("a", "busy")


def test_without_an_engine_of_the_preferred_class_another_serves_and_it_is_told() -> None:
    assert chosen(give(entry("a"), S), entry("b", "CPU"), preferred="H800", need=Need(10, 1.0)) == ("a", "gone")


def test_a_request_does_not_wait_for_a_full_class_while_another_has_room() -> None:
    full = give(entry("a", "H800", places=2), 1, 1)
    assert chosen(full, give(entry("b", "H20"), 5 * S), preferred="H800") == ("b", "full")
    assert chosen(full, give(entry("b", "H20", places=1), 5 * S), preferred="H800") == ("a", "")


def test_an_engine_without_room_for_keys_and_values_is_full() -> None:
    """An H20 of 96 GB: 0.85 of it less 16.4 GB of weights is room for some 440,000 tokens."""
    engine = entry("a", places=64)
    give(engine, 1, 1, tokens=140_000)
    assert not engine.full
    give(engine, 1, tokens=140_000)
    assert engine.full


def test_a_trajectory_stays_with_its_prefix_while_to_compute_it_anew_takes_longer_than_the_queue() -> None:
    """10,000 tokens take 1.385 s on an H20."""
    need, busy = Need(10_100, 1.0), give(entry("b"), S)
    more: dict[str, Any] = {"holder": busy, "cached": 10_000}
    assert chosen(entry("a"), busy, need=need, **more) == ("b", "")
    give(busy, S // 2)
    assert chosen(entry("a"), busy, need=need, **more) == ("a", "")


def test_a_full_holder_is_waited_for_where_that_is_sooner() -> None:
    need, busy = Need(10_100, 1.0), give(entry("b", places=1), S)
    assert chosen(entry("a"), busy, need=need, holder=busy, cached=10_000) == ("b", "")
    assert chosen(entry("a"), busy, need=need, holder=busy, cached=0) == ("a", "")


def test_a_holder_of_another_class_is_kept_for_a_long_prefix_only_and_that_is_told() -> None:
    held = entry("a", "H20")
    engines = held, entry("b", "H800")
    long, short = Need(50_000, 1.0), Need(120, 1.0)
    assert chosen(*engines, need=long, preferred="H800", holder=held, cached=49_900) == ("a", "prefix")
    assert chosen(*engines, need=short, preferred="H800", holder=held, cached=110) == ("b", "")


def test_an_engine_that_is_barred_is_taken_only_where_there_is_no_other() -> None:
    held = entry("a")
    more: dict[str, Any] = {"barred": "a", "holder": held, "cached": 90}
    assert chosen(held, give(entry("b"), 9 * S), **more) == ("b", "")
    assert chosen(held, **more) == ("a", "")


def test_while_none_serves_a_suspended_one_is_waited_for_and_others_never() -> None:
    suspended = entry("a", state="suspended")
    assert chosen(suspended, entry("b", state="cold")) == ("a", "")
    assert chosen(suspended, entry("b")) == ("b", "")
    assert chosen(entry("b", state="dead"), preferred="H800") is None


# ---- beside a scan -------------------------------------------------------------------------------------------------


def scan(
    engines: list[EngineEntry],
    need: Need,
    rates: dict[str, Rates],
    *,
    preferred: str | None,
    holder: EngineEntry | None,
    cached: int,
    barred: str | None,
) -> str | None:
    """What the module docstring says, engine by engine, in seconds of the formulas of the cost model."""
    states = {engine.state for engine in engines}
    state = "serving" if "serving" in states else "suspended"
    able = [engine for engine in engines if engine.state == state]
    able = [engine for engine in able if engine.name != barred] or able

    def takes(engine: EngineEntry, known: int) -> int:
        alike = [one for one in engines if (one.state, one.version) == (state, engine.version)]
        alike = [one for one in alike if one.hardware_class == engine.hardware_class]
        requests, places = (
            sum(len(one.in_flight) for one in alike),
            sum(one.limits.max_sequences for one in alike),
        )
        of = rates[engine.hardware_class]
        batch = min(1 + requests / len(alike), places / len(alike))
        context = need.prompt + need.sampled / 2
        step_s = max(batch * of.token_s, of.weights_s + batch * context * of.context_s)
        prefill_s = max(1, need.prompt - known) * of.token_s
        ahead = sum(engine._left[id_] for id_ in engine.in_flight) + engine.emptied * engine._last
        weight = 1 if preferred in (None, engine.hardware_class) else 2
        decode_s = need.sampled * step_s
        work = int((prefill_s + decode_s / batch) * S)
        mean = sum(left for one in alike for left in one._left.values()) // requests if requests else work
        return weight * (ahead + ahead * work // (mean or work or 1) + int((prefill_s + decode_s) * S))

    def waits(engine: EngineEntry) -> bool:
        count, tokens = len(engine.in_flight), sum(engine._claims[id_].length for id_ in engine.in_flight)
        no_place = count + engine.emptied >= engine.limits.max_sequences
        return no_place or (count > 0 and tokens * (count + 1) / count > engine.room)

    ranked = [(waits(engine), takes(engine, 0), engine.name) for engine in able]
    if not ranked:
        return None
    best = min(ranked)
    if holder in able and holder is not None:
        mine = (waits(holder) and best[0], takes(holder, cached), holder.name)
        best = min(best, mine)
    return best[2]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["give"] * 3 + ["take", "take all", "advance", "empty", "state", "version"] + ["choose"] * 2),
        st.integers(0, 7),
        st.integers(0, 2_000_000_000),
        st.integers(1, 200_000),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(EVENTS, st.sampled_from([*CLASSES, None]), st.integers(0, 9))
def test_the_decision_is_that_of_a_scan_whatever_has_happened(
    events: list[tuple[str, int, int, int]], preferred: str | None, holds: int
) -> None:
    engines = [entry(f"e{n}", CLASSES[n % 3], places=1 + n % 4, version=n % 2) for n in range(8)]
    pool = Pool(engines)
    rates = {name: MODEL.rates(name) for name in CLASSES}
    for step, (what, which, much, tokens) in enumerate(events):
        engine = engines[which]
        if what == "give":
            engine.give(add(f"r{step}"), Claim(much // 3, much - much // 3, 1 + much % 50, tokens))
        elif what == "advance":
            engine.advanced([(id_, much % 60) for id_ in [*engine.in_flight, "nobody's"]])
        elif what == "take" and engine.in_flight:
            assert engine.take(next(iter(engine.in_flight))) is not None
        elif what == "take all":
            engine.take_all()
        elif what == "empty":
            engine.emptied = much % 3
        elif what == "state":
            engine.state = (["serving"] * 3 + ["suspended", "dead"])[much % 5]  # type: ignore[assignment]
        elif what == "version":
            engine.version = much % 3
        holder = engines[holds] if holds < len(engines) else None
        need = Need(tokens, float(1 + much % 500))
        cached, barred = tokens // 2, f"e{which}" if much % 3 == 0 else None
        choice: Choice | None = choose(
            pool.groups(), need, MODEL.rates, preferred=preferred, holder=holder, cached=cached, barred=barred
        )
        expected = scan(engines, need, rates, preferred=preferred, holder=holder, cached=cached, barred=barred)
        assert (None if choice is None else choice.engine.name) == expected
        if choice is not None and choice.engine.full and choice.engine is not holder:
            able = [one for group in pool.groups() for one in engines if one.kind == group.kind and one.name != barred]
            assert all(one.full for one in able), "nobody waits while an engine of whatever class has room"
    for engine in engines:
        for id_ in list(engine.in_flight):
            engine.take(id_)
        assert (engine.outstanding, engine.context) == (0, 0)
    assert all(group.in_flight == 0 for group in pool.groups())
