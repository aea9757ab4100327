"""What a class reaches, fitted to reports that were made up from known efficiencies."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwprobe.cost import EFFICIENCY, ModelSize, device_cost
from hwprobe.costmodel import CostModel, CostStateRefused, decode_state, encode_state
from hwprobe.fitting import ClassFit, Work, prior_of

MODEL = ModelSize()
H20 = device_cost("H20", MODEL)


def reports(
    count: int, compute: float, bandwidth: float, *, seed: int = 0, noise: float = 0.0, prefill: float = 1.0
) -> list[Work]:
    """Of engines that are so many times slower than the prior says, about a second of each kind of work."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        tokens = chance.uniform(0, 5000) * prefill
        steps, batch, length = chance.randrange(1, 60), chance.randrange(1, 8), chance.uniform(100, 4000)
        seconds = compute * H20.prefill_s(MODEL, tokens) + bandwidth * steps * H20.step_s(MODEL, batch, length)
        made.append(
            Work(
                busy_s=seconds * chance.uniform(1 - noise, 1 + noise),
                prefill_tokens=tokens,
                steps=steps,
                decode_tokens=steps * batch,
                context_tokens=steps * batch * length,
            )
        )
    return made


def fitted(works: list[Work], start: ClassFit | None = None) -> ClassFit:
    fit = start or prior_of("H20", MODEL)
    for work in works:
        fit = fit.after(MODEL, work)
    return fit


def test_without_a_report_a_class_reaches_what_is_known_of_it() -> None:
    assert prior_of("H20", MODEL).cost() == H20
    assert prior_of("H20", MODEL).reached() == EFFICIENCY["H20"]


@pytest.mark.parametrize(("compute", "bandwidth"), [(1.0, 1.0), (2.0, 1.0), (0.9, 1.8), (150.0, 40.0)])
def test_the_efficiencies_are_found_whatever_the_prior_is(compute: float, bandwidth: float) -> None:
    fit = fitted(reports(200, compute, bandwidth, noise=0.1))
    assert fit.compute == pytest.approx(compute, rel=0.1)
    assert fit.bandwidth == pytest.approx(bandwidth, rel=0.15)
    assert fit.cost().prefill_s(MODEL, 1000) == pytest.approx(fit.compute * H20.prefill_s(MODEL, 1000))


def test_what_reports_say_nothing_of_stays_at_the_prior() -> None:
    """Nothing but decoding, at half the bandwidth."""
    fit = fitted(reports(100, 1.0, 2.0, prefill=0.0))
    assert fit.bandwidth == pytest.approx(2.0, rel=0.03)
    assert fit.compute == pytest.approx(1.0, rel=0.01)


def test_single_reports_that_are_far_off_hardly_count() -> None:
    """Every tenth took 20 times as long: the process was not scheduled."""
    works = reports(200, 1.0, 1.0)
    stalled = [msgspec.structs.replace(w, busy_s=w.busy_s * 20) if i % 10 == 9 else w for i, w in enumerate(works)]
    fit = fitted(stalled)
    assert fit.compute == pytest.approx(1.0, rel=0.1)
    assert fit.bandwidth == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("times", [1.5, 3.0, 10.0])
def test_a_class_that_has_become_slower_is_found_out_within_thirty_reports(times: float) -> None:
    before = fitted(reports(300, 1.0, 1.0, noise=0.1))
    fit = fitted(reports(30, times, times, seed=1, noise=0.1), before)
    assert fit.compute == pytest.approx(times, rel=0.15)
    assert fit.bandwidth == pytest.approx(times, rel=0.15)


def test_large_batches_on_little_arithmetic_are_bound_by_it() -> None:
    """128 short sequences on an H20: 2 x 8.2e9 x 128 FLOP take 17.7 ms, 16.4 GB and the caches 5.4 ms."""
    work = Work(busy_s=1.0, steps=10, decode_tokens=1280, context_tokens=10 * 128 * 50)
    compute_s, bandwidth_s = prior_of("H20", MODEL).seconds(MODEL, work)
    assert compute_s == pytest.approx(10 * 2 * 8.2e9 * 128 / (0.8 * 148e12))
    assert bandwidth_s == 0.0


