"""A bundle of a run directory: what is in it, what is not, and that no secret leaves."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from bus.security import make_key
from coordinator.bundle.archive import Archive
from coordinator.bundle.files import Collected, run_files, summary
from coordinator.bundle.redaction import Redactor
from coordinator.commands import support_bundle

TOKEN = "tok-4f6b1c9e77aa"
STEP = {
    "record": "step", "step": 3, "version": 3, "elapsed_s": 1.0, "reward_mean": 0.5, "reward_std": 0.0,
    "reward_min": 0.0, "reward_max": 1.0, "reward_trend": 0.5, "success_rate": 0.5, "trajectories": 4, "tokens": 8,
    "tokens_per_s": 9.0, "staleness_mean": 0.0, "staleness_max": 0, "in_flight": 0, "buffered": 0, "lost": {},
    "loss": 0.1, "grad_norm": 0.1, "entropy": 0.1, "ratio_mean": 1.0, "kl_rollout": 0.0, "seconds": {},
    "turns_mean": 2.0,
}  # fmt: skip
LEDGER = [
    {"event": "admitted", "tickets": ["t0"]},
    {"event": "admitted", "tickets": ["t1"]},
    {"event": "stored", "tickets": ["t0"], "version": 0},
    {"event": "lost", "tickets": ["t1"], "reason": "env_failed", "detail": "no board"},
    {"event": "trained", "tickets": ["t0"], "version": 1},
]


def dead_run(base: Path) -> Path:
    """A directory as a killed run leaves it, with secrets in every place where one could be."""
    run = base / "20260131-142501-lake"
    for name in ("logs", "checkpoints/v00003", "store", "samples", "metadata"):
        (run / name).mkdir(parents=True)
    (run / "job.yaml").write_text(f"name: lake\ntrackers:\n  api_key: {TOKEN}\n")
    (run / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
    (run / "ledger.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in LEDGER))
    (run / "logs" / "control.log").write_text(f'{{"message":"password=hunter2!! and {TOKEN}"}}\n')
    (run / "logs" / "engine-0.out").write_text("Authorization: Bearer abcdefghijkl\n")
    (run / "checkpoints" / "v00003" / "run.json").write_text("{}")
    (run / "checkpoints" / "v00003" / "model.safetensors").write_bytes(b"weights")
    (run / "store" / "trajectories.log").write_bytes(b"trajectories")
    (run / "coordinator.address").write_text("tcp://127.0.0.1:9\n")
    make_key(run / "cluster.key")
    (run / "logs" / "link.log").symlink_to(run / "cluster.key")
    return run


def contents(bundle: Path) -> dict[str, str]:
    """Name below the bundle's own directory -> text."""
    with tarfile.open(bundle) as tar:
        return {name.partition("/")[2]: text_of(tar, name) for name in tar.getnames()}


def text_of(tar: tarfile.TarFile, name: str) -> str:
    file = tar.extractfile(name)
    assert file is not None
    return file.read().decode()


def test_no_secret_leaves_with_a_dead_runs_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = dead_run(tmp_path)
    key = json.loads((run / "cluster.key").read_text())
    monkeypatch.setenv("WANDB_API_KEY", "env-secret-8812")
    monkeypatch.setenv("SOME_URL", "https://ada:pa55word@example.org")
    (run / "logs" / "trainer-0.log").write_text("started with env-secret-8812\n")
    output = tmp_path / "out.tar.gz"
    assert support_bundle.main([str(run), "--output", str(output), "--timeout", "0.5"]) == 0
    found = contents(output)
    everything = "\n".join([*found, *found.values()])
    for secret in (TOKEN, "hunter2", "abcdefghijkl", "env-secret-8812", "pa55word", key["pairs"][0]["secret"]):
        assert secret not in everything
    assert "WANDB_API_KEY=<left-out>" in found["host/environment.txt"]
    assert "job.yaml" in found["INDEX.txt"]
    assert "1 secrets left out" in found["INDEX.txt"]
    assert output.stat().st_mode & 0o077 == 0
    assert str(output) in capsys.readouterr().out


def test_a_dead_runs_bundle_has_logs_configuration_metrics_and_the_ledgers_summary(tmp_path: Path) -> None:
    run = dead_run(tmp_path)
    output = tmp_path / "out.tar.gz"
    assert support_bundle.main([str(run), "--output", str(output), "--timeout", "0.5"]) == 0
    found = contents(output)
    assert {
        "INDEX.txt",
        "run/job.yaml",
        "run/metrics.jsonl",
        "run/ledger.jsonl",
        "run/logs/control.log",
        "run/logs/engine-0.out",
        "run/checkpoints/v00003/run.json",
        "run/files.txt",
        "run/summary.json",
        "host/hardware.json",
        "host/affinity.json",
        "host/packages.txt",
        "host/python.txt",
        "host/environment.txt",
    } <= set(found)
    assert not [name for name in found if "safetensors" in name or "trajectories.log" in name or "cluster.key" in name]
    assert "checkpoints/v00003/model.safetensors" in found["run/files.txt"]
    assert "msgspec==" in found["host/packages.txt"]
    told = json.loads(found["run/summary.json"])
    assert told["tickets"] == {"admitted": 2, "stored": 1, "lost": 1, "trained": 1}
    assert (told["lost"], told["lost_details"]) == ({"env_failed": 1}, {"env_failed": "no board"})
    assert told["last_step"]["step"] == 3
    assert all(name in found["INDEX.txt"] for name in found if name != "INDEX.txt")


def test_of_a_long_file_the_end_is_kept_from_a_whole_line_on(tmp_path: Path) -> None:
    run = dead_run(tmp_path)
    (run / "logs" / "control.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    files = {file.name: file for file in run_files(run, Redactor(), most=100)}
    log = files["run/logs/control.log"]
    assert log.data.splitlines() == [f"line {number}".encode() for number in range(989, 1000)]
    assert log.note == "the last 99 of 8890 bytes"


def test_an_empty_directory_of_a_run_has_a_summary_too(tmp_path: Path) -> None:
    told = summary(tmp_path)
    assert (told.steps, told.last_step, told.tickets, told.lost) == (0, None, {}, {})


def test_a_bundle_that_fails_leaves_no_half_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"

    def fail() -> None:
        with Archive(path, "about") as archive:
            archive.add(Collected("a", b"1"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_run_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert support_bundle.main([str(tmp_path)]) == 1
    assert "not a run directory" in capsys.readouterr().err
