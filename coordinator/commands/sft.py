"""``bin/sft JOB``: begin from demonstrations. The policy imitates recorded trajectories or chats, and becomes a model
directory from which ``bin/train`` can go on (``policy.path``)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from coordinator.checkpoints import Checkpoints
from coordinator.commands.offline import empty_directory, prepare_offline, run_offline
from coordinator.commands.train import (
    DEMONSTRATIONS,
    begun,
    check_resumable,
    describe,
    newest,
    read_job_directory,
    settled,
    write_job_directory,
)
from coordinator.commands.usage import examples
from coordinator.job import Job, JobError, convert
from coordinator.launch import Launch, policy_directory
from coordinator.modeldir import settings_for
from coordinator.observe.progress import PlainProgress
from coordinator.observe.rundir import RunDirectory
from coordinator.preflight import check_policy, check_trackers
from coordinator.resources.resolve import Placement, resolve
from coordinator.sft import Demonstrations, Imitation, load_demonstrations
from hwprobe import AffinityMap, build_affinity_map, probe


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="sft",
        description="Fine-tune a job's policy on demonstrations (supervised), to begin reinforcement learning from.",
        epilog=examples(
            "sft my.yaml --data chats.jsonl",
            "sft my.yaml --data dumps/expert sft.select=successful",
            "sft my.yaml --data runs/latest sft.top_return=0.25 sft.epochs=2",
            "sft --resume runs/latest",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("job", nargs="?", type=Path, help="job file (YAML)")
    result.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings to change")
    result.add_argument(
        "--data", type=Path, help="a dump, a run that recorded (train.record), or chats as JSONL (default: sft.data)"
    )
    result.add_argument("--out", type=Path, help="where the model goes (default: model/ in the run directory)")
    result.add_argument("--dry-run", action="store_true", help="print the resolved job and its data, then stop")
    result.add_argument("--resume", type=Path, metavar="RUN", help="go on from a run's newest checkpoint")
    result.add_argument("--runs", type=Path, default=Path("runs"), help="where run directories go (default: runs)")
    return result


def main(argv: list[str] | None = None) -> int:
    return begun(lambda: _main(parser().parse_intermixed_args(argv)))


def _main(arguments: argparse.Namespace) -> int:
    if arguments.resume is not None:
        overrides = ([str(arguments.job)] if arguments.job is not None else []) + arguments.overrides
        return _resume(arguments.resume, overrides, arguments)
    if arguments.job is None:
        raise JobError("expected a job file (or --resume RUN); see sft --help")
    job_directory = arguments.job.resolve().parent

    def ready(job: Job) -> Job:
        return _with_data(settled(job), arguments.data, job_directory)

    job, affinity, placement = prepare_offline(arguments.job, arguments.overrides, ready)
    demonstrations = _demonstrations(job)
    if arguments.dry_run:
        print(f"{describe(job, placement)}\n\n{demonstrations.describe()}")
        return 0
    out = _made(arguments.out)
    with RunDirectory.create(arguments.runs, f"{job.name}-sft") as directory:
        directory.write_job(job)
        write_job_directory(directory, job_directory)
        (directory.path / DEMONSTRATIONS).write_text(f"{job.sft.data}\n")
        return _run(_launch(job, placement, affinity, job_directory), directory, demonstrations, out)


def _resume(path: Path, overrides: list[str], arguments: argparse.Namespace) -> int:
    with RunDirectory.open(path, own=True) as directory:
        if not (directory.path / DEMONSTRATIONS).is_file():
            raise JobError(f"{path}: not a run of bin/sft, which alone can go on here; see train --resume")
        checkpoint = newest(directory)
        job_directory = read_job_directory(directory)
        affinity = build_affinity_map(probe())
        before = convert(directory.read_job(), str(directory.job_file), [])
        job = settled(convert(directory.read_job(), str(directory.job_file), overrides))
        job = _with_data(job, arguments.data, job_directory)
        job, placement = resolve(job, affinity, offline=True)
        check_resumable(job, before)
        demonstrations = _demonstrations(job)
        if arguments.dry_run:
            print(f"{describe(job, placement)}\n\n{demonstrations.describe()}")
            return 0
        out = _made(arguments.out)
        directory.write_job(job)
        directory.rewind(checkpoint.version)
        launch = msgspec.structs.replace(
            _launch(job, placement, affinity, job_directory),
            resume=checkpoint,
            resume_directory=Checkpoints(directory.checkpoints, 1).path(checkpoint.version),
        )
        return _run(launch, directory, demonstrations, out)


def _with_data(job: Job, data: Path | None, job_directory: Path) -> Job:
    """The job with the path of its demonstrations absolute. Raises ``JobError`` where there is none."""
    if data is None and job.sft.data is None:
        raise JobError("sft.data: expected demonstrations (or --data): a dump, a run that recorded, or chats as JSONL")
    path = data.absolute() if data is not None else job_directory / str(job.sft.data)
    if not path.exists():
        raise JobError(f"sft.data: {path}: no such file or directory")
    return msgspec.structs.replace(job, sft=msgspec.structs.replace(job.sft, data=str(path)))


def _demonstrations(job: Job) -> Demonstrations:
    check_trackers(job)
    return load_demonstrations(Path(str(job.sft.data)), job, check_policy(job))


def _made(out: Path | None) -> Path | None:
    return None if out is None else empty_directory(out)


def _launch(job: Job, placement: Placement, affinity: AffinityMap, job_directory: Path) -> Launch:
    return Launch(
        job=job, placement=placement, affinity=affinity, job_directory=job_directory, local_roles=("trainer",)
    )


def _run(launch: Launch, directory: RunDirectory, demonstrations: Demonstrations, out: Path | None) -> int:
    model = out if out is not None else directory.path / "model"
    program = Imitation(demonstrations, model, policy_directory(launch.job, directory.path))
    progress = PlainProgress(program.steps(launch.job.sft), sys.stdout)
    progress.note(demonstrations.describe())
    status = run_offline(launch, directory, progress, program)
    if (model / "config.json").is_file():
        print(f"  train on  bin/train JOB {' '.join(settings_for(model, launch.job.policy))}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
