"""What every tracker keeps, with its real library on this machine alone."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from coordinator.observe.tracking.protocol import Sitting
from coordinator.observe.tracking.remote import Deadlines, RemoteTracker
from coordinator.observe.tracking.settings import LIBRARIES
from tests.observe.samples import evaluation, step
from tests.tracking.readers import READERS, Kept

PATIENT = Deadlines(start_s=300.0, log_s=120.0, finish_s=120.0)
JOB = {"name": "lake", "seed": 7, "train": {"steps": 3, "learning_rate": 0.001}}


class Tracked:
    """A run and one of its trackers."""

    def __init__(self, name: str, runs: Path) -> None:
        self.name = name
        self.runs = runs
        self.run = runs / "20260131-142501-lake"
        self.run.mkdir(parents=True)
        self.said: list[str] = []

    def sit(self, *, resumed_version: int | None = None, **job: Any) -> RemoteTracker:
        sitting = Sitting(
            directory=str(self.run),
            project="lakes",
            name=self.run.name,
            mode="offline",
            uri=None,
            job=JOB | job,
            resumed_version=resumed_version,
        )
        log = self.run / "tracker.log"
        return RemoteTracker(self.name, sitting, log, self.said.append, deadlines=PATIENT)

    def kept(self) -> Kept:
        return READERS[self.name](self.runs, self.run)


@pytest.fixture(params=sorted(READERS))
def tracked(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracked:
    library = LIBRARIES[request.param]
    if find_spec(library.module) is None:
        pytest.skip(f"{library.package} is not installed here; it comes with the extra rollart[{library.extra}]")
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    return Tracked(request.param, tmp_path / "runs")


def close(tracker: RemoteTracker, outcome: str) -> None:
    tracker.end(outcome)
    tracker.close()
    tracker.close()


def test_two_sittings_are_one_run_with_their_values_job_name_and_outcome(tracked: Tracked) -> None:
    first = tracked.sit()
    first.log_step(step(1, loss=math.nan, reward_mean=0.25, lost={"stale": 3}, environment={"calls": 2.0}))
    first.log_evaluation(evaluation(1, success=0.875, return_mean=math.inf))
    close(first, "interrupted; checkpoint v00001 written")
    before = tracked.kept()
    assert before.status == "interrupted"
    assert before.name == "20260131-142501-lake"
    assert before.metrics["reward/mean"] == [(1, 0.25)]
    assert before.metrics["lost/stale"] == [(1, 3.0)]
    assert before.metrics["environment/calls"] == [(1, 2.0)]
    assert before.metrics["success/evaluation"] == [(1, 0.875)]
    assert not {"train/loss", "evaluation/return_mean"} & set(before.metrics)  # were not finite
    rate = before.config["train.learning_rate"] if "train.learning_rate" in before.config else before.config["train"]
    assert rate in ("0.001", {"steps": 3, "learning_rate": 0.001})

    second = tracked.sit(resumed_version=1, seed=8)
    second.log_step(step(2, loss=2.0, reward_mean=0.75, seconds={"train": 1.5}))
    close(second, "all 2 steps are done; checkpoint v00002 written")
    assert tracked.said == []
    assert (first.missed, second.missed) == (0, 0)
    kept = tracked.kept()
    assert kept.metrics["reward/mean"] == [(1, 0.25), (2, 0.75)]
    assert kept.metrics["train/loss"] == [(2, 2.0)]
    assert kept.metrics["seconds/train"][-1] == (2, 1.5)
    assert kept.status == "finished"


@pytest.mark.deep
def test_a_place_that_cannot_be_written_costs_the_tracker_and_nothing_else(
    tracked: Tracked, break_place: Callable[[Tracked], None]
) -> None:
    break_place(tracked)
    tracker = tracked.sit()
    tracker.log_step(step(1))
    close(tracker, "finished")
    assert len(tracked.said) == 1
    assert tracked.said[0].startswith(f"{tracked.name} is dropped: ")
    assert tracker.missed == 1


@pytest.fixture
def break_place() -> Callable[[Tracked], None]:
    """A file is where the tracker wants its directory."""

    def breaks(tracked: Tracked) -> None:
        place = tracked.run if tracked.name == "wandb" else tracked.runs
        (place / tracked.name).write_text("")

    return breaks
