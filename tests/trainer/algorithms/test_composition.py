"""Presets, what a job says instead, what is refused, and weights of tokens over a batch."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from actors.settings import AlgorithmName, TrainSettings
from actors.trainer.algorithms.aggregation import batch_weights, token_weights
from actors.trainer.algorithms.algorithm import Algorithm, AlgorithmError
from actors.trainer.algorithms.presets import PRESETS, all_of, resolve


def test_every_name_is_a_preset_of_that_name() -> None:
    assert set(get_args(AlgorithmName)) == set(PRESETS)
    assert all(preset.name == name for name, preset in PRESETS.items())


@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_every_preset_can_be_trained(name: Any) -> None:
    settings = TrainSettings(algorithm=name, reference="initial" if name == "distillation" else None)
    assert [algorithm.name for algorithm in all_of(settings)] == [name]


def test_the_keys_of_a_job_replace_parts_of_the_preset() -> None:
    algorithm = resolve(TrainSettings(algorithm="dapo", clip_high=0.5, correction="icepop", length=40))
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.correction) == (0.2, 0.5, "icepop")
    assert (algorithm.length, algorithm.overlong_share) == (40, 0.2)


def test_a_stream_has_an_algorithm_of_its_own() -> None:
    settings = TrainSettings(algorithm="grpo", algorithms={"sums": "cispo"})
    assert [resolve(settings, stream).name for stream in ("", "lake", "sums")] == ["grpo", "grpo", "cispo"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (TrainSettings(algorithm="topr", correction="tis"), "correction: topr's loss"),
        (TrainSettings(algorithm="gspo", correction="icepop"), "correction: gspo's ratio"),
        (TrainSettings(clip_low=1.5), "clip_low: a ratio is never below 0"),
        (TrainSettings(clip_high=-0.1), "clip_high: expected 0 or more, found -0.1"),
        (TrainSettings(tis_cap=0.0), "tis_cap: expected a number above 0, found 0"),
        (TrainSettings(gamma=1.5), "gamma: expected a number from 0 to 1, found 1.5"),
        (TrainSettings(mask_low=6.0), "mask_low: expected less than mask_high"),
        (TrainSettings(kl_coefficient=0.1), "reference: grpo compares with a reference"),
        (TrainSettings(group_size=1), "group_size: grpo compares the members"),
        (TrainSettings(algorithm="ppo", backend="megatron"), r"estimator: gae \(of ppo\) needs a critic"),
        (TrainSettings(reference="initial", backend="megatron"), "reference: only the torch backend keeps one"),
    ],
)
def test_parts_that_do_not_go_together_are_refused_by_key(settings: TrainSettings, message: str) -> None:
    with pytest.raises(AlgorithmError, match=f"^{message}"):
        all_of(settings)


def test_reinforce_pp_needs_no_group() -> None:
    all_of(TrainSettings(algorithm="reinforce_pp", group_size=1))


def test_token_aggregation_weighs_every_token_of_the_batch_alike() -> None:
    np.testing.assert_allclose(token_weights(["a", "b", "b"], [1, 2, 5], "token"), [1 / 8] * 3)


def test_sequence_aggregation_weighs_every_trajectory_alike_over_all_its_segments() -> None:
    # Trajectory a has 1 token: 1/2 of the loss. b has 2 + 6 in two segments: 1/2 over 8 tokens.
    np.testing.assert_allclose(token_weights(["b", "a", "b"], [2, 1, 6], "sequence"), [1 / 16, 1 / 2, 1 / 16])


def test_constant_aggregation_does_not_look_at_lengths() -> None:
    np.testing.assert_allclose(token_weights(["b", "a", "b"], [2, 1, 6], "constant", 10), [1 / 20] * 3)
    with pytest.raises(AlgorithmError, match="length: constant aggregation"):
        token_weights(["a"], [1], "constant")


def test_algorithms_share_a_batch_by_their_trajectories() -> None:
    """Three trajectories of a (token: 1 + 3 + 4 tokens), one of b (sequence: 2 tokens)."""
    algorithms = [Algorithm(name="a"), Algorithm(name="b", aggregation="sequence")]
    weights = batch_weights(["p", "q", "r", "s"], [1, 3, 4, 2], [0, 0, 0, 1], algorithms)
    np.testing.assert_allclose(weights, [3 / 4 / 8] * 3 + [1 / 4 / 2])
    assert batch_weights([], [], [], algorithms).shape == (0,)
