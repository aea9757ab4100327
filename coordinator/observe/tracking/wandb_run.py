"""Weights & Biases. Offline, a run's files are in its own directory: ``wandb sync RUN/wandb/offline-run-*``.

Invariant: a run has one id, kept in its directory, in all its sittings. Charts are over ``version``; W&B's own step is
the version too, except where a resumed run repeats versions that its server has seen (it takes no step twice).
"""

from __future__ import annotations

import uuid
from typing import Any

from coordinator.observe.tracking.protocol import Sitting, ending, keep_id, kept_id


class WandbRun:
    """A ``Backend``."""

    def __init__(self, sitting: Sitting) -> None:
        import wandb  # noqa: PLC0415

        resumed = sitting.resumed_version is not None
        identity = (kept_id(sitting.directory, "wandb") if resumed else None) or uuid.uuid4().hex[:12]
        keep_id(sitting.directory, "wandb", identity)
        more = {} if sitting.uri is None else {"base_url": sitting.uri}
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, disable_job_creation=True, **more
        )
        self._run: Any = wandb.init(
            project=sitting.project,
            name=sitting.name,
            id=identity,
            dir=sitting.directory,
            mode=sitting.mode,
            resume="allow" if resumed else None,
            config=sitting.job,
            settings=settings,
        )
        self._run.config.update(sitting.job, allow_val_change=True)
        self._run.define_metric("*", step_metric="version")

    def log(self, values: dict[str, float], version: int) -> None:
        step = version if version >= self._run.step else None
        self._run.log({**values, "version": version}, step=step)

    def finish(self, outcome: str) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        run.summary["outcome"] = outcome
        run.finish(exit_code={"finished": 0, "interrupted": 130, "failed": 1}[ending(outcome)])
