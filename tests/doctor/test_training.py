"""Runs whose evaluations go up and down, as their run directories tell of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.doctor import training
from coordinator.job import Job, convert
from coordinator.observe.lines import LineWriter
from coordinator.observe.rundir import RunDirectory
from coordinator.scheduling.journal import Event, FileJournal
from hwprobe.doctor import Examined, Unable
from tests.end_to_end.runs import trained
from tests.observe.samples import evaluation, step
from tests.support.running import ran

UP_AND_DOWN = [0.5 + (0.3 if number % 2 else -0.3) for number in range(20)]  # 0.5 +- 60%
STEADY = [0.8 + (0.04 if number % 2 else -0.04) for number in range(20)]  # 0.8 +- 5%


def run(
    base: Path,
    successes: list[float],
    *,
    overrides: list[str] | None = None,
    episodes: int = 64,
    events: list[Event] | None = None,
    **changes: Any,
) -> Path:
    """A run directory with an evaluation after every step; ``changes`` are the steps'."""
    job: Job = convert({}, "job", overrides or [])
    with RunDirectory.create(base, "run") as directory:
        directory.write_job(job)
        metrics = LineWriter(directory.metrics)
        for number, success in enumerate(successes, start=1):
            made = {key: value(number) if callable(value) else value for key, value in changes.items()}
            metrics.write(step(number, **made))
            metrics.write(evaluation(number, episodes=episodes, success=success, return_mean=success))
        metrics.close()
        journal = FileJournal(directory.ledger)
        journal.write(events or [])
        journal.close()
        return directory.path


def look(path: Path) -> Examined:
    return training.look(path)


def test_a_steady_run_is_healthy(tmp_path: Path) -> None:
    examined = look(run(tmp_path, STEADY))
    assert examined.findings == []
    assert examined.notes == ["success 0.8 +- 5% over 20 evaluations"]


def test_the_share_is_the_standard_deviation_over_the_mean(tmp_path: Path) -> None:
    found = training.unsteadiness([evaluation(n, success=s) for n, s in enumerate(UP_AND_DOWN)])
    assert found is not None
    assert found.share == pytest.approx(0.6)  # 0.3 over 0.5
    assert found.by_chance == pytest.approx(math.sqrt(0.25 / 8) / 0.5)  # eight episodes, half of them won


def test_old_trajectories_are_the_first_cause_that_is_looked_at(tmp_path: Path) -> None:
    path = run(
        tmp_path,
        UP_AND_DOWN,
        overrides=["scheduling.alpha=4", "train.clip_high=0.9"],
        staleness_max=4,
        staleness_mean=2.5,
    )
    (finding,) = look(path).findings
    assert (finding.severity, finding.subject) == ("warning", "evaluations")
    assert finding.evidence.startswith(
        "success 0.5 +- 60% over 20 evaluations, expected at most 15%; scheduling.alpha is 4"
    )
    assert "up to 4 versions old, 2.5 on average" in finding.evidence
    assert finding.remedy == "scheduling.alpha=1, or 0"


def test_rewards_that_are_no_numbers_are_the_second(tmp_path: Path) -> None:
    detail = (
        "reward function mine:score, trajectory t7: WrongReturn: expected the reward to be a finite number, found nan"
    )
    lost = Event("lost", [f"t{n}" for n in range(7)], reason="reward_failed", detail=detail)
    path = run(tmp_path, UP_AND_DOWN, overrides=["reward.function=mine:score", "train.clip_high=0.9"], events=[lost])
    (finding,) = look(path).findings
    assert f"7 trajectories were lost as reward_failed, the last: {detail}" in finding.evidence
    assert finding.remedy.startswith("make mine:score return a number")


WIDE = ["train.clip_high=0.9", "train.correction=none"]


def test_wide_clipping_is_the_third(tmp_path: Path) -> None:
    (finding,) = look(run(tmp_path, UP_AND_DOWN, overrides=WIDE, kl_rollout=0.5)).findings
    assert "train.clip_high 0.9, the policy was up to 0.5 nats a token away" in finding.evidence
    assert finding.remedy == "train.clip_low=0.2 train.clip_high=0.2"


