"""From groups of trajectories to arrays: advantages, allowed sets, and the tokens that were sampled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.env.recorder import TrajectoryRecorder
from actors.settings import TrainSettings
from actors.trainer.backends.protocol import TrainBatch
from actors.trainer.batching import BadGroup, make_batch
from actors.trainer.store import TrajectoryStore, write_records
from tests.trainer_actor.support import Sampled, ids, trajectory

PLAIN = TrainSettings(scale_advantages=False)


def test_advantages_are_those_of_the_group() -> None:
    groups = [
        [trajectory("a", reward=1.0), trajectory("b", reward=0.0)],
        [trajectory("c", reward=3.0), trajectory("d", reward=3.0)],
    ]
    batch = make_batch(groups, PLAIN)
    assert [(s.ticket, s.advantage) for s in batch.sequences] == [("a", 0.5), ("b", -0.5), ("c", 0.0), ("d", 0.0)]
    # The sample's standard deviation of (1, 0) is sqrt(1/2).
    scaled = make_batch(groups, TrainSettings(scale_advantages=True, advantage_epsilon=1e-12))
    assert [s.advantage for s in scaled.sequences[:2]] == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_every_segment_carries_the_advantage_of_its_trajectory() -> None:
    recorder = TrajectoryRecorder("two", 0, 0, 1.0)
    for token in (5, 6):
        recorder.start(ids(1), "x")
        recorder.sampled(ids(token), np.array([-1.0], np.float32), ids(0), None, "y")
    two = recorder.finish(env_return=2.0, reward=2.0, success=True)
    batch = make_batch([[two, trajectory("one", reward=0.0)]], PLAIN)
    assert [(s.ticket, s.advantage) for s in batch.sequences] == [("two", 1.0), ("two", 1.0), ("one", -1.0)]


def test_allowed_sets_are_shared_over_the_batch_and_every_token_keeps_its_own() -> None:
    mixed = TrajectoryRecorder("mixed", 0, 0, 1.0)
    mixed.start(ids(1), "x")
    for token, allowed in ((7, (7, 9)), (5, (4, 5)), (3, None)):
        mixed.sampled(ids(token), np.array([-1.0], np.float32), ids(0), allowed, "y")
    batch = make_batch([[trajectory("a", allowed=(4, 5)), mixed.finish(env_return=0, reward=0, success=False)]], PLAIN)
    assert [ids_.tolist() for ids_ in batch.allowed_sets] == [[4, 5], [7, 9]]
    assert batch.sequences[0].allowed.tolist() == [-1, -1, 0]
    assert batch.sequences[1].allowed.tolist() == [-1, 1, 0, -1]  # its own sets were numbered the other way round


def test_a_group_without_any_mask_needs_no_sets() -> None:
    batch = make_batch([[trajectory("a", allowed=None), trajectory("b", allowed=None)]], PLAIN)
    assert batch.allowed_sets == []
    assert batch.sequences[0].allowed.tolist() == [-1, -1, -1]


def test_a_reward_that_is_not_finite_is_refused_by_name() -> None:
    with pytest.raises(BadGroup, match=r"not finite: b, d$"):
        make_batch(
            [
                [trajectory("a"), trajectory("b", reward=float("nan"))],
                [trajectory("c"), trajectory("d", reward=np.inf)],
            ],
            PLAIN,
        )


def test_groups_of_different_sizes_are_refused() -> None:
    with pytest.raises(BadGroup, match=r"expected groups of one size, found sizes \[1, 2\]"):
        make_batch([[trajectory("a")], [trajectory("b"), trajectory("c")]], PLAIN)


def test_what_is_trained_on_is_what_was_sampled_over_1000_trajectories(tmp_path: Path) -> None:
    """Recorder -> store -> a checkpoint's copy -> a store that starts from it -> batch: ids byte for byte."""
    chance = np.random.default_rng(11)
    sampled = [Sampled(f"t{index}", chance) for index in range(1_000)]
    store = TrajectoryStore(tmp_path / "log")
    for one in sampled:
        store.put(one.trajectory)
    write_records(tmp_path / "copy", store.held())
    again = TrajectoryStore(tmp_path / "resumed", start_from=tmp_path / "copy")
    groups = [[again.get(f"t{index + member}") for member in range(4)] for index in range(0, 1_000, 4)]
    batch = make_batch(groups, PLAIN)

    expected = [segment for one in sampled for segment in one.tokens]
    assert len(batch.sequences) == len(expected)
    for index, (tokens, sequence) in enumerate(zip(expected, batch.sequences, strict=True)):
        mask = sequence.loss_mask == 1
        assert sequence.tokens[mask].astype("<i4").tobytes() == np.array([t[0] for t in tokens], "<i4").tobytes(), index
        apart = np.abs(sequence.logprobs[mask].astype(np.float64) - [t[1] for t in tokens])
        assert apart.max(initial=0.0) <= 2.0**-16, index
        assert allowed_of(batch, index) == [t[3] for t in tokens], index


def allowed_of(batch: TrainBatch, index: int) -> list[tuple[int, ...] | None]:
    sequence = batch.sequences[index]
    numbers = sequence.allowed[sequence.loss_mask == 1].tolist()
    return [None if number < 0 else tuple(batch.allowed_sets[number].tolist()) for number in numbers]
