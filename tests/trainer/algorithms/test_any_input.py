"""Whatever the masks, ratios and lengths: losses and gradients are finite, or what is not finite shows."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from actors.settings import Aggregation, Correction, PolicyLoss
from actors.trainer.algorithms.aggregation import token_weights
from actors.trainer.algorithms.algorithm import Algorithm, AlgorithmError, check
from actors.trainer.algorithms.estimators import estimate
from actors.trainer.algorithms.losses import policy_loss
from actors.trainer.algorithms.sampled import Sampled

LOGPROB = st.floats(-1e4, 0.0, width=32) | st.sampled_from([0.0, -1e-6, -88.8, -700.0, -1e6])


@st.composite
def algorithms(draw: st.DrawFn) -> Algorithm:
    """Any combination that is not refused."""
    algorithm = Algorithm(
        name="any",
        loss=draw(st.sampled_from(get_args(PolicyLoss))),
        correction=draw(st.sampled_from(get_args(Correction))),
        aggregation=draw(st.sampled_from(get_args(Aggregation))),
        kl=draw(st.sampled_from(["k1", "k2", "k3"])),
        kl_coefficient=draw(st.sampled_from([0.0, 0.1])),
        off_policy_kl=draw(st.sampled_from([0.0, 0.1])),
        estimator=draw(st.sampled_from(["grpo", "distillation"])),
        clip_low=draw(st.sampled_from([0.0, 3e-4, 0.2])),
        length=8,
    )
    try:
        check(algorithm)
    except AlgorithmError:
        assume(False)
    return algorithm


@st.composite
def sampled(draw: st.DrawFn) -> Sampled:
    """Segments of 1 to 5 tokens in float32, as the backends have them."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    total = sum(lengths)

    def column(values: st.SearchStrategy[float]) -> torch.Tensor:
        return torch.tensor(draw(st.lists(values, min_size=total, max_size=total)), dtype=torch.float32)

    new = column(LOGPROB)
    return Sampled(
        new=new.requires_grad_(),
        old=new.detach() if draw(st.booleans()) else column(LOGPROB),
        behaviour=column(LOGPROB),
        advantage=column(st.floats(-3.0, 3.0, width=32)),
        segment=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        segments=len(lengths),
        reference=column(LOGPROB),
    )


@settings(deadline=None, max_examples=150)
@given(tokens=sampled(), algorithm=algorithms())
def test_no_log_probabilities_make_a_loss_or_a_gradient_that_is_not_finite(
    tokens: Sampled, algorithm: Algorithm
) -> None:
    result = policy_loss(tokens, algorithm)
    names = [str(i) for i in range(tokens.segments)]
    counts = torch.bincount(tokens.segment, minlength=tokens.segments).tolist()
    weights = token_weights(names, counts, algorithm.aggregation, algorithm.length)
    assert np.isfinite(weights).all()
    (result.loss * torch.from_numpy(weights.astype(np.float32))[tokens.segment]).sum().backward()  # type: ignore[no-untyped-call]
    assert tokens.new.grad is not None
    assert bool(tokens.new.grad.isfinite().all())
    assert bool(result.loss.isfinite().all())
    for figures in (result.ratio, result.kl, result.clipped, result.truncated):
        assert bool(figures.isfinite().all())


@pytest.mark.parametrize("loss", get_args(PolicyLoss))
@pytest.mark.parametrize("broken", ["new", "advantage"])
def test_what_is_not_a_number_shows_in_its_tokens_loss(loss: Any, broken: str) -> None:
    values = {"new": [-1.0, -2.0, -0.5], "advantage": [1.0, -1.0, 2.0]}
    values[broken][0] = float("nan")
    tokens = Sampled(
        new=torch.tensor(values["new"], requires_grad=True),
        old=torch.tensor(values["new"]),
        behaviour=torch.tensor([-1.1, -1.9, -0.5]),
        advantage=torch.tensor(values["advantage"]),
        segment=torch.tensor([0, 1, 1]),
        segments=2,
    )
    correction: Any = "none" if loss in ("topr", "gspo") else "tis"
    finite = policy_loss(tokens, Algorithm(name="x", loss=loss, correction=correction)).loss.isfinite()
    assert finite.tolist() == [False, True, True]


REWARD = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, -1.0, 1e-300])


@settings(deadline=None, max_examples=150)
@given(data=st.data(), groups=st.integers(0, 4), members=st.integers(2, 5))
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gigpo"])
def test_advantages_are_finite_and_nothing_for_groups_that_score_alike(
    estimator: Any, data: st.DataObject, groups: int, members: int
) -> None:
    cells = groups * members
    rewards = np.array(data.draw(st.lists(REWARD, min_size=cells, max_size=cells))).reshape(groups, members)
    lengths = np.array(data.draw(st.lists(st.integers(0, 9), min_size=cells, max_size=cells))).reshape(rewards.shape)
    result = estimate(rewards, lengths, Algorithm(name="x", estimator=estimator))
    assert result.shape == rewards.shape
    assert np.isfinite(result).all()
    if estimator != "reinforce_pp":
        assert not result[np.ptp(rewards, axis=1) == 0].any() or estimator == "reinforce_pp_baseline"
    if groups and np.ptp(rewards) == 0:
        assert not result.any()
