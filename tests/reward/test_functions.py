"""Reward functions, the built-in one and users' own."""

import sys
from pathlib import Path

import numpy as np
import pytest

from actors.env.recorder import TrajectoryRecorder
from actors.reward.functions import RewardFailed, RewardUnavailable, load_reward
from actors.settings import RewardSettings
from actors.trajectory import Trajectory

USERS = """
import numpy as np
def half(trajectory): return trajectory.env_return / 2
def numpy_half(trajectory): return np.float32(trajectory.env_return / 2)
def words(trajectory): return "good"
def nothing(trajectory): pass
def infinite(trajectory): return float("inf")
def broken(trajectory): return trajectory.no_such_field
constant = 3
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "reward_users.py").write_text(USERS)
    sys.modules.pop("reward_users", None)
    return tmp_path


@pytest.fixture
def trajectory() -> Trajectory:
    recorder = TrajectoryRecorder("t5", 0, 0, 1.0)
    recorder.start(np.array([1], np.int32))
    recorder.sampled(np.array([2], np.int32), np.array([-1.0], np.float32), np.array([0], np.int32), None, "a")
    return recorder.finish(env_return=3.0, reward=0.0, success=True)


@pytest.mark.parametrize(
    ("function", "expected"), [("environment", 3.0), ("reward_users:half", 1.5), ("reward_users:numpy_half", 1.5)]
)
def test_a_trajectory_is_scored(base: Path, trajectory: Trajectory, function: str, expected: float) -> None:
    reward = load_reward(RewardSettings(function=function), base)(trajectory)
    assert type(reward) is float
    assert reward == expected


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("words", r"trajectory t5: expected the reward to be a finite number, found 'good' \(str\)"),
        ("nothing", r"trajectory t5: expected the reward to be a finite number, found None \(NoneType\)"),
        ("infinite", r"trajectory t5: expected the reward to be a finite number, found inf \(float\)"),
        (
            "broken",
            r"reward function reward_users:broken, trajectory t5: AttributeError: .*\(reward_users\.py, line 8\)",
        ),
    ],
)
def test_what_is_no_reward_is_an_error_that_names_the_trajectory(
    base: Path, trajectory: Trajectory, function: str, message: str
) -> None:
    reward = load_reward(RewardSettings(function=f"reward_users:{function}"), base)
    with pytest.raises(RewardFailed, match=message):
        reward(trajectory)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("retrun", "reward.function: expected 'environment' or an import path such as my_env:score, found 'retrun'"),
        ("reward_users:absent", "reward.function: 'reward_users:absent': "),
        ("reward_users:constant", "reward.function: reward_users:constant is a int; expected a function"),
    ],
)
def test_a_function_that_is_not_there_is_one_line(base: Path, function: str, message: str) -> None:
    with pytest.raises(RewardUnavailable) as caught:
        load_reward(RewardSettings(function=function), base)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
