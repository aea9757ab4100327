"""Step-level groups against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actors.settings import TrainSettings
from actors.trainer.algorithms.gigpo import states_of, turn_advantages, turn_returns, turns_of
from actors.trainer.batching import make_batch
from actors.trajectory import FULL_VOCABULARY, Segment, Trajectory


def test_a_turns_return_is_discounted_by_the_turns_after_it() -> None:
    np.testing.assert_allclose(turn_returns(2.0, 3, 0.5), [0.5, 1.0, 2.0])
    assert turn_returns(1.0, 0, 0.5).shape == (0,)


def test_turns_are_compared_where_they_began_in_the_same_state() -> None:
    """Both begin in s; a has state p twice, b has q alone."""
    states, returns = [["s", "p", "p"], ["s", "q"]], [np.array([0.25, 0.5, 1.0]), np.array([0.75, 9.0])]
    plain = turn_advantages(states, returns, scale=False, epsilon=0.0)
    np.testing.assert_allclose(plain[0], [-0.25, -0.25, 0.25])
    np.testing.assert_allclose(plain[1], [0.25, 0.0])
    scaled = turn_advantages(states, returns, scale=True, epsilon=0.0)
    # The sample deviation of two numbers is their distance over the root of 2.
    np.testing.assert_allclose(scaled[0], np.array([-1, -1, 1]) / math.sqrt(2))


def test_turns_that_are_worth_the_same_have_exactly_no_advantage() -> None:
    result = turn_advantages([["s"], ["s"], ["s"]], [np.array([0.1])] * 3, scale=True, epsilon=1e-6)
    assert not np.concatenate(result).any()


def test_what_was_seen_before_each_action_is_its_state() -> None:
    transcript = [
        ("observation", "map"),
        ("action", "R"),
        ("observation", "b1"),
        ("action", "L"),
        ("observation", "end"),
    ]
    assert states_of(transcript) == ["map", "b1"]


def test_turns_are_runs_of_sampled_tokens_counted_over_segments() -> None:
    first, second = turns_of([np.array([0, 1, 1, 0, 1]), np.array([0, 0, 1])])
    assert first.tolist() == [-1, 0, 0, -1, 1]
    assert second.tolist() == [-1, -1, 2]


def player(ticket: str, moves: list[tuple[str, int]], reward: float) -> Trajectory:
    """``moves``: the state before each, and how many tokens it took; a prompt token before each."""
    mask = np.concatenate([[0, *[1] * tokens] for _, tokens in moves]).astype(np.uint8)
    size = len(mask)
    segment = Segment(
        tokens=np.arange(size, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(size, np.float32),
        versions=np.zeros(size, np.int32),
        allowed=np.full(size, FULL_VOCABULARY, np.int32),
    )
    transcript = [pair for state, _ in moves for pair in (("observation", state), ("action", "x"))]
    return Trajectory(ticket, 0, 0, 0, 1.0, [segment], [], len(moves), reward, reward, reward > 0, transcript)


def test_a_batch_has_the_advantages_of_turns_beside_the_trajectorys() -> None:
    """Rewards 1 and 0: trajectories +-1/2. In s returns are 1/2 and 0, so +-1/4; p and q were each seen once."""
    group = [player("a", [("s", 2), ("p", 1)], 1.0), player("b", [("s", 1), ("q", 1)], 0.0)]
    settings = TrainSettings(algorithm="gigpo", gamma=0.5, step_weight=2.0, scale_advantages=False)
    batch = make_batch([group], settings)
    first, second = (sequence.token_advantages for sequence in batch.sequences)
    assert first is not None
    assert second is not None
    np.testing.assert_allclose(first, [0, 1.0, 1.0, 0, 0.5])
    np.testing.assert_allclose(second, [0, -1.0, 0, -0.5])


def test_a_transcript_that_does_not_fit_the_tokens_is_refused_by_name() -> None:
    broken = player("b", [("s", 1)], 0.0)
    broken.transcript.append(("action", "y"))
    with pytest.raises(ValueError, match="b: tokens of 1 turns, the transcript has 2 actions"):
        make_batch([[player("a", [("s", 1)], 1.0), broken]], TrainSettings(algorithm="gigpo"))
