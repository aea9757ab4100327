"""The directory that one run leaves behind, and who may write to it.

Invariant: at most one process owns a run directory (it alone writes there); ownership ends with the process, however
it ends, because it is a kernel lock on an open file and not the file's existence. ``runs/latest`` always names a
whole run directory.

    runs/20260131-142501-frozenlake/
        format.json  job.yaml  metrics.jsonl  timeline.jsonl  ledger.jsonl  hosts.jsonl  audit.jsonl
        report.html  owner.lock  coordinator.address
        events/ (TensorBoard)  logs/  checkpoints/  samples/  recorded/ (train.record)  failed-batches/  model/ (sft)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import yaml

from actors.formats import RUN_DIRECTORY, FormatRefused
from actors.version import VERSION
from coordinator.observe.lines import LineWriter, replace_file, seize, whole_lines
from coordinator.observe.records import SampleRecord, decode_metric, decode_sample
from coordinator.observe.text import sample_text

FORMAT_FILE = "format.json"


class RunDirectoryError(RuntimeError):
    """A run directory cannot be made, opened or written; one line for the user."""


class RunDirectoryInUse(RunDirectoryError):
    """Another process owns the directory; the message names it."""


class Owner(msgspec.Struct, frozen=True):
    """Content of ``owner.lock``; only meaningful while the lock is held."""

    pid: int
    host: str
    since: str


class RunFormat(msgspec.Struct, frozen=True):
    """Content of ``format.json``: of all files of records in the directory."""

    format: int
    software: str = ""  # that wrote it, for people


class RunDirectory:
    """Made by ``create`` or ``open``; a context manager that gives ownership back."""

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self._lock = lock  # descriptor that holds the kernel's lock; None for a reader
        self.job_file = path / "job.yaml"
        self.metrics = path / "metrics.jsonl"
        self.timeline = path / "timeline.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.hosts = path / "hosts.jsonl"
        self.report = path / "report.html"
        self.events = path / "events"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples"
        self.recorded = path / "recorded"  # see actors.trainer.batches
        self.sample_index = path / "samples" / "index.jsonl"

    @classmethod
    def create(cls, base: Path, name: str, now: datetime | None = None) -> RunDirectory:
        """Make ``base/<time>-<name>``, own it and point ``base/latest`` at it. Raises ``RunDirectoryError``."""
        label = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "run"
        stamp = f"{now or datetime.now():%Y%m%d-%H%M%S}-{label}"
        try:
            base.mkdir(parents=True, exist_ok=True)
            path = _make_unique(base.resolve(), stamp)
            run = cls(path, _acquire(path))
            for directory in (run.events, run.logs, run.checkpoints, run.samples):
                directory.mkdir()
            _write_format(path)
            _point_latest(path)
        except OSError as error:
            raise RunDirectoryError(f"{base}: a run directory cannot be made there: {error}") from error
        return run

    @classmethod
    def open(cls, path: Path, *, own: bool = False) -> RunDirectory:
        """An existing run: to read it (also while it runs), or with ``own`` to resume it.

        Raises ``RunDirectoryError`` where there is no run, or one that this software cannot read,
        ``RunDirectoryInUse`` where another process owns it.
        """
        if not path.is_dir():
            raise RunDirectoryError(f"{path}: no such run directory")
        if not (path / "job.yaml").is_file():
            raise RunDirectoryError(f"{path}: not a run directory (there is no job.yaml in it)")
        resolved = path.resolve()  # "latest" may point elsewhere a moment later
        _check_format(resolved)
        run = cls(resolved, _acquire(resolved) if own else None)
        if own:
            _write_format(resolved)  # what is written from now on is of this software's
        return run

    @classmethod
    def take_over(cls, path: Path) -> RunDirectory:
        """Own a run that another process led, whether or not that one still lives: it no longer leads, and what it
        still writes into the files of records goes nowhere. Raises ``RunDirectoryError``."""
        run = cls.open(path)
        try:
            fresh = run.path / f".owner.{os.getpid()}"
            fresh.touch()
            fresh.replace(run.path / "owner.lock")
            run._lock = _acquire(run.path)
            _write_format(run.path)
            for records in (run.ledger, run.metrics, run.timeline, run.sample_index, run.hosts):
                seize(records)
        except OSError as error:
            raise RunDirectoryError(f"{path}: it cannot be taken over: {error}") from error
        return run

    def write_job(self, job: msgspec.Struct) -> None:
        """Keep the resolved job, such that it can be run again as it is."""
        self._require_ownership()
        text: str = yaml.safe_dump(msgspec.to_builtins(job), sort_keys=False, allow_unicode=True, width=120)
        replace_file(self.job_file, text.encode())

    def read_job(self) -> dict[str, Any]:
        """The resolved job as plain data; empty where none was written yet."""
        try:
            tree = yaml.safe_load(self.job_file.read_text())
        except FileNotFoundError:
            return {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RunDirectoryError(f"{self.job_file}: not valid YAML: {' '.join(str(error).split())}") from None
        if not isinstance(tree, dict):
            raise RunDirectoryError(f"{self.job_file}: expected a mapping, found {type(tree).__name__}")
        return tree

    def add_sample(self, sample: SampleRecord) -> Path:
        """Keep a trajectory as readable text; returns its file."""
        self._require_ownership()
        ticket = re.sub(r"[^A-Za-z0-9._-]+", "-", sample.ticket)
        text = self.samples / f"v{sample.version:05d}-{ticket}.txt"
        replace_file(text, sample_text(sample).encode())
        writer = LineWriter(self.sample_index)
        writer.write(sample)
        writer.close()
        return text

    def rewind(self, version: int) -> int:
        """Before going on from a checkpoint: set aside what was recorded beyond its version (``*.aside.jsonl``,
        ``recorded/*.aside``).

        Returns the number of lines that ``metrics.jsonl`` lost. Call it before a tracker opens the file.
        """
        self._require_ownership()
        _set_aside(self.sample_index, lambda line: decode_sample(line).version <= version)
        for batch in self.recorded.glob("v*.log"):
            if batch.stem[1:].isdigit() and int(batch.stem[1:]) > version:
                batch.replace(batch.with_suffix(".aside"))
        return _set_aside(self.metrics, lambda line: decode_metric(line).version <= version)

    def places(self) -> dict[str, str]:
        """Where a user finds what, for the end of a run."""
        path = _short(self.path)
        return {
            "run directory": path,
            "report": f"{path}/report.html",
            "logs": f"{path}/logs",
            "TensorBoard": f"tensorboard --logdir {path}/events",
            "evaluate": f"bin/eval {path}",
            "watch": f"bin/play {path}",
        }

    def release(self) -> None:
        """Give ownership back; idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _require_ownership(self) -> None:
        if self._lock is None:
            raise RunDirectoryError(f"{self.path}: opened for reading; open it with own=True to write to it")


def _check_format(path: Path) -> None:
    """Raises ``RunDirectoryError``."""
    file = path / FORMAT_FILE
    try:
        found = msgspec.json.decode(file.read_bytes(), type=RunFormat).format
    except FileNotFoundError:
        found = 0  # from before there was one
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{file}: it does not say the format of the run: {error}") from None
    try:
        RUN_DIRECTORY.check(found, file)
    except FormatRefused as error:
        raise RunDirectoryError(str(error)) from None


def _write_format(path: Path) -> None:
    """Raises ``OSError``."""
    content = RunFormat(RUN_DIRECTORY.current, VERSION)
    replace_file(path / FORMAT_FILE, msgspec.json.encode(content) + b"\n")


def _make_unique(base: Path, stamp: str) -> Path:
    for attempt in range(1, 1000):
        path = base / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise RunDirectoryError(f"{base}/{stamp}: taken, and so are the next 998 names")


def _point_latest(path: Path) -> None:
    partial = path.parent / f".latest.{path.name}"
    partial.unlink(missing_ok=True)
    partial.symlink_to(path.name)
    try:
        partial.replace(path.parent / "latest")
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _acquire(path: Path) -> int:
    descriptor = os.open(path / "owner.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = Owner(os.getpid(), socket.gethostname(), f"{datetime.now():%Y-%m-%d %H:%M:%S}")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, msgspec.json.encode(owner) + b"\n", 0)
    except BlockingIOError:
        owner_now = _read_owner(descriptor)
        os.close(descriptor)
        raise RunDirectoryInUse(
            f"{path}: in use by process {owner_now.pid} on {owner_now.host} since {owner_now.since}; "
            "wait for it, stop it, or start a run of your own"
        ) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _read_owner(descriptor: int) -> Owner:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Owner)
    except msgspec.MsgspecError:  # locked, but not yet signed
        return Owner(0, "an unknown host", "just now")


def _set_aside(path: Path, keep: Callable[[bytes], bool]) -> int:
    kept: list[bytes] = []
    aside: list[bytes] = []
    for line in whole_lines(path):
        try:
            (kept if keep(line) else aside).append(line + b"\n")
        except msgspec.MsgspecError:
            aside.append(line + b"\n")
    if not aside:
        return 0
    with path.with_suffix(".aside.jsonl").open("ab") as file:  # before the original loses them
        file.writelines(aside)
        file.flush()
        os.fsync(file.fileno())
    replace_file(path, b"".join(kept))
    return len(aside)


def _short(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
