"""Playing with a policy beside any training: that of a run's checkpoint, of a model directory, or a fresh one.

The weights are loaded by a trainer rank and brought to the engines as in training, receipt included, but nothing is
trained; everything lives in a temporary directory that is gone afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from actors.core.logs import close_logging, configure_logging
from actors.env.messages import Outcome, Ticket
from coordinator.checkpoints import Checkpoints, CheckpointUnusable, RunCheckpoint
from coordinator.commands.train import read_job_directory, settled
from coordinator.job import Job, convert
from coordinator.launch import CONTROL, Launch, policy_directory
from coordinator.messages import ROLES
from coordinator.observe.progress import PlainProgress
from coordinator.observe.rundir import RunDirectory
from coordinator.pipeline import Pipeline
from coordinator.preflight import check_job
from coordinator.resources.resolve import number, resolve
from coordinator.run import Run
from hwprobe import build_affinity_map, probe

Told = Callable[[Outcome], None]
Program = Callable[[Pipeline, Path], Coroutine[Any, Any, str]]
"""What such a run does once every part is up, with its directory; returns how it ended."""


class Interrupted(RuntimeError):
    """The user had enough."""


class PlayFailed(RuntimeError):
    """The run that should have played failed; the message says why."""


class Player:
    """A job and, unless its policy is as the job says, a checkpoint of it."""

    def __init__(self, job: Job, job_directory: Path, checkpoint: tuple[RunCheckpoint, Path] | None = None) -> None:
        self.job = job
        self.version = 0 if checkpoint is None else checkpoint[0].version
        self._job_directory = job_directory
        self._checkpoint = checkpoint

    def play(
        self,
        tickets: list[Ticket],
        say: Callable[[str], None],
        *,
        told: Told | None = None,
        keep: Callable[[Path], None] | None = None,
    ) -> list[Outcome]:
        """Run the tickets under the policy's weights; ``told`` hears of each outcome. Otherwise like ``run``."""
        outcomes: list[Outcome] = []

        async def program(pipeline: Pipeline, directory: Path) -> str:
            outcomes.extend(await pipeline.held_out(tickets, told))
            return "played"

        self.run(program, len(tickets), say, keep=keep)
        return outcomes

    def run(
        self, program: Program, places: int, say: Callable[[str], None], *, keep: Callable[[Path], None] | None = None
    ) -> None:
        """Start a run with so many places for trajectories, without training; ``keep`` may look into its directory
        before it is gone, however it ended. Raises ``PlayFailed`` or ``Interrupted``."""
        with (
            tempfile.TemporaryDirectory(prefix="rollart-") as base,
            RunDirectory.create(Path(base), self.job.name) as scratch,
        ):
            configure_logging(CONTROL, scratch.logs, job=self.job.name)
            handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                asyncio.run(self._run(program, places, scratch, say))
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)  # whoever shows what came of it may be interrupted as usual
                close_logging()
                if keep is not None:
                    keep(scratch.path)

    async def _run(self, program: Program, places: int, scratch: RunDirectory, say: Callable[[str], None]) -> None:
        affinity = build_affinity_map(probe())
        job, placement = resolve(_small(self.job, places), affinity)
        job = _no_more_than_engines_take(job)
        scratch.write_job(job)
        policy_directory(job, scratch.path)
        checkpoint, directory = self._checkpoint or (None, None)
        launch = Launch(
            job=job,
            placement=placement,
            affinity=affinity,
            job_directory=self._job_directory,
            local_roles=ROLES,
            resume=checkpoint,
            resume_directory=directory,
        )
        words = io.StringIO()
        with contextlib.closing(PlainProgress(job.train.steps, words)) as progress:
            say(f"starting engines with version {self.version} ...")
            run = Run(launch, scratch, progress, program=lambda pipeline: program(pipeline, scratch.path), saves=False)
            status = await run.run()
        if status == 130:
            raise Interrupted("interrupted")
        if status:
            raise PlayFailed(_failure(words.getvalue()))


class FinishedRun(Player):
    """A finished (or running) run, whose directory is left as it is, and one of its checkpoints."""

    def __init__(self, path: Path, which: str, overrides: list[str]) -> None:
        """``which``: "best", "latest" or a version; 0 is the policy that training started from. Raises
        ``RunDirectoryError``, ``CheckpointUnusable``, ``JobError``."""
        directory = RunDirectory.open(path)
        checkpoints = Checkpoints(directory.checkpoints, 1)
        version = 0 if which == "0" else pick_version(directory, which)
        job_directory = read_job_directory(directory)
        job = settled(convert(directory.read_job(), str(directory.job_file), overrides))
        check_job(job, job_directory)
        checkpoint = (checkpoints.read(version), checkpoints.path(version)) if version else None
        super().__init__(job, job_directory, checkpoint)


def pick_version(directory: RunDirectory, which: str) -> int:
    """The version that "best", "latest" or a number means. Raises ``CheckpointUnusable``."""
    checkpoints = Checkpoints(directory.checkpoints, 1)
    versions = checkpoints.versions()
    if not versions:
        raise CheckpointUnusable(f"{directory.path}: there is no checkpoint in it yet")
    if which == "latest":
        return versions[-1]
    if which == "best":
        best = checkpoints.best()
        return versions[-1] if best is None else best
    if not which.isdigit() or int(which) not in versions:
        kept = ", ".join(map(str, versions))
        raise CheckpointUnusable(f"{directory.path}: no checkpoint {which!r}; versions kept: {kept} (or best, latest)")
    return int(which)


def _small(job: Job, episodes: int) -> Job:
    """The same job with no more places than there are episodes, and no trackers: it is no run of its own."""
    environment = msgspec.structs.replace(job.environment, concurrent=min(episodes, 256))
    coordinator = msgspec.structs.replace(job.coordinator, store="embedded", metrics_port=0)
    trackers = msgspec.structs.replace(job.trackers, use=[])
    return msgspec.structs.replace(job, environment=environment, coordinator=coordinator, trackers=trackers)


def _no_more_than_engines_take(job: Job) -> Job:
    """A turn that waits in an engine's queue gains nothing, and its deadline runs."""
    places = number(job.rollout.engines) * number(job.rollout.max_sequences)
    concurrent = min(number(job.environment.concurrent), places)
    return msgspec.structs.replace(job, environment=msgspec.structs.replace(job.environment, concurrent=concurrent))


def _failure(words: str) -> str:
    lines = [line for line in words.splitlines() if line.startswith("failed")]
    return lines[-1] if lines else words.strip()