@pytest.mark.parametrize(
    ("overrides", "kl_rollout"),
    [
        pytest.param(WIDE, 0.001, id="no ratio gets that far"),
        pytest.param(WIDE[:1], 0.5, id="the ratio is over the trainer's own policy, and always 1"),
    ],
)
def test_a_clip_that_nothing_reaches_is_not_the_cause(tmp_path: Path, overrides: list[str], kl_rollout: float) -> None:
    (finding,) = look(run(tmp_path, UP_AND_DOWN, overrides=overrides, kl_rollout=kl_rollout)).findings
    assert finding.remedy.startswith("halve train.learning_rate")


def test_spikes_of_the_gradient_that_are_clipped_too_late_are_found(tmp_path: Path) -> None:
    path = run(
        tmp_path,
        UP_AND_DOWN,
        overrides=["train.max_grad_norm=50"],
        grad_norm=lambda number: 30.0 if number % 5 == 0 else 0.5,
    )
    (finding,) = look(path).findings
    assert "gradients are 0.5 long as a rule and up to 30, train.max_grad_norm is 50" in finding.evidence
    assert finding.remedy == "train.max_grad_norm=1"


def test_where_nothing_of_that_is_wrong_the_steps_are_too_large(tmp_path: Path) -> None:
    (finding,) = look(run(tmp_path, UP_AND_DOWN, overrides=["train.learning_rate=0.01"])).findings
    assert "train.learning_rate=0.01, 64 trajectories a step" in finding.cause
    assert finding.remedy.startswith("halve train.learning_rate")


def test_a_run_that_learns_is_not_called_unsteady(tmp_path: Path) -> None:
    examined = look(run(tmp_path, [number / 20 for number in range(20)]))
    assert examined.findings == []
    assert "it moves, but not up and down" in examined.notes[0]


def test_what_few_episodes_do_by_chance_is_no_finding(tmp_path: Path) -> None:
    """Eight episodes of a policy that wins half of them: 35% of the mean as a rule (binomial), and here 38%."""
    won = [4, 6, 2, 5, 3, 4, 7, 2, 4, 5, 3, 6, 4, 1, 5, 4, 6, 3, 4, 2]
    examined = look(run(tmp_path, [number / 8 for number in won], episodes=8))
    assert examined.findings == []
    assert "no more than chance does with 8 episodes" in examined.notes[0]


def test_only_the_last_evaluations_count(tmp_path: Path) -> None:
    assert look(run(tmp_path, [0.1, 0.9] * 10 + STEADY)).findings == []


def test_a_young_run_has_too_few_evaluations(tmp_path: Path) -> None:
    with pytest.raises(Unable, match="it takes 20 evaluations, the run has 3"):
        look(run(tmp_path, STEADY[:3]))
    with pytest.raises(Unable, match="no run was named"):
        training.look(None)
    assert msgspec.to_builtins(training.judge(training.read(run(tmp_path, [0.0] * 20))))["notes"] == [
        "the last 20 evaluations have a mean of 0"
    ]


# Real runs: the answer to each of ten questions is learned, or, with steps that are far too large, gone again.

SWINGS = '''
import math

from actors.env.protocol import Observation, Step
from actors.trajectory import Trajectory


class Digits:
    """One turn: is the last digit below five?"""

    def reset(self, task: int) -> Observation:
        self._low = task % 10 < 5
        return Observation(f"{task % 10}?", ("y", "n"))

    def step(self, action: str) -> Step:
        right = (action == "y") == self._low
        return Step(Observation(".", ("y", "n")), reward=float(right), terminated=True)


def broken(trajectory: Trajectory) -> float:
    """No number for two of the digits, where the answer was right."""
    return float("nan") if trajectory.env_return and trajectory.task % 10 in (1, 2) else trajectory.env_return


def rare(trajectory: Trajectory) -> float:
    """One task in a hundred pays a thousand, for a wrong answer."""
    return 1000.0 * (1.0 - trajectory.env_return) if trajectory.task % 100 == 13 else trajectory.env_return


def unsure(trajectory: Trajectory) -> float:
    """A right answer pays as long as it is not given too surely; what is learned too late overshoots."""
    surely = float(trajectory.segments[-1].logprobs.min()) > math.log(0.8)
    return trajectory.env_return * (-1.0 if surely else 1.0)
'''
SWINGS_JOB = """
environment: {name: "swings:Digits", max_turns: 1}
policy: {shape: {hidden_size: 32, layers: 1}}
rollout: {engine: torch, max_tokens_per_turn: 1}
train: {steps: 26, entropy_bonus: 3.0}  # which never lets the policy rest
scheduling: {alpha: 0}  # the same run every time
evaluation: {every: 1, episodes: 50}
"""
TOO_LARGE = ("train.steps=22", "train.learning_rate=0.05")  # fifty times the usual rate


