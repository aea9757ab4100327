"""A replay's figures and turns, from inspections made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actors.env.recorder import TrajectoryRecorder
from actors.env.tokenizers import ByteTokenizer
from actors.settings import TrainSettings
from actors.trainer.backends.protocol import Inspection
from actors.trainer.batching import make_batch
from actors.trainer.messages import InspectedGroups
from actors.trajectory import Trajectory
from coordinator.replay import replayed, turns_of


def trajectory(ticket: str, reward: float) -> Trajectory:
    """Two turns: "map" -> "R", "b1" -> "xy"; in a second segment a third: "b2" -> "L"."""
    recorder = TrajectoryRecorder(ticket, group=4, task=4, temperature=1.0)

    def said(text: str, *logprobs: float, allowed: tuple[int, ...] | None = None) -> None:
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        recorder.sampled(ids, np.array(logprobs), np.full(len(ids), 7), allowed, text)

    recorder.start(np.array([109]), "map")
    said("R", -1.0, allowed=(76, 82))
    recorder.observed(np.array([98, 49]), "b1")
    said("xy", -2.0, -3.0)
    recorder.start(np.array([98, 50]), "b2")
    said("L", -4.0)
    return recorder.finish(env_return=reward, reward=reward, success=reward > 0)


def inspection(gradient: float = 0.5) -> Inspection:
    """Of two such trajectories, each of segments of 6 and 3 tokens (1 + 1 + 2 + 2 and 2 + 1)."""
    logprobs = [np.array([0, -1.5, 0, 0, -2, -3], np.float32), np.array([0, 0, -3.5], np.float32)] * 2
    ratios = [np.array([1, 0.6, 1, 1, 1, 1], np.float32), np.array([1, 1, 1.6], np.float32)] * 2
    losses = [np.array([0, 0.1, 0, 0, 0.2, 0.3], np.float32), np.array([0, 0, 0.4], np.float32)] * 2
    norms = {"a": gradient, "b": 0.25}
    return Inspection([x.copy() for x in logprobs], ratios, [x.copy() for x in losses], norms, 0.75)


def inspected(groups: list[list[Trajectory]], found: Inspection) -> InspectedGroups:
    return InspectedGroups(make_batch(groups, TrainSettings(scale_advantages=False), strict=False), found)


def test_figures_are_means_and_extremes_over_sampled_tokens() -> None:
    groups = [[trajectory("a", 1.0), trajectory("b", 0.0)]]
    result = replayed(groups, inspected(groups, inspection()))
    assert (result.loss, result.gradient_norm, result.tokens) == pytest.approx((2.0, 0.75, 8))
    first, second = result.trajectories
    assert (first.ticket, first.group, first.tokens, first.success) == ("a", 4, 4, True)
    assert (first.reward, first.advantage, second.advantage) == (1.0, 0.5, -0.5)
    assert first.logprob_rollout == pytest.approx((-1 - 2 - 3 - 4) / 4)
    assert first.logprob == pytest.approx((-1.5 - 2 - 3 - 3.5) / 4)
    assert (first.ratio_mean, first.ratio_min, first.ratio_max) == pytest.approx(((0.6 + 1 + 1 + 1.6) / 4, 0.6, 1.6))
    assert (first.loss, first.gradient_norm) == pytest.approx((1.0, 0.5))
    assert result.first_not_finite is None


def test_the_first_figure_that_is_not_finite_is_named_with_its_token() -> None:
    groups = [[trajectory("a", 1.0), trajectory("b", 0.0)]]
    found = inspection()
    found.losses[2][4] = found.logprobs[2][4] = np.nan  # of b: "x"
    found.logprobs[3][2] = np.inf
    result = replayed(groups, inspected(groups, found))
    assert str(result.first_not_finite) == (
        "trajectory b, segment 0, position 4 (token 120): the log-probability is nan"
    )
    assert math.isnan(result.loss)


def test_a_reward_that_is_no_number_comes_before_what_follows_from_it() -> None:
    groups = [[trajectory("a", 1.0), trajectory("b", math.nan)]]
    found = inspection(gradient=math.nan)
    result = replayed(groups, inspected(groups, found))
    assert str(result.first_not_finite) == "trajectory a: the advantage is nan"  # the whole group's
    assert math.isnan(result.trajectories[1].advantage)


def test_a_gradient_that_is_not_finite_is_named_where_all_tokens_are() -> None:
    groups = [[trajectory("a", 1.0), trajectory("b", 0.0)]]
    result = replayed(groups, inspected(groups, inspection(gradient=math.inf)))
    assert str(result.first_not_finite) == "trajectory a: the gradient's norm is inf"


def test_a_trajectory_is_told_turn_by_turn() -> None:
    turns = turns_of(trajectory("b", 0.0), inspection(), 2, ByteTokenizer())
    assert [(turn.observation, turn.action) for turn in turns] == [("map", "R"), ("b1", "xy"), ("b2", "L")]
    (r,), (x, y), (last,) = (turn.tokens for turn in turns)
    assert (r.position, r.id, r.text, r.allowed, r.version) == (1, 82, "R", 2, 7)
    assert (r.logprob_rollout, r.logprob, r.ratio, r.loss) == pytest.approx((-1.0, -1.5, 0.6, 0.1))
    assert (x.position, y.position, x.allowed) == (4, 5, None)
    assert (last.position, last.logprob) == (2, -3.5)
