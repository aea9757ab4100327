"""Losses, corrections and KL terms against the papers' formulas, written down in float64 numpy, sequence by sequence;
gradients by finite differences of those."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from actors.trainer.algorithms.algorithm import Algorithm
from actors.trainer.algorithms.losses import policy_loss
from actors.trainer.algorithms.sampled import Sampled
from tests.trainer.algorithms.tensors import LENGTHS, LONGEST, flat, ours, random_case

TOLERANCE = 1e-6


class Row(NamedTuple):
    """One response: float64 [its length]. A formula is differentiated by ``new``, and holds ``now`` fixed."""

    new: np.ndarray
    now: np.ndarray
    behaviour: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    a: float


def gspo(row: Row) -> float:
    """min(s A, clip(s) A), s the geometric mean of the ratios."""
    s: float = float(np.prod(np.exp(row.new - row.behaviour))) ** (1 / len(row.new))
    return -min(s * row.a, min(max(s, 0.95), 1.1) * row.a)


def cispo(row: Row) -> float:
    """The weight is held fixed: sg[clip(r, 0.6, 1.5)] A log pi, mean over the response."""
    weight = np.clip(np.exp(row.now - row.behaviour), 0.6, 1.5)
    return float(-(weight * row.a * row.new).mean())


def sapo(row: Row) -> float:
    """4 / tau sigma(tau (r - 1)) A."""
    tau = 0.8 if row.a > 0 else 1.3
    gate = 4 / tau / (1 + np.exp(-tau * (np.exp(row.new - row.behaviour) - 1)))
    return float(-(gate * row.a).mean())


def topr(row: Row) -> float:
    """log pi(y) A for A >= 0, else sg[min(pi(y) / mu(y), 1)] log pi(y) A; / length, as "sequence" aggregation does."""
    weight = 1.0 if row.a >= 0 else min(math.exp(row.now.sum() - row.behaviour.sum()), 1.0)
    return float(-weight * row.a * row.new.mean())


def reinforce(row: Row) -> float:
    return float(-row.a * row.new.mean())


def truncated_reinforce(row: Row) -> float:
    """The importance weight of the trainer's policy before the step, at most 2."""
    return float(-(np.minimum(np.exp(row.old - row.behaviour), 2.0) * row.a * row.new).mean())


def k2(row: Row) -> float:
    """(log pi - log ref)^2 / 2, and no policy loss for there is no advantage."""
    return float((0.25 * (row.new - row.ref) ** 2 / 2).mean())


def k1(row: Row) -> float:
    """0.25 (log pi - log ref) less of an advantage."""
    return float(-((row.a - 0.25 * (row.behaviour - row.ref)) * row.new).mean())


def distilled(row: Row) -> float:
    """The score function's gradient of KL(pi || teacher): E[(log pi - log teacher) grad log pi]."""
    return float(((row.now - row.ref) * row.new).mean())


SEQUENCE: dict[str, Any] = {"aggregation": "sequence"}
CASES: list[tuple[str, Callable[[Row], float], dict[str, Any]]] = [
    ("gspo", gspo, {"loss": "gspo", "correction": "none", "clip_low": 0.05, "clip_high": 0.1}),
    ("cispo", cispo, {"loss": "cispo", "correction": "none", "clip_low": 0.4, "clip_high": 0.5}),
    ("sapo", sapo, {"loss": "sapo", "correction": "none", "sapo_positive": 0.8, "sapo_negative": 1.3}),
    ("topr", topr, {"loss": "topr", "correction": "none"}),
    ("reinforce", reinforce, {"loss": "reinforce", "correction": "none"}),
    ("reinforce with tis", truncated_reinforce, {"loss": "reinforce", "correction": "tis"}),
    ("k2", k2, {"loss": "reinforce", "correction": "none", "kl": "k2", "kl_coefficient": 0.25}),
    ("k1", k1, {"loss": "reinforce", "correction": "none", "kl": "k1", "kl_coefficient": 0.25}),
    ("distillation", distilled, {"loss": "reinforce", "correction": "none", "estimator": "distillation"}),
]


