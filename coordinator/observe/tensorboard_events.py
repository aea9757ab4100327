"""TensorBoard event files, written by the calling thread: they are files on this machine, like ``metrics.jsonl``.

Invariant: a record that was logged is in the file when the call returns; neither torch nor tensorflow is imported for
it (TensorBoard's record format and protocol buffers are enough).
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from coordinator.observe.records import EvalRecord, ImitationRecord, StepRecord
from coordinator.observe.values import evaluation_values, imitation_values, step_values


def writing_modules() -> tuple[Any, Any, Any]:
    """Events, summaries and the writer. The first call takes long. Raises ``ModuleNotFoundError`` where the tensorboard
    package is not installed."""
    from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415
    from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415

    return event_pb2, summary_pb2, RecordWriter


class TensorBoardTracker:
    """One event file a sitting. A resumed run hides what an earlier sitting logged beyond the resumed version."""

    def __init__(self, directory: Path, *, resumed_version: int | None = None) -> None:
        """Raises ``ModuleNotFoundError`` where the tensorboard package is not installed."""
        event_pb2, summary_pb2, writer = writing_modules()
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() / 1e9:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = writer((directory / name).open("xb"))
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if resumed_version is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(self._event(wall_time=time.time(), step=resumed_version + 1, session_log=start))

    def log_step(self, record: StepRecord) -> None:
        self._scalars(step_values(record), record.version)

    def log_evaluation(self, record: EvalRecord) -> None:
        self._scalars(evaluation_values(record), record.version)

    def log_imitation(self, record: ImitationRecord) -> None:
        self._scalars(imitation_values(record), record.version)

    def end(self, outcome: str) -> None:
        """An event file has no place for it."""

    def close(self) -> None:
        if not self._records.closed:
            self._records.close()

    def _scalars(self, values: dict[str, float], version: int) -> None:
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(self._event(wall_time=time.time(), step=version, summary=self._summary(value=scalars)))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()
