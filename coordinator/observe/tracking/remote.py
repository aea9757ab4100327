"""A tracker whose library runs in a process of its own, as the run sees it.

Invariant: no call but ``close`` waits for anything, and that one no longer than ``finish_s``; a tracker that fails,
dies, or is silent for longer than it may be is killed, told once with its reason, and what it missed is counted.

A process and no thread: a library that hangs in native code, in its retries or in its ``atexit`` hooks can be killed
then, and never shares the event loop's interpreter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from actors.core.process import child_environment, child_words
from coordinator.observe.records import EvalRecord, ImitationRecord, StepRecord
from coordinator.observe.tracking.protocol import Answer, End, Log, Sitting
from coordinator.observe.values import evaluation_values, imitation_values, step_values

log = logging.getLogger(__name__)

MOST_WAITING = 1_000
"""Records that may be unanswered: a tracker this far behind does not catch up."""

_ANSWER = msgspec.json.Decoder(Answer)


class Deadlines(msgspec.Struct, frozen=True):
    """How long a tracker may be silent while it is waited for."""

    start_s: float = 120.0  # importing its library and finding its server
    log_s: float = 60.0  # keeping one record
    finish_s: float = 20.0  # keeping the rest and ending, once the run is over; the run waits for it


DEADLINES = Deadlines()


class RemoteTracker:
    """A ``Tracker``."""

    def __init__(
        self,
        name: str,
        sitting: Sitting,
        log_path: Path,
        say: Callable[[str], None],
        *,
        deadlines: Deadlines = DEADLINES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``say`` is told once if the tracker is dropped. Raises ``OSError`` where no process can be started."""
        self.name = name
        self.records = 0  # that were to be logged
        self.missed = 0  # of those, not logged as far as is known
        self._log_path = log_path
        self._say = say
        self._deadlines = deadlines
        self._clock = clock
        self._limit_s = deadlines.start_s
        self._since = clock()  # when its oldest unanswered message began to be waited for
        self._unanswered: deque[bool] = deque()  # whether each is a record
        self._unsent = bytearray()
        self._answers = bytearray()
        self._ended_at: float | None = None
        self._dropped = False
        self._process = _start(name, log_path)
        self.pid = self._process.pid
        self._input, self._output = _pipes(self._process)
        self._send(sitting, record=False)

    # ---- what a run calls -----------------------------------------------------------------------------------------

    def log_step(self, record: StepRecord) -> None:
        self._log(step_values(record), record.version)

    def log_evaluation(self, record: EvalRecord) -> None:
        self._log(evaluation_values(record), record.version)

    def log_imitation(self, record: ImitationRecord) -> None:
        self._log(imitation_values(record), record.version)

    def end(self, outcome: str) -> None:
        """Tell it that the run is over."""
        if self._ended_at is not None:
            return
        self._ended_at = self._clock()
        if not self._dropped:
            self._send(End(outcome), record=False)

    def close(self) -> None:
        """Wait until it is done, ``finish_s`` from the run's end at most, and end its process; idempotent."""
        self.end("")
        until = (self._ended_at or 0.0) + self._deadlines.finish_s
        while self._unanswered and not self._dropped:
            left = until - self._clock()
            if left <= 0:
                self._drop(f"it was not done {self._deadlines.finish_s:g} s after the run's end")
                break
            self._wait(left)
            self._exchange()
        if self._process.returncode is None:
            self._close_process(max(until - self._clock(), 0.0))
        if self.missed:
            log.warning("%s missed %d of %d records", self.name, self.missed, self.records)

    def abandon(self) -> None:
        """End its process now, whatever it has kept; idempotent."""
        self._dropped = True
        self._unanswered.clear()
        self._kill()

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _log(self, values: dict[str, float], version: int) -> None:
        self.records += 1
        if self._dropped or self._ended_at is not None:
            self.missed += 1
            return
        self._send(Log(version, values), record=True)
        if self._dropped or not self._unanswered:
            return
        silent_s = self._clock() - self._since
        if silent_s > self._limit_s:
            self._drop(f"it said nothing for {silent_s:.0f} s, where {self._limit_s:g} s are its limit")
        elif len(self._unanswered) > MOST_WAITING:
            self._drop(f"it is {len(self._unanswered)} records behind")

    def _send(self, message: Sitting | Log | End, *, record: bool) -> None:
        if not self._unanswered:
            self._since = self._clock()
        self._unanswered.append(record)
        self._unsent += msgspec.json.encode(message) + b"\n"
        self._exchange()

    def _wait(self, timeout_s: float) -> None:
        with contextlib.suppress(InterruptedError):
            select.select([self._output], [self._input] if self._unsent else [], [], timeout_s)

    def _exchange(self) -> None:
        """Take every answer that there is and give what the pipe takes, without waiting."""
        try:
            while data := os.read(self._output.fileno(), 1 << 16):
                self._answers += data
            ended = True
        except BlockingIOError:
            ended = False
        self._take_answers()
        if self._dropped:
            return
        if ended and self._ended_at is not None and not self._unanswered:  # as it should
            return
        if ended:
            self._drop(f"its process ended{self._last_words()}")
            return
        try:
            while self._unsent:
                del self._unsent[: os.write(self._input.fileno(), self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # its answer, or its end, is there by the next exchange
            self._unsent.clear()

    def _take_answers(self) -> None:
        *lines, rest = bytes(self._answers).split(b"\n")
        self._answers = bytearray(rest)
        for line in lines:
            answer = _ANSWER.decode(line)
            if answer.error:
                self._drop(answer.error)
                return
            self._unanswered.popleft()
            self._since = self._clock()
            self._limit_s = self._deadlines.log_s

    def _drop(self, reason: str) -> None:
        self.missed += sum(self._unanswered)
        self._unsent.clear()
        self.abandon()
        self._say(
            f"{self.name} is dropped: {reason}; the run goes on, metrics.jsonl has everything ({self._log_path} has "
            f"what {self.name} said)"
        )

    def _close_process(self, left_s: float) -> None:
        self._input.close()
        try:
            self._process.wait(left_s)
        except subprocess.TimeoutExpired:
            log.warning("%s kept everything, but its process did not end: it is killed", self.name)
        self._kill()

    def _kill(self) -> None:
        """It leads a process group of its own: whatever it started goes with it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._input.close()
        self._output.close()

    def _last_words(self) -> str:
        try:
            lines = self._log_path.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f"; its last words: {lines[-1]}" if lines else ""


def _start(name: str, log_path: Path) -> subprocess.Popen[bytes]:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as output:
        return subprocess.Popen(
            child_words("coordinator.observe.tracking.process", [name]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            bufsize=0,
            env=child_environment(),
            start_new_session=True,
        )


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("a tracker's process was started without pipes")
    for pipe in (process.stdin, process.stdout):
        os.set_blocking(pipe.fileno(), False)
    return process.stdin, process.stdout
