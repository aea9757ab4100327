"""Checkpoints of a run: written whole or not at all, the newest and the best kept.

    checkpoints/v00020/    run.json (scheduler, version)  trajectories.log (buffer)  what the ranks write
    checkpoints/v00020.1/  the same version again, with what was gathered since; the highest number counts
    checkpoints/best       the version with the best evaluation, as text

Invariant: a directory named ``v*`` is complete and never changes: it was written under another name, synced and then
renamed, and it goes the same way. The best one is never deleted while it is the best.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from actors.formats import CHECKPOINT, FormatRefused
from coordinator.scheduling.groups import GroupState
from coordinator.scheduling.ledger import Balance
from coordinator.scheduling.rolling import SchedulerState

RUN_FILE = "run.json"
FORMAT = CHECKPOINT.current
_NAME = re.compile(r"v(\d+)(?:\.(\d+))?")


class RunCheckpoint(msgspec.Struct, frozen=True):
    """What the coordinator keeps of a run."""

    format: int
    version: int
    scheduler: SchedulerState
    best_success: float | None
    elapsed_s: float


class _Format(msgspec.Struct, frozen=True):
    """What can be read of every format, past and future."""

    format: int | None = None


class _OldScheduler(msgspec.Struct, frozen=True):
    """Of format 1, from before the ledger had a journal: nobody knew the names of what ran."""

    next_group: int
    next_ticket: int
    groups: list[GroupState]
    balance: Balance

    def converted(self) -> SchedulerState:
        """What ran has to end under some name, so that the sum holds; the journal begins with the next sitting."""
        stored = [ticket for group in self.groups for ticket in group.stored]
        balance = self.balance
        nameless = balance.in_flight + balance.buffered + balance.taken - len(stored)
        live = [*stored, *(f"nameless-{number}" for number in range(nameless))]
        return SchedulerState(self.next_group, self.next_ticket, self.groups, balance, live, 0)


class _OldCheckpoint(msgspec.Struct, frozen=True):
    """Of format 1."""

    version: int
    scheduler: _OldScheduler
    best_success: float | None
    elapsed_s: float


class CheckpointUnusable(RuntimeError):
    """There is no checkpoint to go on from, or it cannot be read; the message says where and why."""


class Checkpoints:
    """The checkpoint directory of one run."""

    def __init__(self, directory: Path, keep: int) -> None:
        """``keep``: how many of the newest versions stay."""
        self._directory = directory
        self._keep = keep
        self._attempts = itertools.count()

    def path(self, version: int) -> Path:
        """Where a version is. Raises ``CheckpointUnusable``."""
        found = self._find().get(version)
        if not found:
            raise CheckpointUnusable(f"{self._directory}: there is no checkpoint of version {version}")
        return found[-1][1]

    def versions(self) -> list[int]:
        """Complete checkpoints, oldest first."""
        return sorted(self._find())

    def _find(self) -> dict[int, list[tuple[int, Path]]]:
        """Complete checkpoints by version; of one version by number, the one that counts last."""
        found: dict[int, list[tuple[int, Path]]] = {}
        for path in self._directory.glob("v*"):
            match = _NAME.fullmatch(path.name)
            if match is not None and path.is_dir():
                found.setdefault(int(match[1]), []).append((int(match[2] or 0), path))
        return {version: sorted(paths) for version, paths in found.items()}

    async def write(self, state: RunCheckpoint, write_ranks: Callable[[Path], Awaitable[object]]) -> Path:
        """Write one checkpoint; ``write_ranks`` puts the trainer's part into the directory that it is given."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for pattern in (".partial-*", ".pruned-*"):  # what an earlier end in the middle has left
            for path in self._directory.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        partial = self._directory / f".partial-v{state.version:05d}-{next(self._attempts)}"
        partial.mkdir()
        try:
            await write_ranks(partial)
            (partial / RUN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
            await asyncio.to_thread(_sync_tree, partial)
            final = self._next_path(state.version)
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk it would keep the next one from its place
            raise
        _sync(self._directory)
        self._prune()
        return final

    def _next_path(self, version: int) -> Path:
        existing = self._find().get(version)
        name = f"v{version:05d}"
        return self._directory / (f"{name}.{existing[-1][0] + 1}" if existing else name)

    def _prune(self) -> None:
        found = self._find()
        kept = {*sorted(found)[-self._keep :], self.best()}
        for version, paths in found.items():
            for _, path in paths[:-1] if version in kept else paths:
                gone = path.with_name(f".pruned-{path.name}")  # so that no half of it can pass for a whole one
                path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def best(self) -> int | None:
        """The version with the best evaluation, if one is marked."""
        try:
            return int((self._directory / "best").read_text())
        except (OSError, ValueError):
            return None

    def mark_best(self, version: int) -> None:
        """Keep this version from now on. Raises ``CheckpointUnusable`` where it is not there."""
        self.path(version)
        fresh = self._directory / ".best"
        fresh.write_text(f"{version}\n")
        _sync(fresh)
        fresh.rename(self._directory / "best")
        _sync(self._directory)
        self._prune()

    def read(self, version: int) -> RunCheckpoint:
        """Raises ``CheckpointUnusable``."""
        path = self.path(version) / RUN_FILE
        try:
            content = path.read_bytes()
            format_ = CHECKPOINT.check(msgspec.json.decode(content, type=_Format).format, path)
            return _decode(content, format_)
        except FormatRefused as error:
            raise CheckpointUnusable(str(error)) from None
        except OSError as error:
            raise CheckpointUnusable(f"{path}: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointUnusable(f"{path}: not a run's checkpoint: {error}") from None

    def newest(self) -> RunCheckpoint:
        """Raises ``CheckpointUnusable`` where there is none."""
        versions = self.versions()
        if not versions:
            raise CheckpointUnusable(f"{self._directory}: there is no checkpoint to resume from")
        return self.read(versions[-1])


def _decode(content: bytes, format_: int) -> RunCheckpoint:
    if format_ == FORMAT:
        return msgspec.json.decode(content, type=RunCheckpoint)
    old = msgspec.json.decode(content, type=_OldCheckpoint)
    return RunCheckpoint(FORMAT, old.version, old.scheduler.converted(), old.best_success, old.elapsed_s)


def _sync_tree(directory: Path) -> None:
    """Everything below a directory is on disk."""
    for path in sorted(directory.rglob("*"), reverse=True):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
