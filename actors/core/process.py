"""Child processes of a node: started, watched, and never outlived by accident.

Invariant: a child dies with its parent, even one killed with -9 (``actors.core.launch``), what it started dies with it,
and a child's death is reported exactly once, with its exit status and the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from actors.core import launch

log = logging.getLogger(__name__)

STOP_GRACE_S = 3.0
LAST_WORDS_BYTES = 4096
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
"""Where the packages of this project lie; children import from the same place."""


class Child:
    """One running child process; its output goes to a log file."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path, log_start: int) -> None:
        """``log_start``: what its log file held already, from an earlier process of the same name."""
        self.name = name
        self.pid = process.pid
        self._process = process
        self._log_path = log_path
        self._log_start = log_start
        self._stopping = False

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def stopped(self) -> bool:
        """Whether it stands still by a signal (SIGSTOP); never known where there is no ``/proc``."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):  # it is gone
            return False
        return state == "T"

    async def watch(self, on_death: Callable[[str], None]) -> None:
        """Wait for its end (as long as it lives) and report one that nobody asked for."""
        status = await self._process.wait()
        self._kill_group()
        if not self._stopping:
            on_death(self.describe_end(status))

    def describe_end(self, status: int) -> str:
        """Why it ended, for people."""
        how = f"killed by {_signal_name(-status)}" if status < 0 else f"exit status {status}"
        return f"process {self.name} (pid {self.pid}) ended: {how}{self._last_words()}"

    def _last_words(self) -> str:
        try:
            with self._log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - LAST_WORDS_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f"; last line of {self._log_path}: {lines[-1]}" if lines else ""

    def kill(self) -> None:
        """End it at once; ``watch`` reports the death unless ``stop`` was called."""
        if self.running:
            self._kill_group()

    def _kill_group(self) -> None:
        """The child leads a process group of its own: whatever it started, unless that moved elsewhere."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
            os.killpg(self.pid, signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end, without waiting; ``watch`` no longer reports it."""
        self._stopping = True
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)  # Popen.terminate would reap it, past asyncio, if it is dead already

    async def stop(self) -> None:
        """Ask it to end, then kill it; returns once it is gone."""
        self.terminate()
        if not await self._gone():
            self.kill()
            if not await self._gone():
                log.error("process %s (pid %d) does not end, even killed", self.name, self.pid)
        self._kill_group()

    async def _gone(self) -> bool:
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            return False
        return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def child_environment() -> dict[str, str]:
    """This process's environment for a child of it, which then imports from where this one does and can tell whose
    child it is."""
    roots = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "ROLLART_PARENT": str(os.getpid())}


def child_words(module: str, arguments: Sequence[str]) -> list[str]:
    """The command line of a child that runs a module, as ``python -m`` would, and is bound to this process from its
    first moment. It imports as ``child_environment`` says, not from the working directory."""
    return [sys.executable, "-P", launch.__file__, module, *arguments]


_bind: Callable[[str, int], None] | None = None


def bind_children(bind: Callable[[str, int], None] | None) -> None:
    """``bind(name, pid)`` is called for every child that this process starts, at once after the start: for whoever
    gives them CPUs and control groups. It must not raise; None ends it."""
    global _bind  # noqa: PLW0603  (one per process, as its children are)
    _bind = bind


async def start_child(
    name: str, module: str, arguments: list[str], *, log_path: Path, environment: Mapping[str, str] | None = None
) -> Child:
    """Run a module as a child in a session of its own (a terminal's Ctrl-C does not reach it). Raises ``OSError``."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    settings = {**child_environment(), **(environment or {})}
    with log_path.open("ab") as output:
        log_start = output.tell()
        process = await asyncio.create_subprocess_exec(
            *child_words(module, arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=settings,
            start_new_session=True,
        )
    if _bind is not None:
        _bind(name, process.pid)
    return Child(name, process, log_path, log_start)
