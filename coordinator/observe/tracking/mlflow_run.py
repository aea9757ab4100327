"""MLflow. Offline, all runs of a directory share the store ``RUNS/mlflow``, unless ``trackers.uri`` names another.

Invariant: a run has one MLflow run, whose id is kept in its directory, in all its sittings. Parameters there cannot be
changed: what a resumed run changes becomes a tag.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

from coordinator.observe.comparison import flattened
from coordinator.observe.tracking.protocol import Sitting, ending, keep_id, kept_id

MOST_PARAMETERS = 100
"""That MLflow takes at once."""

MOST_TEXT = 500
"""Of a parameter: every MLflow server takes that."""

STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MlflowRun:
    """A ``Backend``."""

    def __init__(self, sitting: Sitting) -> None:
        uri = sitting.uri
        if uri is None and sitting.mode == "offline":
            uri = f"file:{sitting.runs / 'mlflow'}"
        if uri is not None and "://" not in uri:  # a directory; MLflow wants to be told that it is meant
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param  # noqa: PLC0415
        from mlflow.tracking import MlflowClient  # noqa: PLC0415

        self._metric, self._param = Metric, Param
        self._client: Any = MlflowClient(tracking_uri=uri)
        resumed = kept_id(sitting.directory, "mlflow") if sitting.resumed_version is not None else None
        self._id = resumed or self._create(sitting)
        keep_id(sitting.directory, "mlflow", self._id)
        if resumed:
            self._client.update_run(self._id, status="RUNNING")
        self._log_job(sitting)
        self._finished = False

    def _create(self, sitting: Sitting) -> str:
        experiment = self._client.get_experiment_by_name(sitting.project)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(sitting.project)
        run = self._client.create_run(identity, run_name=sitting.name, tags={"directory": sitting.directory})
        return str(run.info.run_id)

    def _log_job(self, sitting: Sitting) -> None:
        known = self._client.get_run(self._id).data.params
        wanted = {
            re.sub(r"[^\w\-./ ]", "_", key): value[:MOST_TEXT] or '""' for key, value in flattened(sitting.job).items()
        }
        for key, value in wanted.items():
            if known.get(key, value) != value:
                self._client.set_tag(self._id, f"resumed.v{sitting.resumed_version}.{key}", value)
        fresh = [self._param(key, value) for key, value in wanted.items() if key not in known]
        for first in range(0, len(fresh), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=fresh[first : first + MOST_PARAMETERS])

    def log(self, values: dict[str, float], version: int) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [self._metric(tag, value, now, version) for tag, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, outcome: str) -> None:
        if self._finished:
            return
        self._finished = True
        self._client.set_tag(self._id, "outcome", outcome)
        self._client.set_terminated(self._id, STATUS[ending(outcome)])
