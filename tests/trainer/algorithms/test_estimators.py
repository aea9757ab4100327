"""Advantages against hand-worked numbers and the papers' formulas."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from actors.trainer.algorithms.algorithm import Algorithm
from actors.trainer.algorithms.estimators import advantages, estimate, generalised, leave_one_out, normalised, overlong

RNG = np.random.default_rng(3)


def test_grpo_is_rewards_minus_the_group_mean_over_the_sample_deviation() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 0.0], [2.0, 4.0, 4.0, 6.0]])
    # Row 0: mean 1/4, variance ((3/4)^2 + 3 (1/4)^2) / 3 = 1/4. Row 1: mean 4, variance (4 + 4) / 3.
    expected = np.array([[1.5, -0.5, -0.5, -0.5], [-2.0 / math.sqrt(8 / 3), 0.0, 0.0, 2.0 / math.sqrt(8 / 3)]])
    np.testing.assert_allclose(advantages(rewards, scale=True, epsilon=0.0), expected, rtol=1e-12)
    np.testing.assert_allclose(advantages(rewards, scale=False, epsilon=9.0)[0], [0.75, -0.25, -0.25, -0.25])


def test_epsilon_is_added_to_the_deviation() -> None:
    # Deviation of (0, 1) is sqrt(1/2); centred rewards are -+1/2.
    expected = 0.5 / (math.sqrt(0.5) + 0.25)
    np.testing.assert_allclose(advantages(np.array([[0.0, 1.0]]), scale=True, epsilon=0.25), [[-expected, expected]])


def test_a_group_that_scores_alike_has_exactly_no_advantage() -> None:
    alike = np.full((1, 3), 0.1)
    assert not advantages(alike, scale=True, epsilon=1e-6).any()
    assert not leave_one_out(alike).any()
    assert not normalised(alike, np.array([[1, 2, 3]]), epsilon=1e-6).any()


@pytest.mark.parametrize(
    ("rewards", "message"),
    [(np.zeros((3, 1)), "2 or more members"), (np.array([[0.0, np.nan]]), "group 0, member 1 is nan")],
)
def test_rewards_that_cannot_be_compared_are_refused(rewards: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantages(rewards, scale=True, epsilon=1e-6)


def test_no_groups_have_no_advantages() -> None:
    for estimator in ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gigpo", "distillation"):
        nothing = np.zeros((0, 4))
        assert estimate(nothing, nothing, Algorithm(name="x", estimator=estimator)).shape == (0, 4)


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards = RNG.normal(size=(5, 4))
    expected = [
        [own - statistics.fmean(other for j, other in enumerate(row) if j != i) for i, own in enumerate(row)]
        for row in rewards.tolist()
    ]
    np.testing.assert_allclose(leave_one_out(rewards), expected, atol=1e-12)


def test_reinforce_pp_normalises_over_all_tokens_of_the_batch() -> None:
    rewards, lengths = RNG.normal(size=(3, 4)), RNG.integers(1, 6, (3, 4))
    tokens = [r for r, n in zip(rewards.ravel().tolist(), lengths.ravel().tolist(), strict=True) for _ in range(n)]
    mean, deviation = statistics.fmean(tokens), statistics.pstdev(tokens)
    expected = (rewards - mean) / (deviation + 1e-6)
    ours = estimate(rewards, lengths, Algorithm(name="x", estimator="reinforce_pp", advantage_epsilon=1e-6))
    np.testing.assert_allclose(ours, expected, atol=1e-10)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    baseline = estimate(rewards, lengths, Algorithm(name="x", estimator="reinforce_pp_baseline"))
    again = estimate(centred, lengths, Algorithm(name="x", estimator="reinforce_pp"))
    np.testing.assert_allclose(baseline, again, atol=1e-10)


def test_overlong_answers_lose_reward_linearly_over_the_last_part() -> None:
    """DAPO's own figures: 20,480 tokens at most, of which the last 4,096 are punished."""
    algorithm = Algorithm(name="x", length=20_480, overlong_share=0.2)
    lengths = np.array([[1, 16_384, 17_408, 18_432, 20_480, 30_000]])
    np.testing.assert_allclose(overlong(lengths, algorithm), [[0.0, 0.0, -0.25, -0.5, -1.0, -1.0]], atol=1e-12)
    shaped = estimate(np.zeros((1, 6)), lengths, algorithm)
    assert shaped[0, 0] == shaped[0, 1] > 0 > shaped[0, 4]


@pytest.mark.parametrize(("gamma", "decay"), [(1.0, 1.0), (0.9, 0.95), (0.99, 0.0)])
def test_gae_is_the_discounted_sum_of_temporal_differences(gamma: float, decay: float) -> None:
    rewards, values = RNG.normal(size=7), RNG.normal(size=7)
    following = [*values[1:], 0.0]
    expected = [
        sum((gamma * decay) ** (k - t) * (rewards[k] + gamma * following[k] - values[k]) for k in range(t, 7))
        for t in range(7)
    ]
    np.testing.assert_allclose(generalised(rewards, values, gamma=gamma, decay=decay), expected, atol=1e-12)
    assert generalised(rewards[:0], values[:0], gamma=gamma, decay=decay).shape == (0,)
    one = generalised(rewards[:1], values[:1], gamma=gamma, decay=decay)
    np.testing.assert_allclose(one, [rewards[0] - values[0]])
