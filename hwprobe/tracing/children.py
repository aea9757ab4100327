"""Child processes of the tracer, and its interruption.

Invariant: every child has a deadline and a session of its own (Ctrl-C on the terminal reaches the tracer alone, which
then ends its children in order); no child outlives ``Child``'s context. The first Ctrl-C or SIGTERM ends the gathering,
and what was gathered is still told; a second one ends everything.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

POLL_S = 0.05
KILL_S = 5.0

HARMLESS = "RLIMIT_MEMLOCK"  # bpftrace complains of it on every kernel that no longer needs it (5.11)


class ChildFailed(RuntimeError):
    """A program could not be started, or did not do its work within its deadline; one line for the user."""


class Interruption:
    """A context in which Ctrl-C and SIGTERM are remembered instead of raised; only in a main thread."""

    def __init__(self) -> None:
        self.stopped = False
        self._read, self._write = os.pipe()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        os.write(self._write, b"x")  # wakes ``wait``; an Event's lock may be held by the very code that we interrupt

    def wait(self, seconds: float) -> bool:
        """Sleep, but no longer than until the interruption; whether there was one."""
        if not self.stopped:
            select.select([self._read], [], [], max(0.0, seconds))
        return self.stopped


def run(command: Sequence[str], timeout_s: float) -> str:
    """Standard output of a short command. Raises ``ChildFailed``."""
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"{command[0]} did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ChildFailed(f"{command[0]} cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        raise ChildFailed(f"{command[0]} ended with status {done.returncode}: {last_line(done.stderr)}")
    return done.stdout


def last_line(text: str) -> str:
    """The last line with something in it to say."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and HARMLESS not in line]
    return lines[-1] if lines else "it said nothing"


class Child:
    """A program that gathers until it is asked to stop; its output goes to files, so that no pipe can fill up."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self.name = Path(command[0]).name
        self._folder = tempfile.TemporaryDirectory(prefix="trace-")
        folder = Path(self._folder.name)
        self._out, self._err = folder / "out", folder / "err"
        try:
            with self._out.open("wb") as out, self._err.open("wb") as err:
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env={**os.environ, **(environ or {})},
                    start_new_session=True,
                )
        except OSError as error:
            self._folder.cleanup()
            raise ChildFailed(f"{self.name} cannot be started: {error.strerror}") from None

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()
        self._folder.cleanup()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def status(self) -> int | None:
        return self._process.poll()

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def complaints(self) -> str:
        return self._err.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float, interruption: Interruption) -> bool:
        """Until its output holds ``text``; False where it has ended or was interrupted before. Raises
        ``ChildFailed`` after ``seconds``."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            if self.ended or interruption.wait(POLL_S):
                return False
            if time.monotonic() > deadline:
                raise ChildFailed(f"{self.name} was not ready within {seconds:g} s")
        return True

    def finish(self, grace_s: float) -> None:
        """Ask it to stop (SIGINT), and wait. Raises ``ChildFailed`` where it does not within ``grace_s``."""
        if not self.ended:
            self._process.send_signal(signal.SIGINT)
        self.wait(grace_s)

    def wait(self, seconds: float) -> None:
        """Until it ends by itself. Raises ``ChildFailed`` after ``seconds``."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{self.name} did not end within {seconds:g} s of being asked to") from None

    def _kill(self) -> None:
        """The whole session, where anything of it is left."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)
