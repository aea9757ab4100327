"""A real terminal for programs that people use by hand: a tmux of its own, whose screen the test reads.

    with Terminal(tmp_path, ["bin/admin"], environment={}) as terminal:
        terminal.until("admin>")
        terminal.type("sta", "Tab")
        terminal.until("admin> status")

Invariant: whatever a test does, its tmux server is gone afterwards, and all that ran in it.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import pytest

from tests.support.running import ROOT

LOOK_EVERY_S = 0.1
PATIENCE_S = 120.0
COLUMNS, LINES = 160, 50


class NotOnScreen(AssertionError):
    """What was waited for did not appear; the message shows what did."""


class Terminal:
    """See the module docstring. Keys are named as tmux does: "Tab", "Up", "C-c", "C-d", "Enter"."""

    def __init__(self, directory: Path, words: list[str], environment: Mapping[str, str] | None = None) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("no tmux here to make a terminal with (apt-get install tmux)")
        name = f"terminal-{time.monotonic_ns()}"
        self._socket = directory / f"{name}.sock"
        settings = {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **(environment or {})}
        self._status = directory / f"{name}.status"
        assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
        command = f"env {assigned} {shlex.join(words)}; echo $? > {shlex.quote(str(self._status))}; exec sleep 600"
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(directory), command)
        self._tmux("set-option", "-g", "history-limit", "10000")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], check=False, capture_output=True)

    def _tmux(self, *words: str) -> str:
        return subprocess.run(
            ["tmux", "-S", str(self._socket), *words], check=True, capture_output=True, text=True, timeout=PATIENCE_S
        ).stdout

    def type(self, text: str, *keys: str) -> None:
        """Write text, then press keys."""
        if text:
            self._tmux("send-keys", "-l", text)
        for key in keys:
            self._tmux("send-keys", key)

    def enter(self, line: str) -> None:
        """Write a line."""
        self.type(line, "Enter")

    def screen(self) -> str:
        """All that was written since the beginning, as it looks."""
        return self._tmux("capture-pane", "-p", "-J", "-S", "-").rstrip()

    def until(self, pattern: str, *, times: int = 1, within_s: float = PATIENCE_S) -> str:
        """The screen, once it shows this so often. Raises ``NotOnScreen``."""
        limit = time.monotonic() + within_s
        while len(re.findall(pattern, screen := self.screen(), re.MULTILINE)) < times:
            if time.monotonic() > limit:
                raise NotOnScreen(f"{pattern!r} was not {times} times on the screen within {within_s:g} s:\n{screen}")
            time.sleep(LOOK_EVERY_S)
        return screen

    def status(self, *, within_s: float = PATIENCE_S) -> int:
        """The program's exit status, once it has ended. Raises ``NotOnScreen``."""
        limit = time.monotonic() + within_s
        while not (self._status.is_file() and self._status.read_text().strip()):
            if time.monotonic() > limit:
                raise NotOnScreen(f"the program has not ended within {within_s:g} s:\n{self.screen()}")
            time.sleep(LOOK_EVERY_S)
        return int(self._status.read_text())


def python_module(module: str, *words: str) -> list[str]:
    return [sys.executable, "-m", module, *words]
