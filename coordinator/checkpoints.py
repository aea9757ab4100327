"""Checkpoints of a run: written whole or not at all, the newest and the best kept.

    checkpoints/v00020/  run.json (scheduler, version)  trajectories.log (buffer)  what the ranks write
    checkpoints/best     the version with the best evaluation, as text

Invariant: a directory named ``v*`` is complete: it was written under another name, synced and then renamed. The best
one is never deleted while it is the best.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from coordinator.scheduling.rolling import SchedulerState

RUN_FILE = "run.json"
FORMAT = 1


class RunCheckpoint(msgspec.Struct, frozen=True):
    """What the coordinator keeps of a run."""

    format: int
    version: int
    scheduler: SchedulerState
    best_success: float | None
    elapsed_s: float


class CheckpointUnusable(RuntimeError):
    """There is no checkpoint to go on from, or it cannot be read; the message says where and why."""


class Checkpoints:
    """The checkpoint directory of one run."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def path(self, version: int) -> Path:
        return self._directory / f"v{version:05d}"

    def versions(self) -> list[int]:
        """Complete checkpoints, oldest first."""
        return sorted(int(path.name[1:]) for path in self._directory.glob("v[0-9]*") if path.is_dir())

    async def write(self, state: RunCheckpoint, write_ranks: Callable[[Path], Awaitable[object]]) -> Path:
        """Write one checkpoint; ``write_ranks`` puts the trainer's part into the directory that it is given."""
        final = self.path(state.version)
        if final.exists():
            return final
        partial = self._directory / f".partial-{final.name}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        await write_ranks(partial)
        (partial / RUN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        _sync(partial)
        partial.rename(final)
        _sync(self._directory)
        self._prune()
        return final

    def _prune(self) -> None:
        kept = {*self.versions()[-self._keep :], self.best()}
        for version in self.versions():
            if version not in kept:
                shutil.rmtree(self.path(version))

    def best(self) -> int | None:
        """The version with the best evaluation, if one is marked."""
        try:
            return int((self._directory / "best").read_text())
        except (OSError, ValueError):
            return None

    def mark_best(self, version: int) -> None:
        fresh = self._directory / ".best"
        fresh.write_text(f"{version}\n")
        fresh.rename(self._directory / "best")
        self._prune()

    def read(self, version: int) -> RunCheckpoint:
        """Raises ``CheckpointUnusable``."""
        path = self.path(version) / RUN_FILE
        try:
            state = msgspec.json.decode(path.read_bytes(), type=RunCheckpoint)
        except OSError as error:
            raise CheckpointUnusable(f"{path}: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise CheckpointUnusable(f"{path}: {error}") from None
        if state.format != FORMAT:
            raise CheckpointUnusable(f"{path}: format {state.format}, this program reads {FORMAT}")
        return state

    def newest(self) -> RunCheckpoint:
        """Raises ``CheckpointUnusable`` where there is none."""
        versions = self.versions()
        if not versions:
            raise CheckpointUnusable(f"{self._directory}: there is no checkpoint to resume from")
        return self.read(versions[-1])


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
