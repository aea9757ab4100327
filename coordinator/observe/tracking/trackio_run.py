"""trackio. Offline, all runs of a directory share its database in ``RUNS/trackio`` (or ``TRACKIO_DIR``).

Invariant: a resumed run goes on under its name; nothing is sent anywhere while offline, whatever the environment says.
trackio knows no outcome: it becomes an alert, which its dashboard shows.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from coordinator.observe.tracking.protocol import Sitting, ending


class TrackioRun:
    """A ``Backend``."""

    def __init__(self, sitting: Sitting) -> None:
        remote = {}
        if sitting.mode == "offline":
            place = os.environ.setdefault("TRACKIO_DIR", str(sitting.runs / "trackio"))
            Path(place).mkdir(parents=True, exist_ok=True)  # the library would only warn where that is impossible
            os.environ.pop("TRACKIO_SPACE_ID", None)
            os.environ.pop("TRACKIO_SERVER_URL", None)
        elif sitting.uri is not None:
            remote = {"server_url" if "://" in sitting.uri else "space_id": sitting.uri}
        import trackio  # noqa: PLC0415

        self._trackio: Any = trackio
        self._run: Any = trackio.init(
            project=sitting.project,
            name=sitting.name,
            config=sitting.job,
            resume="never" if sitting.resumed_version is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            **remote,
        )

    def log(self, values: dict[str, float], version: int) -> None:
        self._run.log(values, step=version)

    def finish(self, outcome: str) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        levels = self._trackio.AlertLevel
        level = {"finished": levels.INFO, "interrupted": levels.WARN, "failed": levels.ERROR}[ending(outcome)]
        run.alert(title=ending(outcome), text=outcome, level=level)
        run.finish()
