"""Recording an episode token by token."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.env.recorder import RecorderError, TrajectoryRecorder, check_trajectory
from actors.trajectory import Trajectory


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def two_turns() -> TrajectoryRecorder:
    recorder = TrajectoryRecorder("t1", group=4, task=9, temperature=0.5)
    recorder.start(ids(10, 11), "map")
    recorder.sampled(ids(5), np.array([-0.5], np.float32), ids(3), (4, 5), "R")
    recorder.observed(ids(12, 13), "0,1>")
    recorder.sampled(ids(7, 6), np.array([-1.0, -2.0], np.float32), ids(3, 4), None, "DU")
    return recorder


def test_a_trajectory_holds_the_tokens_in_the_order_in_which_they_came() -> None:
    recorder = two_turns()
    assert (recorder.turns, recorder.sampled_tokens, recorder.initiating_version) == (2, 3, 3)
    recorder.observed(ids(), "3,3>")
    trajectory = recorder.finish(env_return=1.0, reward=2.0, success=True)
    (segment,) = trajectory.segments
    assert segment.tokens.tolist() == [10, 11, 5, 12, 13, 7, 6]
    assert segment.loss_mask.tolist() == [0, 0, 1, 0, 0, 1, 1]
    assert segment.logprobs.tolist() == [0, 0, -0.5, 0, 0, -1, -2]
    assert segment.versions.tolist() == [-1, -1, 3, -1, -1, 3, 4]
    assert segment.allowed.tolist() == [-1, -1, 0, -1, -1, -1, -1]
    assert [s.tolist() for s in trajectory.allowed_sets] == [[4, 5]]
    assert (trajectory.initiating_version, trajectory.turns, trajectory.sampled_tokens) == (3, 2, 3)
    assert (trajectory.ticket, trajectory.group, trajectory.task, trajectory.temperature) == ("t1", 4, 9, 0.5)
    assert (trajectory.env_return, trajectory.reward, trajectory.success) == (1.0, 2.0, True)
    assert trajectory.transcript == [
        ("observation", "map"),
        ("action", "R"),
        ("observation", "0,1>"),
        ("action", "DU"),
        ("observation", "3,3>"),
    ]
    check_trajectory(trajectory)


def test_a_prompt_handed_out_is_not_changed_by_what_follows() -> None:
    recorder = TrajectoryRecorder("t", 0, 0, 1.0, capacity=4)
    recorder.start(ids(1, 2, 3))
    early = recorder.prompt()
    for token in range(50):
        recorder.observed(ids(100 + token), "")
    assert early.tolist() == [1, 2, 3]
    assert recorder.prompt().tolist() == [1, 2, 3, *range(100, 150)]
    with pytest.raises(ValueError, match="read-only"):
        early[0] = 9


def test_equal_allowed_sets_are_kept_once() -> None:
    recorder = TrajectoryRecorder("t", 0, 0, 1.0)
    recorder.start(ids(1))
    for allowed in ((7, 3), (3,), (7, 3)):
        recorder.sampled(ids(3), np.array([-1.0]), ids(0), allowed, "")
    trajectory = recorder.finish(env_return=0, reward=0, success=False)
    assert [s.tolist() for s in trajectory.allowed_sets] == [[3, 7], [3]]
    assert trajectory.segments[0].allowed.tolist() == [-1, 0, 1, 0]
    check_trajectory(trajectory)


def test_starting_again_closes_the_segment_and_opens_the_next() -> None:
    recorder = two_turns()
    recorder.start(ids(50, 51))
    assert recorder.prompt().tolist() == [50, 51]
    assert len(recorder) == 2
    recorder.sampled(ids(8), np.array([-3.0]), ids(5), None, "L")
    trajectory = recorder.finish(env_return=0, reward=0, success=False)
    assert [s.tokens.tolist() for s in trajectory.segments] == [[10, 11, 5, 12, 13, 7, 6], [50, 51, 8]]
    assert trajectory.sampled_tokens == 4
    assert trajectory.initiating_version == 3
    check_trajectory(trajectory)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=60))
def test_buffers_that_grow_lose_nothing(turns: list[tuple[int, int]]) -> None:
    recorder = TrajectoryRecorder("t", 0, 0, 1.0, capacity=2)
    recorder.start(ids(0))
    tokens, mask, number = [0], [0], 1
    for sampled, observed in turns:
        assert recorder.prompt().tolist() == tokens
        fresh = list(range(number, number + sampled + observed))
        number += sampled + observed
        recorder.sampled(ids(*fresh[:sampled]), np.full(sampled, -1.0), np.zeros(sampled, np.int32), None, "")
        recorder.observed(ids(*fresh[sampled:]), "")
        tokens += fresh
        mask += [1] * sampled + [0] * observed
    trajectory = recorder.finish(env_return=0, reward=0, success=False)
    assert trajectory.segments[0].tokens.tolist() == tokens
    assert trajectory.segments[0].loss_mask.tolist() == mask
    check_trajectory(trajectory)


def test_misuse_names_the_trajectory() -> None:
    recorder = TrajectoryRecorder("t7", 0, 0, 1.0)
    with pytest.raises(RecorderError, match=r"t7: start\(\) comes first"):
        recorder.prompt()
    with pytest.raises(RecorderError, match="t7: a segment needs at least one prompt token"):
        recorder.start(ids())
    recorder.start(ids(1))
    with pytest.raises(RecorderError, match=r"t7, turn 0: .* found 2, 1 and 2"):
        recorder.sampled(ids(1, 2), np.array([-1.0]), ids(0, 0), None, "")
    with pytest.raises(RecorderError, match="t7: it ended before anything was sampled"):
        recorder.finish(env_return=0, reward=0, success=False)


def edited(**changes: list[float]) -> Trajectory:
    trajectory = two_turns().finish(env_return=0, reward=0, success=False)
    old = trajectory.segments[0]
    arrays = {name: np.array(value, getattr(old, name).dtype) for name, value in changes.items()}
    return msgspec.structs.replace(trajectory, segments=[msgspec.structs.replace(old, **arrays)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": [1, 0, 1, 0, 0, 1, 1]}, "0 at the first position"),
        ({"logprobs": [0, 0, np.nan, 0, 0, -1, -2]}, "finite"),
        ({"logprobs": [0, 0, 0.5, 0, 0, -1, -2]}, "at most 0"),
        ({"logprobs": [0, -1, -0.5, 0, 0, -1, -2]}, "not sampled should have log-probability 0"),
        ({"versions": [-1, -1, 3, -1, -1, 3, 2]}, r"backwards: \[3, 3, 2\]"),
        ({"versions": [-1, -1, 2, -1, -1, 3, 3]}, "initiating version 3, but the first token was sampled by 2"),
        ({"allowed": [-1, -1, 5, -1, -1, -1, -1]}, "allowed set 5 of 1"),
        ({"tokens": [10, 11, 9, 12, 13, 7, 6]}, "token 9 at position 2 is not among those allowed"),
        ({"tokens": [10, 11, 5]}, r"loss_mask should be uint8 \[3\]"),
    ],
)
def test_a_broken_invariant_is_named(changes: dict[str, list[float]], message: str) -> None:
    with pytest.raises(RecorderError, match=message):
        check_trajectory(edited(**changes))
