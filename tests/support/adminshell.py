"""One admin shell that is given line after line, as a script would, and whose answers are read as JSON.

    with AdminShell(directory) as shell:
        assert shell.ask("status")["state"] == "running"

To start it takes a second: a test with many questions starts it once. Yes is said beforehand to all that it asks.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.running import ROOT
from tests.support.terminal import python_module

ANSWER_S = 300.0


class AdminShell:
    """See the module docstring. ``directory`` is the one of ``runs/latest``. At its end it must have complained of
    nothing."""

    def __init__(self, directory: Path) -> None:
        self._errors = (directory / f"shell-{time.monotonic_ns()}.stderr").open("w+b")
        self._process = subprocess.Popen(
            python_module("coordinator.commands.admin", "--json", "--yes"),
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )
        self._read = b""

    def ask(self, line: str) -> Any:
        """The answer to one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        deadline = time.monotonic() + ANSWER_S
        while b"\n" not in self._read:
            assert self._process.stdout is not None
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{line}: no answer within {ANSWER_S:g} s"
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            assert piece, f"{line}: the shell has ended: {self._said()}"
            self._read += piece
        answer, _, self._read = self._read.partition(b"\n")
        return json.loads(answer)

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def __enter__(self) -> AdminShell:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._process.kill()
            _, _ = self._process.communicate(timeout=60.0)
            if error is None:
                assert (self._process.returncode, self._said()) == (0, "")
        finally:
            self._process.kill()
            self._errors.close()
