"""Which trackers a job asks for, and whether they can be had.

Invariant: nothing here imports a tracker's library.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import msgspec

from actors.settings import Settings


class TrackerSettings(Settings, frozen=True):
    """Where metrics go beside ``metrics.jsonl``."""

    use: list[str] | None = None  # of tensorboard, wandb, mlflow, trackio; null: tensorboard where it is installed
    project: str = "rollart"  # W&B's and trackio's project, MLflow's experiment
    name: str | None = None  # of the run there; null: that of the run directory
    mode: Literal["offline", "online"] = "offline"  # offline: files on this machine, nothing is sent anywhere
    uri: dict[str, str] = msgspec.field(default_factory=dict)  # tracker -> its server, or MLflow's store


class Library(msgspec.Struct, frozen=True):
    """What a tracker needs."""

    module: str  # what is imported
    extra: str  # of this package, which brings it
    package: str


LIBRARIES = {
    "tensorboard": Library("tensorboard", "tensorboard", "tensorboard"),
    "wandb": Library("wandb", "wandb", "wandb"),
    "mlflow": Library("mlflow", "mlflow", "mlflow-skinny"),
    "trackio": Library("trackio", "trackio", "trackio"),
}
"""Every tracker that there is."""

WITH_URI = ("wandb", "mlflow", "trackio")


class TrackersUnusable(ValueError):
    """A tracker that cannot be used as asked; one line that begins with the setting."""


def check_settings(settings: TrackerSettings) -> None:
    """Refuse what can never work. Raises ``TrackersUnusable``."""
    for name in settings.use or []:
        if name not in LIBRARIES:
            raise TrackersUnusable(f"trackers.use: no tracker {name!r}; there are {', '.join(LIBRARIES)}")
    for name, uri in settings.uri.items():
        if name not in WITH_URI:
            raise TrackersUnusable(f"trackers.uri: {name!r} takes none; expected one of {', '.join(WITH_URI)}")
        if settings.mode == "offline" and uri.startswith(("http://", "https://")):
            raise TrackersUnusable(
                f"trackers.uri.{name}: {uri} is a server, but trackers.mode is offline; set trackers.mode=online"
            )


def check_installed(settings: TrackerSettings) -> None:
    """Raises ``TrackersUnusable`` where a tracker was asked for by name and is not installed."""
    for name in settings.use or []:
        library = LIBRARIES[name]
        if find_spec(library.module) is None:
            raise TrackersUnusable(
                f"trackers.use: {name} is not installed; install the extra rollart[{library.extra}], "
                f"that is: python -m pip install {library.package}"
            )
