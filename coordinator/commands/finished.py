"""Playing with a finished (or running) run's policy, without touching its directory.

The checkpoint is loaded by a trainer rank and brought to the engines as in training, receipt included; everything else
lives in a temporary directory that is gone afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from actors.core.logs import close_logging, configure_logging
from actors.env.messages import Outcome, Ticket
from coordinator.checkpoints import Checkpoints, CheckpointUnusable
from coordinator.commands.train import read_job_directory, settled
from coordinator.job import Job, convert
from coordinator.messages import ROLES
from coordinator.observe.progress import PlainProgress
from coordinator.observe.rundir import RunDirectory
from coordinator.pipeline import Pipeline
from coordinator.preflight import check_job
from coordinator.resources.resolve import resolve
from coordinator.run import CONTROL, Launch, Run, policy_directory
from hwprobe import build_affinity_map, probe


class Interrupted(RuntimeError):
    """The user had enough."""


class PlayFailed(RuntimeError):
    """The run that should have played failed; the message says why."""


class FinishedRun:
    """A run directory and one of its checkpoints."""

    def __init__(self, path: Path, which: str, overrides: list[str]) -> None:
        """``which``: "best", "latest" or a version. Raises ``RunDirectoryError``, ``CheckpointUnusable``,
        ``JobError``."""
        self._directory = RunDirectory.open(path)
        self._checkpoints = Checkpoints(self._directory.checkpoints, 1)
        self.version = self._pick(which)
        self._job_directory = read_job_directory(self._directory)
        job = settled(convert(self._directory.read_job(), str(self._directory.job_file), overrides))
        check_job(job, self._job_directory)
        self.job = job

    def _pick(self, which: str) -> int:
        versions = self._checkpoints.versions()
        if not versions:
            raise CheckpointUnusable(f"{self._directory.path}: there is no checkpoint in it yet")
        if which == "latest":
            return versions[-1]
        if which == "best":
            best = self._checkpoints.best()
            return versions[-1] if best is None else best
        if not which.isdigit() or int(which) not in versions:
            raise CheckpointUnusable(
                f"{self._directory.path}: no checkpoint {which!r}; there are "
                f"{', '.join(map(str, versions))} (or best, latest)"
            )
        return int(which)

    def play(self, tickets: list[Ticket], say: Callable[[str], None]) -> list[Outcome]:
        """Run the tickets under the checkpoint's weights. Raises ``PlayFailed`` or ``Interrupted``."""
        with (
            tempfile.TemporaryDirectory(prefix="rollart-") as base,
            RunDirectory.create(Path(base), self.job.name) as scratch,
        ):
            configure_logging(CONTROL, scratch.logs, job=self.job.name)
            handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                return asyncio.run(self._play(tickets, scratch, say))
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)  # whoever shows what came of it may be interrupted as usual
                close_logging()

    async def _play(self, tickets: list[Ticket], scratch: RunDirectory, say: Callable[[str], None]) -> list[Outcome]:
        outcomes: list[Outcome] = []

        async def program(pipeline: Pipeline) -> str:
            outcomes.extend(await pipeline.held_out(tickets))
            return "played"

        affinity = build_affinity_map(probe())
        job, placement = resolve(_small(self.job, len(tickets)), affinity)
        scratch.write_job(job)
        policy_directory(job, scratch.path)
        launch = Launch(
            job=job,
            placement=placement,
            affinity=affinity,
            job_directory=self._job_directory,
            local_roles=ROLES,
            resume=self._checkpoints.read(self.version),
            resume_directory=self._checkpoints.path(self.version),
        )
        words = io.StringIO()
        with contextlib.closing(PlainProgress(job.train.steps, words)) as progress:
            say(f"starting engines with version {self.version} ...")
            status = await Run(launch, scratch, progress, program=program, saves=False).run()
        if status == 130:
            raise Interrupted("interrupted")
        if status:
            raise PlayFailed(_failure(words.getvalue()))
        return outcomes


def _small(job: Job, episodes: int) -> Job:
    """The same job with no more places than there are episodes."""
    environment = msgspec.structs.replace(job.environment, concurrent=min(episodes, 256))
    coordinator = msgspec.structs.replace(job.coordinator, store="embedded")
    return msgspec.structs.replace(job, environment=environment, coordinator=coordinator)


def _failure(words: str) -> str:
    lines = [line for line in words.splitlines() if line.startswith("failed")]
    return lines[-1] if lines else words.strip()
