"""What a run keeps of the batches that it trains on: all of them if it is asked to, and each that failed.

    RUN/recorded/v00012.log           what the step to version 12 was made of (``train.record``), see ``dump``
    RUN/failed-batches/v00012/        a dump, and failure.json: what went wrong with it

Invariant: a batch that failed is on disk before its error goes on, and the log names the place. Keeping batches never
hides an error and never makes one: what cannot be written is reported.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from actors.trainer.dump import RECORDED, Manifest, add_step, begin_dump, write_dump
from actors.trajectory import Trajectory
from bus.message import BusError

log = logging.getLogger(__name__)

FAILED = "failed-batches"
FAILURE_FILE = "failure.json"
Groups = Sequence[Sequence[Trajectory]]


class Failure(msgspec.Struct, frozen=True):
    """Content of ``failure.json``."""

    version: int  # that the step should have led to
    error: str
    learning_rate: float
    imitate: bool = False


class BatchFiles:
    """See the module docstring."""

    def __init__(self, run_directory: Path | None, manifest: Manifest | None = None, *, record: bool = False) -> None:
        """Keeps nothing without a ``run_directory``; ``manifest`` says whose trajectories they are."""
        self._directory = run_directory
        self._manifest = manifest
        self._record = record

    @asynccontextmanager
    async def guarded(
        self, version: int, groups: Groups, learning_rate: float, *, imitate: bool = False
    ) -> AsyncIterator[None]:
        """Around the step to ``version``: what it raises goes on, once the batch is on disk."""
        try:
            yield
        except (ArithmeticError, ValueError, LookupError, RuntimeError, BusError, TimeoutError) as error:
            failure = Failure(version, " ".join(str(error).split()) or repr(error), learning_rate, imitate)
            await self._failed(failure, groups)
            raise

    async def _failed(self, failure: Failure, groups: Groups) -> None:
        if self._directory is None or self._manifest is None:
            return
        directory = _unused(self._directory / FAILED / f"v{failure.version:05d}")
        trajectories = [trajectory for group in groups for trajectory in group]
        try:
            await asyncio.to_thread(write_dump, directory, self._manifest, trajectories, {})
            (directory / FAILURE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(failure)) + b"\n")
        except OSError as error:
            log.error("the batch of version %d failed, and could not be kept: %s", failure.version, error)
            return
        log.error("the batch of version %d failed and is kept: bin/replay %s", failure.version, directory)

    async def trained(self, version: int, groups: Groups) -> None:
        """The step to ``version`` is done."""
        if not self._record or self._directory is None or self._manifest is None:
            return
        directory = self._directory / RECORDED
        trajectories = [trajectory for group in groups for trajectory in group]
        try:
            if not directory.is_dir():
                begin_dump(directory, self._manifest)
            await asyncio.to_thread(add_step, directory, version, trajectories)
        except OSError as error:
            log.error("the batch of version %d could not be recorded: %s", version, error)


def read_failure(directory: Path) -> Failure | None:
    """What went wrong with a batch; None where nothing is known of a failure. Raises ``msgspec.MsgspecError``."""
    path = directory / FAILURE_FILE
    return msgspec.json.decode(path.read_bytes(), type=Failure) if path.is_file() else None


def _unused(path: Path) -> Path:
    """The same failure may come again, after a resume."""
    attempt = 1
    found = path
    while found.exists():
        attempt += 1
        found = path.with_name(f"{path.name}.{attempt}")
    return found
