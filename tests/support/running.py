"""Runs a command as a user does, in a directory of its own, and proves that nothing of it is left afterwards.

    with started("coordinator.commands.train", str(JOB), directory=tmp_path) as command:
        command.wait_for(r"step 2/", timeout_s=60)
        command.send(signal.SIGINT)
        assert command.wait(timeout_s=20) == 130
        assert command.leftovers() == []

Every process of a command, to the last grandchild, inherits a mark in its environment by which it is found in /proc.
Whatever is left when the block ends is killed, so that a failing test leaves nothing behind either.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "ROLLART_TEST_COMMAND"
SHARED_MEMORY = Path("/dev/shm")
LOOK_EVERY_S = 0.05
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork


class TookTooLong(AssertionError):
    """A command did not do in time what it was to do; the message ends with what it said."""


class Command:
    """A running command; use ``started``."""

    def __init__(self, name: str, words: list[str], directory: Path, environment: Mapping[str, str]) -> None:
        self.directory = directory
        self._name = name
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        self._shared_before = _shared_memory()
        self.temporary = directory / f"{name}.tmp"
        self.temporary.mkdir()
        settings = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.temporary),
            **environment,
            MARK: self._mark,
        }
        self._out = directory / f"{name}.stdout"
        self._err = directory / f"{name}.stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                words,
                cwd=directory,
                env=settings,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # a Ctrl-C in the terminal goes to the tests, which end the command
                preexec_fn=_die_with_the_tests,  # noqa: PLW1509  (one system call, no lock)
            )
        self.pid = self._process.pid

    # ---- what it says --------------------------------------------------------------------------------------------

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def wait_for(self, pattern: str, *, timeout_s: float) -> re.Match[str]:
        """The first match on stdout. Raises ``TookTooLong``, also where the command ends without it."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            ended = self._process.poll() is not None
            match = re.search(pattern, self.stdout)
            if match is None and ended:
                raise TookTooLong(f"{self._name} ended without saying {pattern!r}\n{self.said()}")
            found.extend([match] if match else [])
            return bool(found)

        self._until(look, timeout_s, f"said {pattern!r}")
        return found[0]

    def said(self) -> str:
        """Status and the end of both streams, for messages."""
        status = "runs" if self._process.poll() is None else f"exit status {self._process.returncode}"
        return f"{self._name}: {status}\n--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}"

    # ---- what it does --------------------------------------------------------------------------------------------

    def send(self, number: signal.Signals) -> None:
        """Signal the command alone, not its children."""
        self._process.send_signal(number)

    def wait(self, *, timeout_s: float) -> int:
        """Exit status. Raises ``TookTooLong``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TookTooLong(f"{self._name} did not end within {timeout_s:g} s\n{self.said()}") from None

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def until(self, condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
        """Wait while the command runs. Raises ``TookTooLong``, also where the command ends first."""

        def look() -> bool:
            if condition():
                return True
            if self._process.poll() is not None:
                raise TookTooLong(f"{self._name} ended before it {what}\n{self.said()}")
            return False

        self._until(look, timeout_s, what)

    def _until(self, look: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not look():
            if time.monotonic() > deadline:
                raise TookTooLong(f"{self._name} has not {what} within {timeout_s:g} s\n{self.said()}")
            time.sleep(LOOK_EVERY_S)

    def children(self) -> dict[str, int]:
        """Name to process id of the child processes that run now."""
        found = {}
        for pid in self._marked():
            spec = _child_spec(pid)
            if spec is not None:
                found[str(spec["name"])] = pid
        return found

    # ---- what it leaves ------------------------------------------------------------------------------------------

    def leftovers(self, *, grace_s: float = 0.0) -> list[str]:
        """Processes, socket files and shared memory of the command that are still there, after at most ``grace_s``
        (for processes that the kernel is to kill)."""
        deadline = time.monotonic() + grace_s
        while True:
            found = [f"process {pid}: {_command_line(pid)[:200]}" for pid in self._marked()]
            if not found or time.monotonic() >= deadline:
                break
            time.sleep(LOOK_EVERY_S)
        found += [f"socket file {path}" for path in _sockets(self.directory)]
        created = _shared_memory() - self._shared_before
        found += [f"shared memory {SHARED_MEMORY / name}" for name in sorted(created) if not _used_by_others(name)]
        return found

    def _marked(self) -> list[int]:
        """Living processes of the command: by the mark in their environment, or by its directory on their command
        line, in case one has cleaned its environment."""
        mark, path = f"{MARK}={self._mark}".encode(), str(self.directory).encode()
        return [
            pid
            for pid in _processes()
            if mark in _read(pid, "environ").split(b"\0") or (path in _read(pid, "cmdline") and pid != os.getpid())
        ]

    def kill(self) -> None:
        """Everything that is left of it, at once."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        mark = f"{MARK}={self._mark}".encode()
        for pid in _processes():
            if mark in _read(pid, "environ").split(b"\0"):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def started(
    module: str, *arguments: str, directory: Path, name: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[Command]:
    """``python -m module arguments`` in ``directory``; what is left of it at the end is killed. ``name`` names the
    files that take its output, for several commands in one directory."""
    words = [sys.executable, "-m", module, *arguments]
    command = Command(name or module.rpartition(".")[2], words, directory, environment or {})
    try:
        yield command
    finally:
        command.kill()
        shutil.rmtree(command.temporary, ignore_errors=True)


def last_error(stderr: str) -> str:
    """What a command gave as its reason; warnings may come after it, of what goes on until it has ended."""
    return [line for line in stderr.splitlines() if line.startswith("error: ")][-1]


class Ended:
    """A command that has ended."""

    def __init__(self, status: int, stdout: str, stderr: str, leftovers: list[str]) -> None:
        self.status = status
        self.stdout = stdout
        self.stderr = stderr
        self.leftovers = leftovers

    def __str__(self) -> str:
        return f"exit status {self.status}\n--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}"


def ran(
    module: str,
    *arguments: str,
    directory: Path,
    timeout_s: float,
    name: str = "",
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a command to its end. Raises ``TookTooLong``."""
    with started(module, *arguments, directory=directory, name=name, environment=environment) as command:
        status = command.wait(timeout_s=timeout_s)
        return Ended(status, command.stdout, command.stderr, command.leftovers())


def _die_with_the_tests() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    """Empty for a process that is gone, a zombie, or somebody else's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _command_line(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")


def _child_spec(pid: int) -> dict[str, object] | None:
    """What a child process was told, if it is one: the JSON object on its command line."""
    for word in _read(pid, "cmdline").split(b"\0"):
        if word.startswith(b'{"name"'):
            spec: dict[str, object] = json.loads(word)
            return spec
    return None


def _sockets(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if _is_socket(path)]


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:  # gone since it was listed, by another command that is at work there
        return False


def _shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _used_by_others(name: str) -> bool:
    """Whether a living process maps a segment: it is then not ours to judge."""
    path = str(SHARED_MEMORY / name).encode()
    return any(path in _read(pid, "maps") for pid in _processes())
