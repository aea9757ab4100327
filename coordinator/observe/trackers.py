"""Where a run's metrics go: ``metrics.jsonl`` always, TensorBoard event files where its package is installed.

Invariant: a record that was logged is in the file when the call returns, written by the calling thread; neither
torch nor tensorflow is imported for it (TensorBoard's record format and protocol buffers are enough).
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from coordinator.observe.lines import LineWriter
from coordinator.observe.records import EvalRecord, ImitationRecord, StepRecord
from coordinator.observe.rundir import RunDirectory

STEP_TAGS = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "reward_min": "reward/min",
    "reward_max": "reward/max",
    "reward_trend": "reward/trend",
    "success_rate": "success/training",
    "turns_mean": "rollout/turns",
    "tokens_per_s": "rollout/tokens_per_s",
    "staleness_mean": "rollout/staleness_mean",
    "staleness_max": "rollout/staleness_max",
    "in_flight": "rollout/in_flight",
    "buffered": "rollout/buffered",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "entropy": "train/entropy",
    "ratio_mean": "train/ratio_mean",
    "kl_rollout": "train/kl_rollout",
    "tokens": "train/tokens",
    "trajectories": "train/trajectories",
}
"""Field of ``StepRecord`` -> TensorBoard tag; ``lost``, ``seconds`` and ``environment`` become one tag for each key."""

EVAL_TAGS = {
    "success": "success/evaluation",
    "return_mean": "evaluation/return_mean",
    "turns_mean": "evaluation/turns",
}


IMITATION_TAGS = {
    "loss": "sft/loss",
    "held_out_loss": "sft/held_out_loss",
    "grad_norm": "sft/grad_norm",
    "entropy": "sft/entropy",
    "learning_rate": "sft/learning_rate",
    "tokens_per_s": "sft/tokens_per_s",
}


class Tracker(Protocol):
    """Takes the records of one run, in order."""

    def log_step(self, record: StepRecord) -> None:
        """Keep one step."""

    def log_evaluation(self, record: EvalRecord) -> None:
        """Keep one evaluation."""

    def log_imitation(self, record: ImitationRecord) -> None:
        """Keep one step of imitation."""

    def close(self) -> None:
        """Bring everything to the disk; idempotent."""


class JsonlTracker:
    """One line a record; values that are not finite are ``null``."""

    def __init__(self, path: Path) -> None:
        self._lines = LineWriter(path)

    def log_step(self, record: StepRecord) -> None:
        self._lines.write(record)

    def log_evaluation(self, record: EvalRecord) -> None:
        self._lines.write(record)

    def log_imitation(self, record: ImitationRecord) -> None:
        self._lines.write(record)

    def close(self) -> None:
        self._lines.close()


class TensorBoardTracker:
    """One event file a sitting. A resumed run hides what an earlier sitting logged beyond the resumed version."""

    def __init__(self, directory: Path, *, resumed_version: int | None = None) -> None:
        """Raises ``ModuleNotFoundError`` where the tensorboard package is not installed."""
        from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() / 1e9:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter((directory / name).open("xb"))
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if resumed_version is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(self._event(wall_time=time.time(), step=resumed_version + 1, session_log=start))

    def log_step(self, record: StepRecord) -> None:
        values = {tag: float(getattr(record, field)) for field, tag in STEP_TAGS.items()}
        values |= {f"lost/{reason}": float(count) for reason, count in record.lost.items()}
        values |= {f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()}
        values |= {f"environment/{name}": mean for name, mean in record.environment.items()}
        self._scalars(values, record.version)

    def log_evaluation(self, record: EvalRecord) -> None:
        values = {tag: float(getattr(record, field)) for field, tag in EVAL_TAGS.items()}
        values |= {f"evaluation/environment/{name}": mean for name, mean in record.environment.items()}
        self._scalars(values, record.version)

    def log_imitation(self, record: ImitationRecord) -> None:
        self._scalars({tag: float(getattr(record, field)) for field, tag in IMITATION_TAGS.items()}, record.version)

    def close(self) -> None:
        if not self._records.closed:
            self._records.close()

    def _scalars(self, values: dict[str, float], version: int) -> None:
        finite = {tag: value for tag, value in values.items() if math.isfinite(value)}
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in finite.items()]
        self._write(self._event(wall_time=time.time(), step=version, summary=self._summary(value=scalars)))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def open_trackers(
    run: RunDirectory, say: Callable[[str], None], *, resumed_version: int | None = None
) -> list[Tracker]:
    """The trackers of a run; ``say`` is told once where TensorBoard is missing."""
    trackers: list[Tracker] = [JsonlTracker(run.metrics)]
    try:
        trackers.append(TensorBoardTracker(run.events, resumed_version=resumed_version))
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(("tensorboard", "google")):
            raise
        say(f"no TensorBoard events: the package {error.name.partition('.')[0]} is not installed")
    return trackers
