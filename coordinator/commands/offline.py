"""What the commands share that run the trainer alone: preparing a job for it, and running a program to its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from actors.core.logs import configure_logging
from coordinator.job import Job, JobError, load
from coordinator.launch import CONTROL, Launch, policy_directory
from coordinator.observe.progress import Progress
from coordinator.observe.rundir import RunDirectory
from coordinator.offline import OfflineRun
from coordinator.resources.resolve import Placement, resolve
from hwprobe import AffinityMap, build_affinity_map, probe

Program = Callable[[OfflineRun], Awaitable[str]]


def prepare_offline(
    path: Path, overrides: list[str], settled: Callable[[Job], Job]
) -> tuple[Job, AffinityMap, Placement]:
    """Read, probe, resolve for the trainer alone. Raises ``JobError``."""
    job = settled(load(path, overrides))
    affinity = build_affinity_map(probe(), job.resource_profile)
    job, placement = resolve(job, affinity, offline=True)
    return job, affinity, placement


def empty_directory(out: Path) -> Path:
    """``--out``, made where it is missing: a place that cannot be written to is refused before the work that would be
    lost. Raises ``JobError``."""
    try:
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
        if not taken:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"--out: {out} cannot be made: {error.strerror}") from None
    if taken:
        raise JobError(f"--out: {out} is there already and not an empty directory; name another one")
    return out.absolute()


def run_offline(launch: Launch, directory: RunDirectory, progress: Progress, program: Program) -> int:
    """Run a program in this process; returns the exit status."""
    configure_logging(CONTROL, directory.logs, job=directory.path.name)
    policy_directory(launch.job, directory.path)
    progress.note(f"run directory: {directory.path}")
    if launch.resume is not None:
        progress.note(f"resuming from version {launch.resume.version}")

    async def start() -> int:
        return await OfflineRun(launch, directory, progress).run(program)

    try:
        return asyncio.run(start())
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # the exit status is settled
            signal.signal(number, signal.SIG_IGN)
