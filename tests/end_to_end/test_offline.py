"""From a live run to dumps, imitation and training without engines, as commands."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.trainer.dump import read_dump, write_dump
from coordinator.commands import replay, rollout, sft, train
from coordinator.observe.rundir import RunDirectory
from tests.end_to_end.runs import TRAIN, Run
from tests.end_to_end.yes_or_no import JOB
from tests.support.running import Ended, ran, started

SFT = "coordinator.commands.sft"
TIMEOUT_S = 120.0


def job_file(directory: Path) -> str:
    path = directory / "job.yaml"
    path.write_text(JOB)
    return str(path)


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["record"] == kind]


def succeeded(ended: Ended) -> Ended:
    assert ended.status == 0, ended
    assert not ended.leftovers
    assert "Traceback" not in ended.stdout + ended.stderr
    return ended


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that has recorded them."""
    directory = tmp_path_factory.mktemp("live")
    succeeded(ran(TRAIN, job_file(directory), "train.record=true", directory=directory, timeout_s=TIMEOUT_S))
    return (directory / "runs" / "latest").resolve()


def test_training_on_a_recorded_run_takes_the_same_steps_without_engines_in_two_sittings(
    live: Path, tmp_path: Path
) -> None:
    words = [job_file(tmp_path), "train.steps=2", "train.grad_norm_steps=3", "--from-dump", str(live)]
    with started(TRAIN, *words, directory=tmp_path) as command:
        command.wait_for("step 1/2", timeout_s=TIMEOUT_S)
        assert set(command.children()) <= {"trainer-0"}
        assert command.wait(timeout_s=TIMEOUT_S) == 0, command.said()
    offline = (tmp_path / "runs" / "latest").resolve()
    words = ["--resume", str(offline), "train.steps=3"]
    resumed = succeeded(ran(TRAIN, *words, directory=tmp_path, timeout_s=TIMEOUT_S, name="resumed"))
    assert "starting engines" not in resumed.stdout
    theirs, ours = records(live, "step"), records(offline, "step")
    assert len(ours) == 3
    assert any(step["grad_norm"] > 0 for step in theirs)
    for expected, found in zip(theirs, ours, strict=True):
        for key in ("loss", "grad_norm", "entropy", "ratio_mean", "kl_rollout", "reward_mean", "success_rate"):
            assert found[key] == pytest.approx(expected[key], abs=1e-6), key
        assert (found["trajectories"], found["tokens"]) == (8, 16)
    assert (offline / "checkpoints" / "v00003" / "run.json").is_file()
    assert "reward" in (offline / "report.html").read_text().lower()


