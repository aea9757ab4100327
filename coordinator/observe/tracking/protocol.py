"""What a run and the process of one of its trackers say to each other, as lines of JSON, and what a backend is.

Invariant: every message of the run is answered once, in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec


class Sitting(msgspec.Struct, frozen=True, kw_only=True):
    """The first message: what is tracked."""

    directory: str  # of the run
    project: str
    name: str
    mode: Literal["offline", "online"]
    uri: str | None
    job: dict[str, Any]  # resolved
    resumed_version: int | None = None  # None: the run's first sitting

    @property
    def runs(self) -> Path:
        """Where runs lie beside each other: what several of them share goes here."""
        return Path(self.directory).parent


class Log(msgspec.Struct, frozen=True, tag="log"):
    """Values of one version; all of them finite."""

    version: int
    values: dict[str, float]


class End(msgspec.Struct, frozen=True, tag="end"):
    """The sitting is over."""

    outcome: str


class Answer(msgspec.Struct, frozen=True):
    """``error`` is empty where it was done."""

    error: str = ""


class Backend(Protocol):
    """One tracker of one sitting, used by one thread. Made with a ``Sitting``; any of it may raise and may hang."""

    def log(self, values: dict[str, float], version: int) -> None:
        """Keep values at step ``version``."""

    def finish(self, outcome: str) -> None:
        """Tell how the sitting ended and bring everything to where it belongs; idempotent."""


def ending(outcome: str) -> Literal["finished", "interrupted", "failed"]:
    """How a sitting ended, of the run's last word on it."""
    if outcome.startswith("failed"):
        return "failed"
    return "interrupted" if outcome.startswith("interrupted") else "finished"


def kept_id(directory: str, tracker: str) -> str | None:
    """The id that this run has with a tracker, from an earlier sitting."""
    try:
        text = _id_file(directory, tracker).read_text().strip()
    except FileNotFoundError:
        return None
    return text or None


def keep_id(directory: str, tracker: str, identity: str) -> None:
    """For the next sitting."""
    path = _id_file(directory, tracker)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{identity}\n")


def _id_file(directory: str, tracker: str) -> Path:
    return Path(directory) / "trackers" / f"{tracker}.id"
