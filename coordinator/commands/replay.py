"""``bin/replay BATCH``: go through a batch, a failed one above all, as the trainer does, without training on it."""

from __future__ import annotations

import argparse
import asyncio
import io
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.core.logs import close_logging, configure_logging
from actors.trainer.batches import Failure, read_failure
from actors.trainer.dump import DumpError, check_fit, read_dump
from actors.trainer.messages import InspectedGroups, InspectGroups
from actors.trajectory import Trajectory
from coordinator.checkpoints import Checkpoints, CheckpointUnusable
from coordinator.commands.finished import pick_version
from coordinator.commands.train import read_job_directory, settled
from coordinator.commands.usage import examples
from coordinator.dumping import manifest_of
from coordinator.job import Job, JobError, convert, load
from coordinator.launch import CONTROL, Launch
from coordinator.observe.progress import PlainProgress
from coordinator.observe.rundir import RunDirectory, RunDirectoryError
from coordinator.observe.text import number, readable
from coordinator.observe.tracking.settings import TrackerSettings
from coordinator.offline import OfflineRun
from coordinator.preflight import check_policy
from coordinator.replay import Replayed, TrajectoryFigures, Turn, replayed, turns_of
from coordinator.resources.resolve import resolve
from hwprobe import build_affinity_map, probe

START = "start"
"""The version that stands for the weights that a run begins with."""


class ReplayFailed(RuntimeError):
    """The trainer could not go through the batch; the message says why."""


class Under(msgspec.Struct, frozen=True):
    """The weights that a batch is replayed under."""

    job: Job
    job_directory: Path
    directory: RunDirectory | None = None
    version: int | None = None  # of a checkpoint; None: what the job starts from

    def describe(self) -> str:
        if self.version is None:
            return f"the weights that {self.job.name} starts from"
        return f"version {self.version} of {self.directory.path.name if self.directory else self.job.name}"