def test_a_dump_is_described_before_and_one_that_does_not_fit_is_one_line(
    live: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [job_file(tmp_path), "--from-dump", str(live), "--runs", str(tmp_path / "runs")]
    assert train.main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "6 groups, 24 trajectories" in said
    assert re.findall(r"^(\S+-\d) ", said, re.MULTILINE) == ["trainer-0"]
    assert train.main([*words, "train.groups_per_step=9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {live}/recorded: a step takes 9 groups of 4")
    assert not (tmp_path / "runs").exists()


def test_imitating_a_runs_successes_makes_a_policy_that_trains_on_from_there(live: Path, tmp_path: Path) -> None:
    job = job_file(tmp_path)
    settings = ["sft.select=successful", "sft.epochs=6", "sft.batch_size=4", "sft.learning_rate=0.02"]
    words = [job, *settings, "sft.held_out=0", "--data", str(live), "--out", "model"]
    said = succeeded(ran(SFT, *words, directory=tmp_path, timeout_s=TIMEOUT_S)).stdout
    successes = [one for one in read_dump(live).trajectories if one.success]
    assert f"{len(successes)} of 24 recorded trajectories: {len(successes)} to imitate" in said
    run = (tmp_path / "runs" / "latest").resolve()
    steps = records(run, "imitation")
    assert steps[0]["loss"] == pytest.approx(np.log(2), abs=0.1)  # one of two actions, by chance
    assert steps[-1]["loss"] < 0.05

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    segment = successes[0].segments[0]
    place = int(np.flatnonzero(segment.loss_mask)[0])
    logits = model(input_ids=torch.from_numpy(segment.tokens[None, :place].astype(np.int64))).logits[0, -1]
    assert logits[ord("y")] > logits[ord("n")] + 2

    go_on = re.search(r"train on  bin/train JOB (\S+) (\S+)", said)
    assert go_on is not None
    words = [job, go_on[1], go_on[2], "train.steps=1"]
    succeeded(ran(TRAIN, *words, directory=tmp_path, timeout_s=TIMEOUT_S, name="go-on"))
    (step,) = records((tmp_path / "runs" / "latest").resolve(), "step")
    assert step["success_rate"] >= 0.75
    assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-4)  # engines and trainer hold the same weights


def test_imitation_that_is_interrupted_leaves_a_checkpoint_and_a_model_and_goes_on_as_if_nothing_had_been(
    tmp_path: Path,
) -> None:
    job = job_file(tmp_path)
    chats = tmp_path / "chats.jsonl"
    answers = [("user", "task 1?"), ("assistant", "y")]
    line = json.dumps({"messages": [{"role": role, "content": content} for role, content in answers]})
    chats.write_text("\n".join([line, line.replace("1?", "2?"), line.replace("1?", "3?")] * 4))
    words = [job, "--data", str(chats), "sft.batch_size=2", "sft.evaluate_every=5", "checkpoint.keep=100"]
    endless = [*words, "sft.epochs=100000"]
    with started(SFT, *endless, directory=tmp_path, name="first") as command:
        command.wait_for("step 3/", timeout_s=TIMEOUT_S)
        command.send(signal.SIGINT)
        command.wait_for("Ctrl-C: the step under way is finished", timeout_s=10.0)
        assert command.wait(timeout_s=30.0) == 130, command.said()
        assert command.leftovers(grace_s=1.0) == []
    run = Run.latest(tmp_path)
    (reached,) = run.checkpoints()
    assert (run.path / "model" / "model.safetensors").is_file()
    end = -(-(reached + 3) // 6)  # epochs of 6 steps (11 of 12 chats, two a step)
    resumed = ran(SFT, "--resume", str(run.path), f"sft.epochs={end}", directory=tmp_path, timeout_s=TIMEOUT_S)
    succeeded(resumed)
    succeeded(ran(SFT, *words, f"sft.epochs={end}", directory=tmp_path, timeout_s=TIMEOUT_S, name="unbroken"))
    unbroken = records(Run.latest(tmp_path).path, "imitation")
    broken = records(run.path, "imitation")
    assert [step["step"] for step in broken] == [step["step"] for step in unbroken] == list(range(end * 6 + 1))
    for one, other in zip(broken, unbroken, strict=True):
        for key in ("loss", "held_out_loss", "grad_norm"):
            assert one[key] == (None if other[key] is None else pytest.approx(other[key], rel=1e-5)), key


def test_imitation_without_usable_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_file(tmp_path)
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    usable = tmp_path / "usable.jsonl"
    messages = [{"role": "user", "content": "task 1?"}, {"role": "assistant", "content": "y"}]
    usable.write_text(json.dumps({"messages": messages}) + "\n")
    nowhere = tmp_path / "nowhere"
    cases = {
        (): "sft.data: expected demonstrations (or --data)",
        ("--data", str(nowhere)): f"sft.data: {nowhere}: no such file or directory",
        ("--data", str(chats)): f"sft.data: {chats}, line 1: expected (system,) user",
        ("--data", str(tmp_path)): f"{tmp_path}/dump.json: No such file or directory",
        ("--data", str(usable), "--out", str(tmp_path)): f"--out: {tmp_path} is there already",
    }
    for words, expected in cases.items():
        assert sft.main([job, *words, "--runs", str(tmp_path / "runs")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {expected}"), line
    assert not (tmp_path / "runs").exists()


def test_a_recorded_step_is_replayed_as_the_live_run_took_it(live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(live), "--step", "1", "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    taken = records(live, "step")[0]
    assert replayed["loss"] == pytest.approx(taken["loss"], abs=1e-6)
    assert replayed["gradient_norm"] == pytest.approx(taken["grad_norm"], abs=1e-6)
    assert (replayed["tokens"], replayed["version"], replayed["first_not_finite"]) == (taken["tokens"], None, None)
    rewards = [one["reward"] for one in replayed["trajectories"]]
    assert np.mean(rewards) == pytest.approx(taken["reward_mean"])
    ratios = [one["ratio_mean"] for one in replayed["trajectories"]]
    assert np.mean(ratios) == pytest.approx(taken["ratio_mean"], abs=1e-6)  # trajectories are equally long


def test_a_batch_that_fails_is_kept_and_replayed_to_the_token(
    live: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = read_dump(live)
    spoilt = recorded.trajectories[3]
    place = int(np.flatnonzero(spoilt.segments[0].loss_mask)[1])
    logprobs = spoilt.segments[0].logprobs.copy()
    logprobs[place] = np.nan
    segments = [msgspec.structs.replace(spoilt.segments[0], logprobs=logprobs)]
    trajectories = list(recorded.trajectories)
    trajectories[3] = msgspec.structs.replace(spoilt, segments=segments)
    write_dump(tmp_path / "spoilt", recorded.manifest, trajectories, {})
    words = [job_file(tmp_path), "--from-dump", "spoilt"]
    ended = ran(TRAIN, *words, directory=tmp_path, timeout_s=TIMEOUT_S)
    assert (ended.status, ended.leftovers) == (1, []), ended
    assert f"the loss is not finite in 1 trajectories: {spoilt.ticket}" in ended.stderr
    kept = tmp_path / "runs" / "latest" / "failed-batches" / "v00001"
    assert f"bin/replay {kept.resolve()}" in ended.stderr

    assert replay.main([str(kept), "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["first_not_finite"] == {
        "ticket": spoilt.ticket,
        "figure": "the rollout's log-probability",
        "value": "nan",
        "segment": 0,
        "position": place,
        "token": int(spoilt.segments[0].tokens[place]),
    }
    finite = [one["ticket"] for one in replayed["trajectories"] if one["gradient_norm"] is not None]
    assert len(finite) == 7
    assert spoilt.ticket not in finite


def test_rollouts_of_a_runs_policy_are_what_its_trainer_would_have_sampled(
    live: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "dump"
    assert rollout.main([str(live), "--trajectories", "8", "--first-task", "100", "--out", str(out), "--json"]) == 0
    said = capsys.readouterr()
    manifest = json.loads(said.out)
    assert "8/8" in said.err
    content = manifest["content"]
    assert (content["trajectories"], content["groups"], content["versions"]) == (8, 2, [3, 3])
    dump = read_dump(out)
    assert content["success"] == np.mean([one.success for one in dump.trajectories])
    assert [one.task for one in dump.trajectories] == [100] * 4 + [101] * 4
    assert {one.initiating_version for one in dump.trajectories} == {3}

    assert replay.main([str(out), "--under", str(live), "--version", "latest", "--json"]) == 0
    for one in json.loads(capsys.readouterr().out)["trajectories"]:
        assert one["ratio_min"] == pytest.approx(1.0, abs=1e-4)
        assert one["ratio_max"] == pytest.approx(1.0, abs=1e-4)

    refused = rollout.main([str(live), "--out", str(out)])
    assert (refused, capsys.readouterr().err.strip()) == (
        2,
        f"error: --out: {out} is there already and not an empty directory; name another one",
    )


def test_a_run_is_resumed_by_the_command_that_began_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory.create(tmp_path, "trained") as trained, RunDirectory.create(tmp_path, "imitated") as imitated:
        for run in (trained, imitated):
            (run.path / "job.yaml").write_text("name: x\n")
        (imitated.path / "demonstrations").write_text("chats.jsonl\n")
    assert train.main(["--resume", str(imitated.path)]) == 2
    assert "a run of bin/sft; go on with sft --resume" in capsys.readouterr().err
    assert sft.main(["--resume", str(trained.path)]) == 2
    assert "not a run of bin/sft" in capsys.readouterr().err
