"""A mistake in a job is one clear line on stderr that names the setting or the file: no traceback, nothing started."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from coordinator.commands import train
from tests.end_to_end.runs import FROZENLAKE, TINY, TRAIN, trained, training
from tests.end_to_end.tiny_model import make_model
from tests.support.running import ROOT, Ended, ran

MY_ENV = ROOT / "examples" / "my_env.yaml"
TIMEOUT_S = 60.0


def error_of(ended: Ended, status: int = 2) -> str:
    """The one line."""
    assert ended.status == status, ended
    assert "Traceback" not in ended.stdout + ended.stderr, ended
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1, ended
    assert lines[0].startswith("error: "), ended
    return lines[0].removeprefix("error: ")


def refusal(capsys: pytest.CaptureFixture[str], directory: Path, *arguments: str) -> str:
    """The same, of ``train`` within this process: nothing has been started by then, and a process takes a second."""
    capsys.readouterr()  # of what came before
    status = train.main([*arguments, "--runs", str(directory / "runs")])
    said = capsys.readouterr()
    return error_of(Ended(status, said.out, said.err, []))


def remove(directory: Path, name: str) -> None:
    (directory / name).unlink()


def cut(directory: Path, name: str) -> None:
    path = directory / name
    path.write_bytes(path.read_bytes()[:-1])


def overwrite(directory: Path, name: str) -> None:
    (directory / name).write_bytes(b"\xff" * 64)


@pytest.mark.parametrize(
    ("damage", "pattern", "expected"),
    [
        (remove, "model-00002-of-*.safetensors", "no such file, but model.safetensors.index.json names it"),
        (cut, "model-00002-of-*.safetensors", "not a complete safetensors file: expected"),
        (overwrite, "model-00001-of-*.safetensors", "not a safetensors file (its header would have"),
        (overwrite, "model.safetensors.index.json", "not an index of weights"),
        (remove, "model.safetensors.index.json", "neither model.safetensors nor model.safetensors.index.json"),
        (overwrite, "config.json", "not a usable config.json"),
        (remove, "tokenizer.json", "expected a fast tokenizer's file, found none"),
        (remove, "chat_template.jinja", "expected a chat_template (or a file chat_template.jinja beside it)"),
    ],
)
def test_what_is_wrong_with_a_model_directory_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path, str], None],
    pattern: str,
    expected: str,
) -> None:
    model = make_model(tmp_path / "model", shard_size="100KB")
    (path,) = model.glob(pattern)
    damage(model, path.name)
    error = refusal(capsys, tmp_path, str(MY_ENV), f"policy.path={model}", "rollout.engine=torch")
    assert expected in error
    assert path.name in error
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_prints_the_resolved_job_with_its_overrides_and_where_everything_would_run(tmp_path: Path) -> None:
    overrides = ["train.steps=7", "rollout.engine=torch", "policy.shape.layers=2", "environment.options.size=4"]
    ended = trained(tmp_path, str(FROZENLAKE), "--dry-run", *overrides[:3], timeout_s=TIMEOUT_S)
    assert (ended.status, ended.stderr) == (0, "")
    text, _, table = ended.stdout.partition("\n\n")
    job = yaml.safe_load(text)
    assert (job["train"]["steps"], job["rollout"]["engine"], job["policy"]["shape"]["layers"]) == (7, "torch", 2)
    assert "auto" not in ended.stdout
    assert [line.split()[:2] for line in table.splitlines()] == [
        ["process", "role"],
        ["engine-0", "engine"],
        ["trainer-0", "trainer"],
        ["env-worker-0", "env-worker"],
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.stesp=3", "`stesp` - at `$.train`"),
        ("train.steps=many", "`$.train.steps`"),
        ("train.group_size=1", "train.group_size: grpo compares the members of a group"),
        ("policy.path=/nowhere/model", "policy.path: /nowhere/model is not a model directory"),
        ("environment.name=no_such_module:Env", "environment.name: 'no_such_module:Env': no module 'no_such_module'"),
        ("coordinator.store=zk://localhost", "coordinator.store: metadata store 'zk://localhost'"),
    ],
    ids=["unknown-key", "wrong-type", "impossible-size", "no-model-directory", "bad-import-path", "bad-store"],
)
def test_a_bad_setting_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, expected: str
) -> None:
    assert expected in refusal(capsys, tmp_path, str(FROZENLAKE), override)
    assert not (tmp_path / "runs").exists()


def test_a_missing_job_file_is_named(tmp_path: Path) -> None:
    error = error_of(trained(tmp_path, "nowhere.yaml", timeout_s=TIMEOUT_S))
    assert error == "nowhere.yaml: cannot be read: No such file or directory"


def test_a_model_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = {"vocab_size": 300, "max_position_embeddings": 512, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps(config))
    error = error_of(trained(tmp_path, str(FROZENLAKE), "policy.path=model", timeout_s=TIMEOUT_S))
    assert error.startswith(f"policy.tokenizer: {model}/tokenizer.json: expected a fast tokenizer's file")


def test_an_environment_that_does_not_return_is_named_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text("while True:\n    pass\n")
    job = tmp_path / "stuck.yaml"
    job.write_text("environment:\n  name: stuck:Env\n  step_timeout_s: 1\n")
    error = error_of(trained(tmp_path, str(job), timeout_s=TIMEOUT_S))
    assert error.startswith("environment.name: stuck:Env: ")
    assert error.endswith("did not end within 1 s (environment.step_timeout_s)")


def test_resuming_what_is_not_there_is_named(tmp_path: Path) -> None:
    missing = ran(TRAIN, "--resume", "nothing", directory=tmp_path, timeout_s=TIMEOUT_S)
    assert error_of(missing) == "nothing: no such run directory"


def test_a_run_that_goes_on_cannot_be_resumed_by_another_and_one_without_a_checkpoint_not_at_all(
    tmp_path: Path,
) -> None:
    with training(tmp_path, str(FROZENLAKE), *TINY, name="first") as first:
        first.wait_for("starting the trainer", timeout_s=TIMEOUT_S)
        run = (tmp_path / "runs" / "latest").resolve()
        in_use = ran(TRAIN, "--resume", "runs/latest", directory=tmp_path, timeout_s=TIMEOUT_S, name="second")
        assert error_of(in_use).startswith(f"{run}: in use by process {first.pid} on ")
    early = ran(TRAIN, "--resume", "runs/latest", directory=tmp_path, timeout_s=TIMEOUT_S, name="third")
    assert error_of(early) == f"{run}/checkpoints: there is no checkpoint to resume from"


def test_a_store_that_nobody_serves_ends_the_run_by_name(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        store = [f"coordinator.store=zk://{address}", "coordinator.store_timeout_s=1"]
        ended = trained(tmp_path, str(FROZENLAKE), *TINY, *store, timeout_s=TIMEOUT_S)
    assert f"zk://{address}" in error_of(ended, status=1)
    assert ended.leftovers == []


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ["coordinator", str(FROZENLAKE), *TINY, "--port", str(port)]
        ended = ran("coordinator.commands.start", *arguments, directory=tmp_path, timeout_s=TIMEOUT_S)
    assert error_of(ended, status=1) == f"control: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_listening_beyond_loopback_needs_a_key(tmp_path: Path) -> None:
    arguments = ["coordinator", str(FROZENLAKE), *TINY, "--host", "0.0.0.0"]
    ended = ran("coordinator.commands.start", *arguments, directory=tmp_path, timeout_s=TIMEOUT_S)
    assert "0.0.0.0 needs a key file (--key-file)" in error_of(ended)
    assert not (tmp_path / "runs").exists()
