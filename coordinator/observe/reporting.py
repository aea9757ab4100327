"""Keeps a run's report up to date, in a process of its own: ``python -m coordinator.observe.reporting RUN``.

Invariant: while a run trains, its control process never reads the run's history back: it would stand still for as long
as that takes, and keep the memory. At most one such process is at work, and it dies with its parent.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from actors.core.process import child_environment, child_words
from coordinator.observe.report import write_report
from coordinator.observe.rundir import RunDirectory

END_TIMEOUT_S = 5.0

MODULE = "coordinator.observe.reporting"


class ReportFailed(OSError):
    """The process that should have written the report did not."""


class ReportWriter:
    """See the module docstring."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None

    def refresh(self) -> None:
        """Begin to write the report anew, unless that is still going on. Raises ``OSError``: also ``ReportFailed``,
        of the last time."""
        last = self._process
        if last is not None and last.poll() is None:
            return
        with (self._run.logs / "report.out").open("wb") as output:
            self._process = subprocess.Popen(
                child_words(MODULE, [str(self._run.path)]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment(),
            )
        if last is not None and last.returncode:
            raise ReportFailed(f"the report's process ended with exit status {last.returncode}")

    def finish(self, status: str) -> None:
        """Write the report for the last time, here. Raises ``OSError``."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it dies when that lets go
                self._process.wait(END_TIMEOUT_S)
            self._process = None
        write_report(self._run, status=status)


if __name__ == "__main__":
    os.nice(10)  # nobody waits for it
    write_report(RunDirectory.open(Path(sys.argv[1])))
