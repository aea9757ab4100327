"""A job names its trackers; what it names wrongly, or cannot have, is said before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.commands.train import main
from coordinator.job import JobError, convert
from coordinator.observe.rundir import RunDirectory
from coordinator.observe.tensorboard_events import TensorBoardTracker
from coordinator.observe.trackers import JsonlTracker, open_trackers
from coordinator.observe.tracking.remote import RemoteTracker


@pytest.mark.parametrize(
    ("trackers", "complaint"),
    [
        ({"use": ["wandbb"]}, "trackers.use: no tracker 'wandbb'; there are tensorboard, wandb, mlflow, trackio"),
        ({"use": "wandb"}, "Expected `array | null`, got `str` - at `$.trackers.use`"),
        ({"mode": "offlin"}, "Invalid enum value 'offlin' - at `$.trackers.mode`"),
        ({"uri": {"tensorboard": "x"}}, "trackers.uri: 'tensorboard' takes none; expected one of wandb, mlflow"),
        (
            {"uri": {"mlflow": "http://host:5000"}},
            "trackers.uri.mlflow: http://host:5000 is a server, but trackers.mode is offline; set trackers.mode=online",
        ),
        ({"users": ["wandb"]}, "unknown field `users`"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(trackers: dict[str, Any], complaint: str) -> None:
    with pytest.raises(JobError) as error:
        convert({"trackers": trackers}, "job.yaml", [])
    assert complaint in str(error.value)


def test_settings_that_work() -> None:
    job = convert({}, "job.yaml", ["trackers.use=[mlflow]", "trackers.mode=online", "trackers.uri.mlflow=http://h:1"])
    assert job.trackers.use == ["mlflow"]
    assert job.trackers.uri == {"mlflow": "http://h:1"}


def test_a_tracker_that_is_not_installed_stops_the_command_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    job = tmp_path / "job.yaml"
    job.write_text("trackers: {use: [wandb]}\n")
    assert main([str(job), "--runs", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == (
        "error: trackers.use: wandb is not installed; install the extra rollart[wandb], "
        "that is: python -m pip install wandb\n"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("use", "kinds"),
    [
        (None, [JsonlTracker, TensorBoardTracker]),
        ([], [JsonlTracker]),
        (["tensorboard"], [JsonlTracker, TensorBoardTracker]),
        (["trackio", "trackio"], [JsonlTracker, RemoteTracker]),
    ],
)
def test_a_run_opens_the_trackers_that_its_job_names(
    tmp_path: Path, use: list[str] | None, kinds: list[type[object]]
) -> None:
    with RunDirectory.create(tmp_path, "lake") as run:
        run.write_job(convert({"trackers": {"use": use}}, "job.yaml", []))
        trackers = open_trackers(run, lambda text: None)
        found = [type(tracker) for tracker in trackers]
        for tracker in trackers:
            if isinstance(tracker, RemoteTracker):
                tracker.abandon()
            else:
                tracker.close()
    assert found == kinds
