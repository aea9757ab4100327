"""The files that users copy."""

from pathlib import Path

import numpy as np
import pytest

from actors.env.protocol import evaluation_task, training_task
from actors.env.recorder import TrajectoryRecorder
from actors.env.workbench import Workbench
from coordinator.job import Job, load

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def my_job(model_directory: Path) -> Job:
    (model_directory / "config.json").write_text("{}")
    return load(EXAMPLES / "my_env.yaml", [f"policy.path={model_directory}"])


def test_the_quick_start_job_plays_the_lake() -> None:
    job = load(EXAMPLES / "frozenlake.yaml")
    bench = Workbench(job.environment, EXAMPLES, job.reward)
    assert bench.reset("a", 0).text == "SFFF FHFH FFFH HFFG\na1"
    assert [bench.step("a", action).reward for action in "DDRRDR"] == [0, 0, 0, 0, 0, 1]
    assert job.policy.path is None


def test_the_maps_job_poses_other_maps_when_it_measures_and_shows_the_safe_ways() -> None:
    job = load(EXAMPLES / "frozenlake-maps.yaml")
    bench = Workbench(job.environment, EXAMPLES, job.reward)
    assert bench.reset("a", 1).text == "SHFH FFHF FFFF FFFG\na1.v.."
    assert bench.step("a", "D").observation.text == "a2.v>^"
    unseen = [bench.reset("b", evaluation_task(index)).text for index in range(50)]
    assert not set(unseen) & {bench.reset("b", training_task(index)).text for index in range(500)}
    assert job.policy.path is None


@pytest.mark.parametrize(
    ("name", "right"), [("smollm2-arithmetic", "The answer is {}."), ("smollm2-calculator", "calc: {}")]
)
def test_the_jobs_with_a_pretrained_model_pose_sums(model_directory: Path, name: str, right: str) -> None:
    pytest.importorskip("reasoning_gym", reason="bin/setup --smollm2 installs it")
    (model_directory / "config.json").write_text("{}")
    job = load(EXAMPLES / f"{name}.yaml", [f"policy.path={model_directory}"])
    bench = Workbench(job.environment, EXAMPLES, job.reward)
    question = bench.reset("a", 0).text
    expression = question.removeprefix("State the final answer to the following arithmetic problem: ")
    terms = expression.removesuffix(" =").split()
    value = int(terms[0]) + sum(int(f"{sign}{term}") for sign, term in zip(terms[1::2], terms[2::2], strict=True))
    if "calculator" in name:
        assert bench.step("a", right.format(" ".join(terms))).observation.text == str(value)
        right = "The answer is {}."
    assert bench.step("a", right.format(value)).success is True


def test_the_users_own_environment_plays(my_job: Job) -> None:
    bench = Workbench(my_job.environment, EXAMPLES, my_job.reward)
    assert bench.system_prompt.startswith("I think of a number.")
    assert bench.reset("a", 15).text == "Guess a number from 1 to 9."  # 1 + 15 % 9 = 7
    assert bench.step("a", "5").observation.text == "Higher."
    assert bench.step("a", "nine").observation.text == "Higher."
    assert bench.step("a", " 8").observation.text == "Lower."
    assert bench.step("a", "7").success is True


def test_the_users_own_reward_divides_by_the_number_of_guesses(my_job: Job) -> None:
    recorder = TrajectoryRecorder("t", 0, 0, 1.0)
    recorder.start(np.array([1], np.int32))
    for _ in range(4):
        recorder.sampled(np.array([2], np.int32), np.array([-1.0], np.float32), np.array([0], np.int32), None, "")
    bench = Workbench(my_job.environment, EXAMPLES, my_job.reward)
    assert bench.score(recorder.finish(env_return=1.0, reward=0.0, success=True)) == 0.25