def test_a_class_without_a_data_sheet_is_learned_from_nothing() -> None:
    """A CPU: the same work takes 3 s a report, half of it each."""
    work = Work(busy_s=3.0, prefill_tokens=100, steps=10, decode_tokens=10, context_tokens=1000)
    fit = prior_of("CPU", MODEL)
    for _ in range(60):
        fit = fit.after(MODEL, work)
    assert fit.expected_s(MODEL, work) == pytest.approx(3.0, rel=0.05)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            Work,
            busy_s=st.floats(0, 1e6),
            prefill_tokens=st.floats(0, 1e7),
            steps=st.floats(0, 1e5),
            decode_tokens=st.floats(0, 1e7),
            context_tokens=st.floats(0, 1e10),
        ),
        max_size=30,
    )
)
def test_whatever_is_reported_the_fit_stays_finite_and_positive(works: list[Work]) -> None:
    fit = fitted(works)
    assert 1e-4 <= fit.compute <= 1e5
    assert 1e-4 <= fit.bandwidth <= 1e5
    assert fit.reached().compute <= 1 + 1e-9, "nothing exceeds the peaks of its data sheet"
    assert fit.reached().bandwidth <= 1 + 1e-9


def test_what_one_factor_cannot_account_for_within_the_peak_is_the_others() -> None:
    """An engine that decodes slowly, and whose prompts take less than no time: 0.8 of the peak becomes 1, no more."""
    work = Work(
        busy_s=2 * 20 * H20.step_s(MODEL, 4, 1000),
        prefill_tokens=4000,
        steps=20,
        decode_tokens=80,
        context_tokens=80_000,
    )
    plain = msgspec.structs.replace(work, busy_s=2.5 * work.busy_s, prefill_tokens=0)
    fit = fitted([work, plain] * 100)
    assert fit.reached().compute == pytest.approx(1.0)
    assert fit.bandwidth > 1.5


def test_a_class_without_a_data_sheet_has_no_peak() -> None:
    """A guess of 1e11 FLOP/s, and a device that has ten times as many."""
    fit = prior_of("CPU", MODEL)
    work = Work(busy_s=2 * 8.2e9 * 1000 / 1e12, prefill_tokens=1000)
    for _ in range(60):
        fit = fit.after(MODEL, work)
    assert fit.compute == pytest.approx(0.1, rel=0.05)


# ---- the whole model ------------------------------------------------------------------------------------------------


def learned() -> CostModel:
    model = CostModel.prior(MODEL, ["H20", "H800", "CPU"])
    for work in reports(60, 2.0, 2.0):
        model.worked("H20", work)
    for number in range(10):
        name = f"t{number}"
        model.demand.asked("math", name, 300, 0.0)
        model.demand.answered(name, 200, 4.0)
        model.demand.ended(name)
    return model


def test_a_trajectory_costs_what_its_tokens_cost_at_what_the_class_reaches() -> None:
    """Twice as long as the data sheet says; 200 tokens in a batch of 4, 400 tokens long on average."""
    model = learned()
    cost = model.seconds("math", "H20", batch=4)
    assert cost.prefill_s == pytest.approx(2 * H20.prefill_s(MODEL, 300), rel=0.05)
    assert cost.decode_s == pytest.approx(2 * 200 * H20.step_s(MODEL, 4, 400) / 4, rel=0.05)
    assert cost.seconds == cost.prefill_s + cost.decode_s
    with pytest.raises(KeyError):
        model.seconds("chess", "H20", batch=4)


def test_what_is_kept_is_read_back_whole() -> None:
    state = learned().state()
    assert decode_state(encode_state(state), "here") == state
    again = CostModel(decode_state(encode_state(state), "here"))
    assert again.engine("H20") == learned().engine("H20")
    assert again.shapes() == learned().shapes()


def test_what_newer_software_kept_and_what_is_damaged_is_refused_by_name() -> None:
    newer = encode_state(msgspec.structs.replace(learned().state(), format=2))
    with pytest.raises(CostStateRefused, match=r"cost\.json: a cost model of format 2; this software reads format 1"):
        decode_state(newer, "cost.json")
    with pytest.raises(CostStateRefused, match=r"cost\.json: expected the state of a cost model, found"):
        decode_state(encode_state(learned().state())[:-20], "cost.json")
