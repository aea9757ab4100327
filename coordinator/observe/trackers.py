"""Where a run's metrics go: ``metrics.jsonl`` always, and the trackers that its job asks for.

Invariant: a record that was logged is in ``metrics.jsonl`` when the call returns, and no tracker makes a run wait or
fail: what may block lives in a process of its own (``coordinator.observe.tracking``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from coordinator.observe.lines import LineWriter
from coordinator.observe.records import EvalRecord, ImitationRecord, StepRecord
from coordinator.observe.rundir import RunDirectory
from coordinator.observe.tensorboard_events import TensorBoardTracker, writing_modules
from coordinator.observe.tracking.protocol import Sitting
from coordinator.observe.tracking.remote import RemoteTracker
from coordinator.observe.tracking.settings import TrackerSettings


class Tracker(Protocol):
    """Takes the records of one run, in order."""

    def log_step(self, record: StepRecord) -> None:
        """Keep one step."""

    def log_evaluation(self, record: EvalRecord) -> None:
        """Keep one evaluation."""

    def log_imitation(self, record: ImitationRecord) -> None:
        """Keep one step of imitation."""

    def end(self, outcome: str) -> None:
        """The run is over; does not wait."""

    def close(self) -> None:
        """Bring everything to where it belongs; idempotent."""


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

    def end(self, outcome: str) -> None:
        """The lines say how far the run came; how it ended is the report's to say."""

    def close(self) -> None:
        self._lines.close()


def load_ahead() -> None:
    """So that ``open_trackers`` takes no time, for whoever has little then."""
    with suppress(ModuleNotFoundError):
        writing_modules()


def open_trackers(
    run: RunDirectory, say: Callable[[str], None], *, resumed_version: int | None = None
) -> list[Tracker]:
    """The trackers that the run's job names; ``say`` is told of each that cannot be had."""
    job = run.read_job()
    settings = msgspec.convert(job.get("trackers", {}), TrackerSettings)
    trackers: list[Tracker] = [JsonlTracker(run.metrics)]
    if settings.use is None or "tensorboard" in settings.use:
        trackers += _tensorboard(run, say, resumed_version)
    for name in dict.fromkeys(settings.use or []):
        if name == "tensorboard":
            continue
        sitting = _sitting(name, settings, run, job, resumed_version)
        try:
            trackers.append(RemoteTracker(name, sitting, run.logs / f"tracker-{name}.log", say))
        except OSError as error:
            say(f"{name} cannot be started: {error}")
    return trackers


def _sitting(
    name: str, settings: TrackerSettings, run: RunDirectory, job: dict[str, Any], resumed_version: int | None
) -> Sitting:
    return Sitting(
        directory=str(run.path),
        project=settings.project,
        name=settings.name or run.path.name,
        mode=settings.mode,
        uri=settings.uri.get(name),
        job=job,
        resumed_version=resumed_version,
    )


def _tensorboard(run: RunDirectory, say: Callable[[str], None], resumed_version: int | None) -> list[Tracker]:
    try:
        return [TensorBoardTracker(run.events, resumed_version=resumed_version)]
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(("tensorboard", "google")):
            raise
        say(f"no TensorBoard events: the package {error.name.partition('.')[0]} is not installed")
        return []