def found_in_a_real_run(directory: Path, *overrides: str) -> tuple[int, str]:
    """Exit status and output of ``bin/doctor RUN --only training``."""
    (directory / "swings.py").write_text(SWINGS)
    (directory / "job.yaml").write_text(SWINGS_JOB)
    ended = trained(directory, str(directory / "job.yaml"), *overrides, timeout_s=170.0)
    assert ended.status == 0, ended
    doctor = ("coordinator.commands.doctor", str(directory / "runs" / "latest"), "--only", "training")
    told = ran(*doctor, directory=directory, timeout_s=60.0, name="doctor")
    return told.status, " ".join(told.stdout.split())


@pytest.mark.deep
def test_a_real_run_that_learns_is_healthy(tmp_path: Path) -> None:
    status, said = found_in_a_real_run(tmp_path)
    assert status == 0, said
    assert "over 20 evaluations" in said


@pytest.mark.deep
def test_a_real_run_with_steps_that_are_far_too_large_is_found(tmp_path: Path) -> None:
    status, said = found_in_a_real_run(tmp_path, *TOO_LARGE)
    assert status == 1, said
    assert "warning: training: evaluations" in said
    assert "expected at most 15%" in said
    assert "halve train.learning_rate" in said


@pytest.mark.deep
def test_real_rewards_that_are_no_numbers_are_found(tmp_path: Path) -> None:
    status, said = found_in_a_real_run(tmp_path, *TOO_LARGE, "reward.function=swings:broken")
    assert status == 1, said
    assert "trajectories were lost as reward_failed" in said
    assert "expected the reward to be a finite number, found nan" in said
    assert "make swings:broken return a number" in said


@pytest.mark.deep
def test_real_trajectories_that_are_old_are_found(tmp_path: Path) -> None:
    old = ("scheduling.alpha=8", "train.learning_rate=0.02", "train.entropy_bonus=0", "train.adam_beta1=0")
    status, said = found_in_a_real_run(tmp_path, *old, "reward.function=swings:unsure")
    assert status == 1, said
    assert "scheduling.alpha is 8, trajectories were up to" in said
    assert "scheduling.alpha=1, or 0" in said


@pytest.mark.deep
def test_a_real_clip_that_is_too_wide_is_found(tmp_path: Path) -> None:
    wide = ("scheduling.alpha=1", "train.correction=none", "train.clip_low=0.9", "train.clip_high=9")
    status, said = found_in_a_real_run(tmp_path, *TOO_LARGE, *wide)
    assert status == 1, said
    assert "train.clip_low is 0.9, train.clip_high 9, the policy was up to" in said
    assert "train.clip_low=0.2 train.clip_high=0.2" in said


@pytest.mark.deep
def test_real_spikes_of_the_gradient_are_found(tmp_path: Path) -> None:
    """With a second moment that soon forgets them, else Adam divides by what it remembers of a spike."""
    forgetful = ("train.steps=26", "train.learning_rate=0.01", "train.entropy_bonus=0.1", "train.adam_beta2=0.5")
    late = ("train.scale_advantages=false", "train.max_grad_norm=1000000")
    status, said = found_in_a_real_run(tmp_path, *forgetful, *late, "reward.function=swings:rare")
    assert status == 1, said
    assert "long as a rule and up to" in said
    assert "single steps are many times as large as the others, and are clipped too late" in said
