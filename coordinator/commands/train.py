"""``bin/train JOB.yaml``: a whole run in one command.

It starts every role on this machine: coordinator, proxy, environments, rewards, trainer and weight sync in this
process, and a process each for engines, trainer ranks and environment workers.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import yaml

from actors.core.logs import configure_logging
from coordinator.checkpoints import Checkpoints, CheckpointUnusable, RunCheckpoint
from coordinator.commands.offline import prepare_offline, run_offline
from coordinator.commands.usage import examples
from coordinator.dumping import fitting_dump
from coordinator.job import MESH, Job, JobError, convert, load
from coordinator.launch import CONTROL, Launch, policy_directory
from coordinator.messages import ROLES
from coordinator.observe.progress import open_progress
from coordinator.observe.rundir import RunDirectory, RunDirectoryError
from coordinator.preflight import check_job, check_policy, check_trackers
from coordinator.recovery import run_to_its_end
from coordinator.resources.resolve import Placement, check_trainable, resolve
from coordinator.train_only import FromDump
from hwprobe import AffinityMap, build_affinity_map, probe

EXIT_USAGE = 2


def parser() -> argparse.ArgumentParser:
    """Public so that documentation and completion can read it."""
    result = argparse.ArgumentParser(
        prog="train",
        description="Train an agent: start every part of a run on this machine and go on until it is done.",
        epilog=examples(
            "train examples/frozenlake.yaml",
            "train my.yaml train.steps=100 scheduling.alpha=0",
            "train --resume runs/latest",
            "train my.yaml --from-dump dumps/mine",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("job", nargs="?", type=Path, help="job file (YAML)")
    result.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings to change")
    result.add_argument("--dry-run", action="store_true", help="print the resolved job and its placement, then stop")
    result.add_argument("--resume", type=Path, metavar="RUN", help="go on from a run's newest checkpoint")
    result.add_argument(
        "--from-dump", type=Path, metavar="DIR", help="train on a dump (bin/rollout) or a recorded run, without engines"
    )
    result.add_argument("--runs", type=Path, default=Path("runs"), help="where run directories go (default: runs)")
    return result


def main(argv: list[str] | None = None) -> int:
    return begun(lambda: _main(parser().parse_intermixed_args(argv)))


def begun(work: Callable[[], int]) -> int:
    """The exit status of a command that begins a run, or goes on with one."""
    try:
        return work()
    except (JobError, RunDirectoryError, CheckpointUnusable) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:  # before a run listens for it
        print("interrupted before anything was started", file=sys.stderr)
        return 130


def _main(arguments: argparse.Namespace) -> int:
    if arguments.resume is not None:
        overrides = ([str(arguments.job)] if arguments.job is not None else []) + arguments.overrides
        return _resume(arguments.resume, overrides, dry_run=arguments.dry_run)
    if arguments.job is None:
        raise JobError("expected a job file (or --resume RUN); see train --help")
    job_directory = arguments.job.resolve().parent
    if arguments.from_dump is not None:
        return _from_dump(arguments, job_directory)
    job, affinity, placement = prepare(arguments.job, arguments.overrides)
    check_trainable(job)
    check_trackers(job)
    check_job(job, job_directory)
    if arguments.dry_run:
        print(describe(job, placement))
        return 0
    with RunDirectory.create(arguments.runs, job.name) as directory:
        directory.write_job(job)
        write_job_directory(directory, job_directory)
        launch = Launch(job=job, placement=placement, affinity=affinity, job_directory=job_directory, local_roles=ROLES)
        return run(launch, directory)


def _from_dump(arguments: argparse.Namespace, job_directory: Path) -> int:
    job, affinity, placement = prepare_offline(arguments.job, arguments.overrides, settled)
    check_trackers(job)
    check_policy(job)
    program = FromDump(fitting_dump(arguments.from_dump, job), job)
    if arguments.dry_run:
        print(f"{describe(job, placement)}\n\n{program.describe()}")
        return 0
    with RunDirectory.create(arguments.runs, job.name) as directory:
        directory.write_job(job)
        write_job_directory(directory, job_directory)
        (directory.path / FROM_DUMP).write_text(f"{arguments.from_dump.resolve()}\n")
        launch = Launch(
            job=job, placement=placement, affinity=affinity, job_directory=job_directory, local_roles=("trainer",)
        )
        return _train_only(launch, directory, program)


def _train_only(launch: Launch, directory: RunDirectory, program: FromDump) -> int:
    progress = open_progress(launch.job.name, launch.job.train.steps)
    progress.note(program.describe())
    if launch.job.evaluation.episodes:
        progress.note(f"no evaluation without engines: bin/eval {directory.path} afterwards")
    return run_offline(launch, directory, progress, program)


def prepare(path: Path, overrides: list[str]) -> tuple[Job, AffinityMap, Placement]:
    """Read, probe, resolve. Raises ``JobError``."""
    job = settled(load(path, overrides))
    affinity = build_affinity_map(probe(), job.resource_profile)
    job, placement = resolve(job, affinity)
    return job, affinity, placement


def settled(job: Job) -> Job:
    """The same job, independent of the working directory: it is read again elsewhere, and later."""
    policy = job.policy
    absolute = {
        name: str(Path(value).absolute())
        for name, value in (("path", policy.path), ("tokenizer", policy.tokenizer))
        if value is not None and value != "bytes"
    }
    return msgspec.structs.replace(job, policy=msgspec.structs.replace(policy, **absolute))


FROM_DUMP = "from_dump"
"""File of a run directory that was trained without engines: on which dump."""

DEMONSTRATIONS = "demonstrations"
"""File of a run directory that ``bin/sft`` made: what was imitated."""

JOB_DIRECTORY = "job_directory"
"""File of a run directory: where the job file lay, which import paths are relative to."""


def write_job_directory(directory: RunDirectory, job_directory: Path) -> None:
    (directory.path / JOB_DIRECTORY).write_text(f"{job_directory}\n")


def read_job_directory(directory: RunDirectory) -> Path:
    """Raises ``RunDirectoryError``."""
    path = directory.path / JOB_DIRECTORY
    try:
        return Path(path.read_text().strip())
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error}; is {directory.path} a run directory?") from None


AS_WRITTEN = "job-as-written.json"
"""File of a run directory whose roles are on several hosts: the job before it was resolved."""


def write_as_written(directory: RunDirectory, job: Job) -> None:
    (directory.path / AS_WRITTEN).write_bytes(msgspec.json.encode(job))


def read_as_written(directory: RunDirectory) -> Job | None:
    """None for a run on one host. Raises ``RunDirectoryError``."""
    path = directory.path / AS_WRITTEN
    try:
        return msgspec.json.decode(path.read_bytes(), type=Job)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error}") from None


def _resume(path: Path, overrides: list[str], *, dry_run: bool) -> int:
    with RunDirectory.open(path, own=True) as directory:
        if (directory.path / DEMONSTRATIONS).is_file():
            raise JobError(f"{path}: a run of bin/sft; go on with sft --resume, or train from its model (policy.path)")
        checkpoint = newest(directory)
        job_directory = read_job_directory(directory)
        job = settled(convert(directory.read_job(), str(directory.job_file), overrides))
        affinity = build_affinity_map(probe(), job.resource_profile)
        check_trackers(job)
        offline = (directory.path / FROM_DUMP).is_file()
        job, placement = resolve(job, affinity, offline=offline)
        program = _dump_of(directory, job) if offline else None
        if program is None:
            check_job(job, job_directory)
        check_resumable(job, convert(directory.read_job(), str(directory.job_file), []))
        if checkpoint.version >= job.train.steps:
            raise JobError(
                f"{path}: all {job.train.steps} steps are done; train.steps={2 * job.train.steps} would add as many"
            )
        if dry_run:
            print(describe(job, placement))
            return 0
        directory.write_job(job)
        directory.rewind(checkpoint.version)
        launch = Launch(
            job=job,
            placement=placement,
            affinity=affinity,
            job_directory=job_directory,
            local_roles=ROLES if program is None else ("trainer",),
            resume=checkpoint,
            resume_directory=Checkpoints(directory.checkpoints, 1).path(checkpoint.version),
        )
        return run(launch, directory) if program is None else _train_only(launch, directory, program)


def _dump_of(directory: RunDirectory, job: Job) -> FromDump:
    """What a run without engines is trained on. Raises ``JobError``."""
    return FromDump(fitting_dump(Path((directory.path / FROM_DUMP).read_text().strip()), job), job)


def check_resumable(job: Job, before: Job) -> None:
    """Refuse, before anything is written, what the checkpoint cannot be loaded into. Raises ``JobError``."""
    facts: dict[str, tuple[object, object]] = {
        "policy": (job.policy, before.policy),
        "train.backend": (job.train.backend, before.train.backend),
        **{f"train.{key}": (getattr(job.train, key), getattr(before.train, key)) for key in MESH},
    }
    for key, (now, then) in facts.items():
        if now != then:
            raise JobError(f"{key}: a resumed run keeps the one it began with ({then}); found {now}")


def newest(directory: RunDirectory) -> RunCheckpoint:
    """The checkpoint to resume from. Raises ``CheckpointUnusable``."""
    return Checkpoints(directory.checkpoints, 1).newest()


def run(launch: Launch, directory: RunDirectory) -> int:
    """Run it in this process, with progress on the terminal."""
    configure_logging(CONTROL, directory.logs, job=directory.path.name)
    policy_directory(launch.job, directory.path)
    progress = open_progress(launch.job.name, launch.job.train.steps)
    progress.note(f"run directory: {directory.path}")
    for note in launch.placement.notes:
        progress.note(note)
    if launch.resume is not None:
        progress.note(f"resuming from version {launch.resume.version}")
    try:
        return asyncio.run(run_to_its_end(launch, directory, progress))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # the exit status is settled
            signal.signal(number, signal.SIG_IGN)


def describe(job: Job, placement: Placement) -> str:
    """What ``--dry-run`` prints: the job as YAML, then where everything would run."""
    text = yaml.safe_dump(msgspec.to_builtins(job), sort_keys=False, allow_unicode=True)
    return f"{text}\n{placement.describe()}"


if __name__ == "__main__":
    sys.exit(main())
