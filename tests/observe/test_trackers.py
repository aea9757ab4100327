"""What TensorBoard's own reader finds in the event files, and what it costs to import."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from coordinator.observe.rundir import RunDirectory
from coordinator.observe.tensorboard_events import TensorBoardTracker
from coordinator.observe.trackers import JsonlTracker, open_trackers
from tests.observe.samples import evaluation, step


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_tensorboard_reads_back_steps_and_evaluations(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.log_step(step(1, reward_mean=0.25, lost={"stale": 3}))
    tracker.log_step(step(2, reward_mean=0.5, seconds={"train": 1.5}))
    tracker.log_evaluation(evaluation(2, success=0.75))
    tracker.close()
    tracker.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5)]
    assert scalars(tmp_path, "lost/stale")[0] == (1, 3.0)
    assert scalars(tmp_path, "seconds/train")[1] == (2, 1.5)
    assert scalars(tmp_path, "success/evaluation") == [(2, 0.75)]


def test_records_are_readable_before_the_tracker_is_closed(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.log_step(step(1, loss=0.125))
    assert scalars(tmp_path, "train/loss") == [(1, 0.125)]
    tracker.close()


def test_a_resumed_run_hides_what_lay_beyond_its_checkpoint(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path)
    for number in (1, 2, 3):
        first.log_step(step(number, loss=float(number)))
    first.close()
    second = TensorBoardTracker(tmp_path, resumed_version=2)
    second.log_step(step(3, loss=30.0))
    second.close()
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_values_that_are_not_finite_are_left_out_of_tensorboard(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.log_step(step(1, loss=math.nan))
    tracker.log_step(step(2, loss=0.5))
    tracker.close()
    assert scalars(tmp_path, "train/loss") == [(2, 0.5)]
    assert scalars(tmp_path, "reward/mean")[0][0] == 1


def test_jsonl_lines_are_valid_json_whatever_the_numbers(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log_step(step(1, loss=math.nan, reward_max=math.inf))
    tracker.log_evaluation(evaluation(1))
    tracker.close()

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["record"] for line in lines] == ["step", "evaluation"]
    assert (lines[0]["loss"], lines[0]["reward_max"], lines[0]["lost"]) == (None, None, {"stale": 2, "env_failed": 1})


def test_missing_tensorboard_is_said_once_and_is_not_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # importing it now raises ModuleNotFoundError
    said: list[str] = []
    with RunDirectory.create(tmp_path, "lake") as run:
        trackers = open_trackers(run, said.append)
        trackers[0].log_step(step(1))
        trackers[0].close()
        assert run.metrics.read_text().count("\n") == 1
    assert len(trackers) == 1
    assert said == ["no TensorBoard events: the package tensorboard is not installed"]


def test_observing_a_run_imports_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from coordinator.observe import overlap, records, rundir, tensorboard_events, trackers\n"
        "assert 'tensorboard' not in sys.modules and 'rich' not in sys.modules\n"
        "tensorboard_events.TensorBoardTracker(pathlib.Path(sys.argv[1])).close()\n"
        "print(sorted({'torch', 'tensorflow'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