@pytest.mark.parametrize(("name", "formula", "parts"), CASES, ids=[name for name, _, _ in CASES])
def test_loss_and_gradient_equal_the_formula(name: str, formula: Callable[[Row], float], parts: dict[str, Any]) -> None:
    case = random_case(21)
    if name == "distillation":  # on policy: the policy that sampled is the one that is trained
        case = type(case)(case.mask, case.new, case.new, case.new, case.reference, case.advantage)
    changes: dict[str, Any] = {}
    advantage = case.advantage.numpy()
    if name == "k2":
        changes, advantage = {"advantage": torch.zeros(sum(LENGTHS), dtype=torch.float64)}, np.zeros(len(LENGTHS))
    loss, gradient, _ = ours(case, Algorithm(name="x", **SEQUENCE, **parts), **changes)

    def value(row: int, shift: tuple[int, float] | None = None) -> float:
        length = LENGTHS[row]
        new, now, behaviour, old, ref = (
            column[row, :length].numpy().copy()
            for column in (case.new, case.new, case.behaviour, case.old, case.reference)
        )
        if shift is not None:
            new[shift[0]] += shift[1]
        return formula(Row(new, now, behaviour, old, ref, float(advantage[row]))) / len(LENGTHS)

    assert abs(loss - sum(value(row) for row in range(len(LENGTHS)))) <= TOLERANCE
    step = 1e-6
    for row, length in enumerate(LENGTHS):
        for place in range(length):
            slope = (value(row, (place, step)) - value(row, (place, -step))) / (2 * step)
            assert abs(float(gradient[row, place]) - slope) <= TOLERANCE
    assert float(gradient.abs().max()) > 1e-3


def test_three_tokens_worked_by_hand() -> None:
    """Policy ratios 1.5, 0.5 and 1; importance weights 4 cut to 2, 0.5 and 1; clipping to [0.8, 1.3]."""
    new = torch.tensor([math.log(0.6), math.log(0.1), math.log(0.3)], requires_grad=True)
    old = torch.tensor([math.log(0.4), math.log(0.2), math.log(0.3)])
    behaviour = torch.tensor([math.log(0.1), math.log(0.4), math.log(0.3)])
    advantage, segment = torch.tensor([1.0, -3.0, 2.0]), torch.tensor([0, 0, 1])
    tokens = Sampled(new, old, behaviour, advantage, segment, 2)
    result = policy_loss(tokens, Algorithm(name="x", clip_low=0.2, clip_high=0.3, tis_cap=2.0))
    # Token 0: min(1.5, 1.3) = 1.3, times 2. Token 1: min(-1.5, 0.8 * -3) = -2.4, times 0.5. Token 2: 2, times 1.
    torch.testing.assert_close(result.loss.detach(), torch.tensor([-2.6, 1.2, -2.0]))
    result.loss.sum().backward()  # type: ignore[no-untyped-call]
    # Clipped tokens have no gradient; token 2's is -advantage * ratio * weight.
    torch.testing.assert_close(new.grad, torch.tensor([0.0, 0.0, -2.0]))
    torch.testing.assert_close(result.ratio, torch.tensor([6.0, 0.25, 1.0]))
    torch.testing.assert_close(result.kl, torch.tensor([5.0 - math.log(6.0), -0.75 + math.log(4.0), 0.0]))
    assert result.clipped.tolist() == [1.0, 1.0, 0.0]
    assert result.truncated.tolist() == [1.0, 0.0, 0.0]


def test_tokens_of_a_sequence_may_have_advantages_of_their_own_under_gspo() -> None:
    """Each token's gradient is its own advantage times the sequence's ratio (the paper's GSPO-token)."""
    case = random_case(22)
    own = torch.linspace(-1.0, 1.0, sum(LENGTHS), dtype=torch.float64)
    algorithm = Algorithm(
        name="x", loss="gspo", correction="none", clip_low=0.99, clip_high=100.0, aggregation="constant"
    )
    _, gradient, _ = ours(case, algorithm, advantage=own)
    start = 0
    for row, length in enumerate(LENGTHS):
        s = math.exp(float((case.new - case.behaviour)[row, :length].mean()))
        expected = -s * own[start : start + length] / (len(LENGTHS) * LONGEST)
        torch.testing.assert_close(gradient[row, :length], expected)
        start += length


def test_without_a_reference_an_algorithm_that_needs_one_is_refused() -> None:
    tokens = flat(random_case(1), reference=None)
    with pytest.raises(ValueError, match="x: log-probabilities of a reference are needed"):
        policy_loss(tokens, Algorithm(name="x", kl_coefficient=0.1))
