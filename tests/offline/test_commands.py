"""What ``rollout`` and ``replay`` refuse, and how they show things, without starting anything."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from actors.env.messages import Outcome
from actors.env.recorder import TrajectoryRecorder
from actors.settings import TrainSettings
from actors.trainer.backends.protocol import Inspection
from actors.trainer.batches import Failure
from actors.trainer.batching import make_batch
from actors.trainer.dump import FORMAT, DumpFacts, Manifest, write_dump
from actors.trainer.messages import InspectedGroups
from actors.trajectory import Trajectory
from coordinator.commands import replay, rollout
from coordinator.commands.rollout import RolloutProgress, make_tickets
from coordinator.job import convert
from coordinator.observe.rundir import RunDirectory
from coordinator.replay import NotANumber, Replayed, TrajectoryFigures

JOB = {"train": {"groups_per_step": 2, "group_size": 2}}


def trajectory(ticket: str, group: int) -> Trajectory:
    recorder = TrajectoryRecorder(ticket, group, task=group, temperature=1.0)
    recorder.start(np.array([1]), "?")
    recorder.sampled(np.array([2]), np.array([-1.0]), np.array([0]), None, "a")
    return recorder.finish(env_return=0.0, reward=0.0, success=False)


def dump(directory: Path, groups: int = 3) -> Path:
    data = [trajectory(f"{group}.{member}", group) for group in range(groups) for member in range(2)]
    write_dump(directory, Manifest(FORMAT, "job", "env", DumpFacts("bytes", 264)), data, {})
    return directory


def job_file(directory: Path) -> str:
    path = directory / "job.yaml"
    path.write_text(msgspec.json.encode(JOB).decode())  # JSON is YAML
    return str(path)


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def test_a_dump_outside_a_run_needs_to_be_told_whose_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_file(tmp_path)  # a job that lies beside it is no run
    assert replay.main([str(dump(tmp_path / "dump"))]) == 2
    assert (
        refused(capsys) == f"{tmp_path}/dump: lies in no run; expected --under RUN or --under JOB, whose weights to use"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--version", "3"], "is a job, which has no checkpoint '3'; name a run (--under RUN)"),
        (["--step", "3"], "holds 3 groups, 2 a step: steps 1 to 2"),
        (["--step", "0"], "holds 3 groups, 2 a step: steps 1 to 2"),
        (["--trajectory", "9.9"], "--trajectory: no '9.9' in this batch; there are 0.0, 0.1, 1.0, 1.1"),
        (["policy.shape.vocab_size=2", "policy.tokenizer=bytes"], "the policy's vocabulary ends at 1"),
    ],
)
def test_replay_names_what_it_cannot_find(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert replay.main([str(dump(tmp_path / "dump")), "--under", job_file(tmp_path), *words]) == 2
    assert expected in refused(capsys)


def test_a_replay_goes_by_the_checkpoint_of_its_version_or_the_newest_before_it(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "run") as run:
        for version in (2, 4):
            (run.checkpoints / f"v{version:05d}").mkdir()
        assert replay._version(run, None, 4) == 4
        assert replay._version(run, None, 0) is None  # what the run started from
        assert replay._version(run, "start", 4) is None
        assert replay._version(run, None, 3) == 2
        assert replay._version(run, None, 1) is None
        assert replay._version(run, "latest", 0) == 4


def test_the_table_shows_what_is_no_number_and_says_where_it_begins() -> None:
    figures = TrajectoryFigures(
        ticket="t7",
        group=1,
        success=True,
        reward=1.0,
        advantage=-0.5,
        tokens=3,
        logprob_rollout=float("nan"),
        logprob=-1.25,
        ratio_mean=float("inf"),
        ratio_min=0.5,
        ratio_max=float("inf"),
        loss=float("nan"),
        gradient_norm=0.75,
    )
    result = Replayed(
        loss=float("nan"),
        gradient_norm=float("nan"),
        tokens=3,
        trajectories=[figures],
        first_not_finite=NotANumber("t7", "the ratio", "inf", 0, 12, 82),
    )
    batch = replay.Batch(Path("b"), [], Failure(4, "the loss is not finite", 1e-3))
    head, columns, row, total, last = replay.describe(batch, result).splitlines()
    assert head == "failed: the loss is not finite"
    assert dict(zip(columns.split(), row.split(), strict=True)) == {
        "trajectory": "t7",
        "group": "1",
        "reward": "1.00",
        "advantage": "-0.500",
        "tokens": "3",
        "rollout": "nan",
        "now": "-1.2500",
        "ratio": "inf",
        "min": "0.5000",
        "max": "inf",
        "loss": "nan",
        "grad": "0.7500",
    }
    assert total == "loss nan  gradient norm nan  tokens 3"
    assert last == (
        "first figure that is not finite: trajectory t7, segment 0, position 12 (token 82): the ratio is inf"
    )


@pytest.mark.parametrize("words", [[], ["--trajectory", "0.1"]])
def test_json_stays_json_where_a_figure_is_no_number(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def inspected(batch: replay.Batch, under: replay.Under) -> InspectedGroups:
        nan = [np.full(2, np.nan, np.float32)] * 4
        norms = {trajectory.ticket: float("inf") for group in batch.groups for trajectory in group}
        inspection = Inspection(nan, nan, nan, norms, float("inf"))
        return InspectedGroups(make_batch(batch.groups, TrainSettings()), inspection)

    monkeypatch.setattr(replay, "inspect", inspected)
    arguments = [str(dump(tmp_path / "dump")), "--under", job_file(tmp_path), "--json", *words]
    assert replay.main(arguments) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (shown["turns"][0]["tokens"][0]["ratio"] if words else shown["loss"]) is None


def test_tickets_come_in_groups_of_one_task_with_the_seeds_of_a_live_run() -> None:
    job = convert({"seed": 7, "train": {"group_size": 3}, "rollout": {"temperature": 0.5}}, "job", [])
    tickets = make_tickets(job, 7, first=2, greedy=False, held_out=False)
    assert [(ticket.group, ticket.task) for ticket in tickets] == [(2, 2)] * 3 + [(3, 3)] * 3 + [(4, 4)]
    assert len({ticket.id for ticket in tickets}) == 7
    assert {(ticket.purpose, ticket.temperature) for ticket in tickets} == {("train", 0.5)}
    expected = [int(np.random.default_rng([7, number]).integers(2**31)) for number in range(6, 13)]
    assert [ticket.seed for ticket in tickets] == expected
    held_out = make_tickets(job, 1, first=0, greedy=True, held_out=True)
    assert (held_out[0].task, held_out[0].temperature) == (1_000_000_000, 0.0)


def test_progress_is_told_every_tenth_with_what_was_lost() -> None:
    said: list[str] = []
    now = iter(range(100))
    progress = RolloutProgress(20, said.append, lambda: float(next(now)))
    for index in range(20):
        if index == 4:
            progress.outcome(Outcome("r4", "lost", "env_failed"))
        else:
            progress.outcome(Outcome(f"r{index}", "stored", success=True, sampled_tokens=2))
    assert len(said) == 10
    assert said[0] == "2/20  success 100%  tokens 4  lost 0  eta 0:09"
    assert said[-1] == "20/20  success 100%  tokens 38  lost 1 (env_failed 1)"
    assert progress.losses() == {"env_failed": 1}


def test_rollout_refuses_impossible_counts_and_a_place_that_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rollout.main([job_file(tmp_path), "--trajectories", "0"]) == 2
    assert refused(capsys).startswith("--trajectories: expected 1 or more")
    assert rollout.main([job_file(tmp_path), "rollout.engine=torch", "--out", str(tmp_path)]) == 2
    assert refused(capsys) == f"--out: {tmp_path} is there already and not an empty directory; name another one"
    below = Path(job_file(tmp_path)) / "dump"  # below a file
    assert rollout.main([job_file(tmp_path), "rollout.engine=torch", "--out", str(below)]) == 2
    assert refused(capsys) == f"--out: {below} cannot be made: Not a directory"
