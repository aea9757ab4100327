"""What a run shows in the terminal: a panel that is redrawn in place, or one line a step where that is not possible.

Invariant: everything said is said in both ways of showing it; what goes to a file or a CI log is plain ASCII
lines without control characters (but for text that others passed in).

    progress = open_progress("frozenlake", total_steps=60)
    with progress.phase("starting engine-0 (torch)"):
        ...
    progress.step(record)
    progress.finish("finished: 60 steps", run.places())
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

from coordinator.observe.records import EvalRecord, StepRecord
from coordinator.observe.text import evaluation_line, readable, step_line

INTERRUPTED = "Ctrl-C: stopping; a checkpoint is written first (Ctrl-C again stops at once, without one)"


class Progress(Protocol):
    """Told what happens, in order, by the control process's loop; never waits for anything."""

    def phase(self, text: str) -> AbstractContextManager[None]:
        """Around something of the start or the end that takes a while; phases may run at the same time."""

    def step(self, record: StepRecord) -> None:
        """A step is done."""

    def evaluation(self, record: EvalRecord) -> None:
        """An evaluation is done."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def warn(self, text: str) -> None:
        """Something that the user should look into."""

    def interrupted(self, text: str = INTERRUPTED) -> None:
        """Ctrl-C has arrived and is being acted upon."""

    def finish(self, outcome: str, places: Mapping[str, str]) -> None:
        """The last word: how it ended and where things are (label -> path or command). Idempotent."""

    def close(self) -> None:
        """Leave the terminal as it was, without a last word; idempotent, and done by ``finish``."""


class PlainProgress:
    """One line an event, flushed at once."""

    def __init__(self, total_steps: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._stream = stream
        self._clock = clock
        self._records: list[StepRecord] = []
        self._open_phase: str | None = None  # its line has no end yet
        self._finished = False

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        started = self._clock()
        self._end_line()
        self._write(f"{text} ...")
        self._open_phase = text
        try:
            yield
        except BaseException as error:
            self._end_phase(text, f"failed after {self._clock() - started:.1f} s ({type(error).__name__})")
            raise
        self._end_phase(text, f"{self._clock() - started:.1f} s")

    def step(self, record: StepRecord) -> None:
        self._records = [*self._records[-20:], record]
        self._line(step_line(self._records, self._total))

    def evaluation(self, record: EvalRecord) -> None:
        self._line(evaluation_line(record))

    def note(self, text: str) -> None:
        self._line(readable(text))

    def warn(self, text: str) -> None:
        self._line(f"warning: {readable(text)}")

    def interrupted(self, text: str = INTERRUPTED) -> None:
        self._line(text)

    def finish(self, outcome: str, places: Mapping[str, str]) -> None:
        if not self._finished:
            self._finished = True
            self._line(summary(outcome, places))

    def close(self) -> None:
        self._end_line()

    def _end_phase(self, text: str, ending: str) -> None:
        if self._open_phase == text:
            self._open_phase = None
            self._write(f" {ending}\n")
        else:  # another line came between
            self._line(f"{text} ... {ending}")

    def _line(self, text: str) -> None:
        self._end_line()
        self._write(text + "\n")

    def _end_line(self) -> None:
        if self._open_phase is not None:
            self._open_phase = None
            self._write("\n")

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()


def summary(outcome: str, places: Mapping[str, str]) -> str:
    """How it ended, then one indented line a place."""
    width = max(map(len, places), default=0)
    return "\n".join([outcome, *(f"  {label:<{width}}  {place}" for label, place in places.items())])


def open_progress(name: str, total_steps: int, stream: TextIO | None = None, *, live: bool | None = None) -> Progress:
    """The panel where ``stream`` (default: stdout) is a terminal that can show it, else plain lines."""
    stream = stream or sys.stdout
    if live if live is not None else can_be_live(stream):
        from coordinator.observe.panel import LiveProgress  # noqa: PLC0415 (rich takes 0.1 s to import)

        return LiveProgress(name, total_steps, stream)
    return PlainProgress(total_steps, stream)


def can_be_live(stream: TextIO) -> bool:
    """A terminal that moves its cursor and knows the characters of the panel."""
    encoding = (stream.encoding or "").lower().replace("-", "")
    return stream.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", ""} and encoding == "utf8"
