"""Structured logs: every event is one line of JSON in ``<directory>/<node>.log``, whatever the message contains.

Invariant: a line holds ``time`` (UTC), ``level``, ``job``, ``node``, ``logger``, ``message`` and, where the event
names them, ``actor``, ``trajectory`` and ``version``; from within a handler also the ``actor`` and the ``trace`` of the
message (``bus.tracing``), the same for all that one message causes on any node. Warnings and worse also go to stderr,
for people, a warning in the same words at most every ``AGAIN_S``.

    configure_logging("engine-0", run.logs, job="lake")
    log = logging.getLogger(__name__)
    log.info("weights are in", extra={"actor": "engine-0", "version": 7})

Nothing that could fail is in the caller's way: a value JSON does not know is written as its text.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from bus.tracing import spelled, trace

acting: ContextVar[str] = ContextVar("acting", default="")
"""The actor in whose handler this code runs; set by its cell."""

FIELDS = ("actor", "trajectory", "version")
"""Keys of ``extra`` that become fields of the line."""

FOR_THE_FILE_ALONE = ("py.warnings", "kazoo")
"""Loggers of others that repeat themselves, about what our own code reports where it matters."""

AGAIN_S = 10.0
"""When people are told the same warning again, and how often it came meanwhile."""
KEPT_WARNINGS = 100
"""Of how many different ones it is known when they were told."""

_installed: list[logging.Handler] = []


def configure_logging(
    node: str, directory: Path, *, job: str = "", level: int = logging.INFO, stderr: TextIO | None = None
) -> Path:
    """Send this process's logs to ``directory/<node>.log`` and return that file.

    ``node`` is the process's name, unique in the job. Warnings issued by Python code and what kazoo says go to the file
    alone, uncaught exceptions to both. Calling it again replaces what an earlier call set up. ``stderr`` defaults to
    the stream that is ``sys.stderr`` when an event happens.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{node.replace('/', '-')}.log"
    to_file = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    to_file.setFormatter(JsonFormatter(node, job))
    to_people: logging.Handler = logging.StreamHandler(stderr) if stderr else _StderrHandler()
    to_people.setLevel(logging.WARNING)
    to_people.setFormatter(ReadableFormatter(node))
    to_people.addFilter(lambda record: not record.name.startswith(FOR_THE_FILE_ALONE))
    to_people.addFilter(_Repetitions())
    close_logging()
    root = logging.getLogger()
    root.setLevel(level)
    for handler in (to_file, to_people):
        root.addHandler(handler)
        _installed.append(handler)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    return path


def close_logging() -> None:
    """Undo ``configure_logging`` and close the file; idempotent."""
    for handler in _installed:
        logging.getLogger().removeHandler(handler)
        handler.close()
    _installed.clear()
    logging.captureWarnings(False)
    sys.excepthook = sys.__excepthook__


class JsonFormatter(logging.Formatter):
    """One event, one line of valid JSON."""

    def __init__(self, node: str, job: str) -> None:
        super().__init__()
        self._constant = {"job": job, "node": node}

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._constant,
            "logger": record.name,
        }
        event |= {field: _plain(getattr(record, field)) for field in FIELDS if hasattr(record, field)}
        if acting.get():
            event.setdefault("actor", acting.get())
        if trace.get():
            event["trace"] = spelled(trace.get())
        event["message"] = record.getMessage()
        if record.exc_info:
            event["error"] = self.formatException(record.exc_info)
        return json.dumps(event)


class ReadableFormatter(logging.Formatter):
    """``warning: engine-0: text (trajectory t-7, version 3)``."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        named = ", ".join(f"{field} {getattr(record, field)}" for field in FIELDS if hasattr(record, field))
        text = f"{record.levelname.lower()}: {self._node}: {record.getMessage()}" + (f" ({named})" if named else "")
        if getattr(record, "untold", 0):
            text += f" (and {record.untold} times more since this was last said)"  # type: ignore[attr-defined]
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Repetitions(logging.Filter):
    """Leaves out a warning that was told less than ``AGAIN_S`` before, and counts it for the next telling."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[tuple[str, str], tuple[float, int]] = {}  # when last, how many were left out since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        said = record.name, record.getMessage()
        last, untold = self._told.pop(said, (-math.inf, 0))
        if record.created - last < AGAIN_S:
            self._told[said] = last, untold + 1
            return False
        record.untold = untold
        self._told[said] = record.created, 0
        if len(self._told) > KEPT_WARNINGS:
            del self._told[next(iter(self._told))]
        return True


class _LogFile(logging.FileHandler):
    """A file that may lie on a full disk: that is said once, and nothing else suffers from it."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError) and not self._told:
            self._told = True
            print(f"warning: {self.baseFilename} cannot be written, and will have gaps: {error}", file=sys.stderr)
        elif not isinstance(error, OSError):
            super().handleError(record)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is now: a live display replaces that stream while it is on the screen."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("uncaught").critical("the process ends: %s", error, exc_info=(kind, error, trace))