class Batch(msgspec.Struct, frozen=True):
    """What is replayed."""

    path: Path
    groups: list[list[Trajectory]]
    failure: Failure | None


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="replay",
        description="Replay a batch step by step: log-probabilities, ratios, advantages, losses and gradient norms of "
        "each trajectory under a checkpoint, and the first figure that is not finite.",
        epilog=examples(
            "replay runs/latest/failed-batches/v00012",
            "replay runs/latest --step 3",
            "replay dumps/mine --under runs/latest --version best",
            "replay runs/latest --step 3 --trajectory t17",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("batch", type=Path, help="a failed batch, a dump, or a run that recorded (train.record)")
    result.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings to change")
    result.add_argument("--step", type=int, help="which batch of a dump or a run, from 1 (default: 1)")
    result.add_argument("--under", type=Path, metavar="RUN|JOB", help="whose weights (default: the run it lies in)")
    result.add_argument("--version", help="checkpoint: best, latest, a version or start (default: the batch's own)")
    result.add_argument("--trajectory", metavar="TICKET", help="step through one trajectory, turn by turn")
    result.add_argument("--json", action="store_true", help="print one JSON object")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        return _main(arguments)
    except (JobError, RunDirectoryError, CheckpointUnusable, DumpError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ReplayFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _main(arguments: argparse.Namespace) -> int:
    failure = _failure(arguments.batch)
    where = arguments.under or _enclosing_run(arguments.batch)
    if where is None:
        raise JobError(f"{arguments.batch}: lies in no run; expected --under RUN or --under JOB, whose weights to use")
    step = arguments.step if arguments.step is not None else 1
    wanted = (failure.version if failure is not None else step) - 1
    under = _under(where, arguments.version, wanted, arguments.overrides)
    batch = _batch(arguments.batch, failure, step, under.job)
    chosen = _chosen(batch, arguments.trajectory)
    if arguments.version is None and under.directory is not None and (under.version or 0) != wanted:
        print(
            f"there is no checkpoint of version {wanted}, where this batch was to be trained, so ratios are not those "
            "of its step; --version names another",
            file=sys.stderr,
        )
    print(f"replaying {batch.path} under {under.describe()} ...", file=sys.stderr, flush=True)
    inspected = inspect(batch, under)
    figures = replayed(batch.groups, inspected)
    if chosen is None:
        print(_json(_as_object(batch, under, figures)) if arguments.json else describe(batch, figures))
        return 0
    turns = _turns(batch, chosen, inspected, under.job)
    if arguments.json:
        print(_json({"ticket": chosen.ticket, "turns": turns}))
    else:
        _step_through(chosen, turns)
    return 0


# ---- what is replayed, and under what -------------------------------------------------------------------------------


def _failure(path: Path) -> Failure | None:
    try:
        return read_failure(path)
    except (msgspec.MsgspecError, OSError) as error:
        raise JobError(f"{path}: not a failed batch: {error}") from None


def _enclosing_run(path: Path) -> Path | None:
    absolute = path.absolute()
    return next((place for place in (absolute, *absolute.parents[:2]) if (place / "owner.lock").is_file()), None)


def _under(where: Path, which: str | None, wanted: int, overrides: list[str]) -> Under:
    """Raises ``JobError``, ``RunDirectoryError``, ``CheckpointUnusable``."""
    affinity = build_affinity_map(probe())
    if not where.is_dir():
        if which not in (None, START):
            raise JobError(f"--version: {where} is a job, which has no checkpoint {which!r}; name a run (--under RUN)")
        job, _ = resolve(settled(load(where, overrides)), affinity, offline=True)
        return Under(job, where.resolve().parent)
    directory = RunDirectory.open(where)
    job = settled(convert(directory.read_job(), str(directory.job_file), overrides))
    job, _ = resolve(job, affinity, offline=True)
    version = _version(directory, which, wanted)
    return Under(job, read_job_directory(directory), directory, version)


def _version(directory: RunDirectory, which: str | None, wanted: int) -> int | None:
    """A checkpoint's version, or None for the start. Without a wish: the checkpoint of the version that the batch was
    trained at or, where that is gone, the newest before it."""
    if which == START:
        return None
    if which is not None:
        return pick_version(directory, which)
    earlier = [version for version in Checkpoints(directory.checkpoints, 1).versions() if version <= wanted]
    return earlier[-1] if earlier else None


def _batch(path: Path, failure: Failure | None, step: int, job: Job) -> Batch:
    """Raises ``DumpError`` or ``JobError``."""
    dump = read_dump(path, step if failure is None else None)
    if failure is None or failure.imitate:
        check_fit(dump, manifest_of(job).facts)
    groups, size = dump.groups, job.train.groups_per_step
    if failure is not None and failure.imitate:
        groups = [dump.trajectories]
    elif failure is None and dump.manifest.content is not None:
        groups = groups[(step - 1) * size : step * size] if step > 0 else []
        if not groups:
            count = len(dump.groups)
            raise JobError(f"--step: {path} holds {count} groups, {size} a step: steps 1 to {-(-count // size)}")
    return Batch(dump.path, groups, failure)


def _chosen(batch: Batch, ticket: str | None) -> Trajectory | None:
    if ticket is None:
        return None
    known = {trajectory.ticket: trajectory for group in batch.groups for trajectory in group}
    if ticket not in known:
        raise JobError(f"--trajectory: no {ticket!r} in this batch; there are {', '.join(known)}")
    return known[ticket]


# ---- going through it -----------------------------------------------------------------------------------------------


def inspect(batch: Batch, under: Under) -> InspectedGroups:
    """Let a trainer go through the batch, in a directory of its own. Raises ``ReplayFailed``."""
    found: list[InspectedGroups] = []
    imitate = batch.failure is not None and batch.failure.imitate

    async def program(run: OfflineRun) -> str:
        order = InspectGroups(batch.groups, imitate)
        found.append(await run.ask(order, InspectedGroups, timeout_s=run.step_timeout_s(), about="replay"))
        return "replayed"

    with (
        tempfile.TemporaryDirectory(prefix="rollart-") as base,
        RunDirectory.create(Path(base), under.job.name) as scratch,
    ):
        configure_logging(CONTROL, scratch.logs, job=under.job.name)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        words = io.StringIO()
        try:
            status = asyncio.run(_replay(under, scratch, PlainProgress(0, words), program))
        finally:
            for number_, handler in handlers.items():
                signal.signal(number_, handler)
            close_logging()
    if status == 130:
        raise KeyboardInterrupt
    if not found:
        raise ReplayFailed(next((line for line in words.getvalue().splitlines() if line.startswith("failed")), ""))
    return found[0]


async def _replay(under: Under, scratch: RunDirectory, progress: PlainProgress, program: Any) -> int:
    affinity = build_affinity_map(probe())
    untracked = msgspec.structs.replace(under.job, trackers=TrackerSettings(use=[]))
    job, placement = resolve(untracked, affinity, offline=True)
    scratch.write_job(job)
    resume, directory = None, None
    if under.directory is not None and under.version is not None:
        checkpoints = Checkpoints(under.directory.checkpoints, 1)
        resume, directory = checkpoints.read(under.version), checkpoints.path(under.version)
    launch = Launch(
        job=job,
        placement=placement,
        affinity=affinity,
        job_directory=under.job_directory,
        local_roles=("trainer",),
        resume=resume,
        resume_directory=directory,
    )
    return await OfflineRun(launch, scratch, progress, finishes_steps=False).run(program)


# ---- what is shown --------------------------------------------------------------------------------------------------

COLUMNS = (
    *("trajectory", "group", "reward", "advantage", "tokens", "rollout", "now"),
    *("ratio", "min", "max", "loss", "grad"),
)


def describe(batch: Batch, figures: Replayed) -> str:
    """A table for people; log-probabilities and ratios are means over sampled tokens."""
    lines = [f"failed: {batch.failure.error}"] if batch.failure is not None else []
    lines += _table([COLUMNS, *(_row(one) for one in figures.trajectories)])
    loss, norm = _figure(figures.loss, 6), _figure(figures.gradient_norm, 6)
    lines.append(f"loss {loss}  gradient norm {norm}  tokens {figures.tokens}")
    first = figures.first_not_finite
    lines.append("every figure is finite" if first is None else f"first figure that is not finite: {first}")
    return "\n".join(lines)


def _row(one: TrajectoryFigures) -> Sequence[str]:
    values = (
        one.logprob_rollout,
        one.logprob,
        one.ratio_mean,
        one.ratio_min,
        one.ratio_max,
    )
    return (
        one.ticket,
        str(one.group),
        _figure(one.reward, 2),
        _figure(one.advantage, 3),
        str(one.tokens),
        *(_figure(value, 4) for value in values),
        _figure(one.loss, 6),
        _figure(one.gradient_norm, 4),
    )


def _figure(value: float, digits: int) -> str:
    """Unlike elsewhere, what is not a number reads as what it is."""
    return number(value, digits) if number(value, digits) != "-" else str(value)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _json(figures: dict[str, Any]) -> str:
    """What is not finite becomes null."""
    return msgspec.json.encode(figures).decode()


def _as_object(batch: Batch, under: Under, figures: Replayed) -> dict[str, Any]:
    about = {
        "batch": str(batch.path),
        "version": under.version,
        "error": None if batch.failure is None else batch.failure.error,
    }
    return about | msgspec.structs.asdict(figures)


def _turns(batch: Batch, chosen: Trajectory, inspected: InspectedGroups, job: Job) -> list[Turn]:
    first = 0
    for trajectory in (trajectory for group in batch.groups for trajectory in group):
        if trajectory is chosen:
            break
        first += len(trajectory.segments)
    return turns_of(chosen, inspected.inspection, first, check_policy(job).tokenizer)


def _step_through(chosen: Trajectory, turns: Sequence[Turn]) -> None:
    """Turn by turn; on a terminal the next one comes with Enter."""
    print(f"trajectory {chosen.ticket}, group {chosen.group}, task {chosen.task}, {len(turns)} turns")
    waits = sys.stdin.isatty() and sys.stdout.isatty()
    for index, turn in enumerate(turns, 1):
        print(f"--- turn {index} ---")
        print(readable(turn.observation))
        print(f"  action: {readable(turn.action)!r}")
        head = ("position", "token", "text", "allowed", "version", "rollout", "now", "ratio", "loss")
        rows = [
            (
                str(token.position),
                str(token.id),
                repr(token.text),
                "all" if token.allowed is None else str(token.allowed),
                str(token.version),
                _figure(token.logprob_rollout, 4),
                _figure(token.logprob, 4),
                _figure(token.ratio, 4),
                _figure(token.loss, 6),
            )
            for token in turn.tokens
        ]
        print("\n".join("  " + line for line in _table([head, *rows])), flush=True)
        if waits and index < len(turns):
            try:
                input("  Enter: next turn, Ctrl-D: stop ")
            except EOFError:
                print()
                return
    print(f"ended with return {number(chosen.env_return)}, reward {number(chosen.reward)}, success {chosen.success}")


if __name__ == "__main__":
    sys.exit(main())
