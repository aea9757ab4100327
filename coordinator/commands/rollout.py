"""``bin/rollout JOB|RUN``: engines and environments without training; what they play is dumped, token by token."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np

from actors.env.messages import Outcome, Ticket
from actors.env.protocol import evaluation_task, training_task
from actors.trainer.dump import Manifest, write_dump
from actors.trainer.store import StoreCorrupt, read_records
from actors.trainer.trainer import BUFFER_FILE
from coordinator.checkpoints import CheckpointUnusable
from coordinator.commands.finished import FinishedRun, Interrupted, Player, PlayFailed
from coordinator.commands.offline import empty_directory
from coordinator.commands.train import describe, prepare
from coordinator.commands.usage import examples
from coordinator.dumping import manifest_of
from coordinator.job import Job, JobError
from coordinator.observe.rundir import RunDirectoryError
from coordinator.observe.text import count, duration, lost, number, percent
from coordinator.preflight import check_job
from coordinator.resources.resolve import resolve
from hwprobe import build_affinity_map, probe

TENTHS = 10
"""How often progress is told."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="rollout",
        description="Play and keep the trajectories: exact tokens, masks, log-probabilities, versions and texts, for "
        "train --from-dump, sft --data or replay. Weights: those of a run's checkpoint, of policy.path, or fresh ones.",
        epilog=examples(
            "rollout my.yaml --trajectories 256",
            "rollout runs/latest --version best --out dumps/expert",
            "rollout runs/latest --greedy --held-out",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("source", type=Path, metavar="JOB|RUN", help="job file (YAML), or run directory")
    result.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings to change")
    result.add_argument("--trajectories", type=int, default=64, help="how many (default: 64)")
    result.add_argument("--out", type=Path, help="directory of the dump (default: dumps/TIME-NAME)")
    result.add_argument("--version", default="best", help="checkpoint of a run: best (default), latest or a version")
    result.add_argument("--greedy", action="store_true", help="the likeliest token always, instead of sampling")
    result.add_argument("--held-out", action="store_true", help="play held-out tasks instead of training tasks")
    result.add_argument("--first-task", type=int, default=0, help="where tasks and seeds begin (default: 0)")
    result.add_argument("--dry-run", action="store_true", help="print the resolved job and its placement, then stop")
    result.add_argument("--json", action="store_true", help="print the dump's manifest as JSON")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        return _main(arguments)
    except (JobError, RunDirectoryError, CheckpointUnusable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PlayFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Interrupted):
        print("interrupted", file=sys.stderr)
        return 130


def _main(arguments: argparse.Namespace) -> int:
    if arguments.trajectories < 1 or arguments.first_task < 0:
        raise JobError("--trajectories: expected 1 or more, and --first-task: 0 or more")
    player = _player(arguments)
    if arguments.dry_run:
        job, placement = resolve(player.job, build_affinity_map(probe()))
        print(describe(job, placement))
        return 0
    out = arguments.out or Path("dumps") / f"{datetime.now():%Y%m%d-%H%M%S}-{player.job.name}"
    empty_directory(out)
    return _roll_out(player, arguments, out)


def _player(arguments: argparse.Namespace) -> Player:
    """Raises ``JobError``, ``RunDirectoryError``, ``CheckpointUnusable``."""
    if arguments.source.is_dir():
        return FinishedRun(arguments.source, arguments.version, arguments.overrides)
    job, _, _ = prepare(arguments.source, arguments.overrides)
    job_directory = arguments.source.resolve().parent
    check_job(job, job_directory)
    return Player(job, job_directory)


def _roll_out(player: Player, arguments: argparse.Namespace, out: Path) -> int:
    tickets = make_tickets(
        player.job, arguments.trajectories, arguments.first_task, greedy=arguments.greedy, held_out=arguments.held_out
    )
    progress = RolloutProgress(len(tickets), lambda text: print(text, file=sys.stderr, flush=True))
    manifest, written = manifest_of(player.job), list[Manifest]()

    def keep(directory: Path) -> None:
        try:
            finished = _dump(directory, out, manifest, tickets, progress.losses())
        except (OSError, StoreCorrupt) as error:
            raise PlayFailed(f"{out}: the dump could not be written: {error}") from None
        written.extend([] if finished is None else [finished])

    try:
        player.play(tickets, progress.say, told=progress.outcome, keep=keep)
    finally:
        if not any(out.iterdir()):
            out.rmdir()
        if written:
            print(msgspec.json.encode(written[0]).decode() if arguments.json else describe_dump(out, written[0]))
    if not written:
        raise PlayFailed(f"no trajectory reached its end: {lost(progress.losses())}; nothing is written")
    return 0


def make_tickets(job: Job, trajectories: int, first: int, *, greedy: bool, held_out: bool) -> list[Ticket]:
    """In groups as in training, the last one perhaps smaller; seeds are those that a live run would give, names are
    not: a checkpoint's buffer holds some of those."""
    size, temperature = job.train.group_size, 0.0 if greedy else job.rollout.temperature
    task = evaluation_task if held_out else training_task

    def ticket(index: int) -> Ticket:
        number = first * size + index
        seed = int(np.random.default_rng([job.seed, number]).integers(2**31))
        group = first + index // size
        return Ticket(f"r{number}", group, task(group), "train", temperature, seed)

    return [ticket(index) for index in range(trajectories)]


def _dump(
    directory: Path, out: Path, manifest: Manifest, tickets: list[Ticket], losses: dict[str, int]
) -> Manifest | None:
    """What the run's store holds of the tickets, in their order; None where it holds nothing of them."""
    store = directory / "store" / BUFFER_FILE
    held = {trajectory.ticket: trajectory for trajectory, _ in read_records(store)} if store.is_file() else {}
    trajectories = [held[ticket.id] for ticket in tickets if ticket.id in held]
    return write_dump(out, manifest, trajectories, losses) if trajectories else None


class RolloutProgress:
    """A line whenever another tenth is done, and what was lost."""

    def __init__(self, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.say = say
        self._total = total
        self._clock = clock
        self._outcomes: list[Outcome] = []
        self._started: float | None = None

    def outcome(self, outcome: Outcome) -> None:
        """Another one has ended."""
        now = self._clock()
        self._started = now if self._started is None else self._started
        self._outcomes.append(outcome)
        done = len(self._outcomes)
        if done * TENTHS // self._total > (done - 1) * TENTHS // self._total:
            self.say(self._line(now - self._started))

    def _line(self, elapsed_s: float) -> str:
        done = len(self._outcomes)
        kept = [outcome for outcome in self._outcomes if outcome.state == "stored"]
        success = sum(outcome.success for outcome in kept) / max(len(kept), 1)
        tokens = sum(outcome.sampled_tokens for outcome in kept)
        parts = [
            f"{done}/{self._total}",
            f"success {percent(success)}",
            f"tokens {count(tokens)}",
            f"lost {lost(self.losses())}",
        ]
        left = elapsed_s / done * (self._total - done)
        return "  ".join(parts + ([f"eta {duration(left)}"] if left > 0 else []))

    def losses(self) -> dict[str, int]:
        """Reason -> how many."""
        return dict(Counter(outcome.reason for outcome in self._outcomes if outcome.state == "lost"))


def describe_dump(out: Path, manifest: Manifest) -> str:
    """For people."""
    content = manifest.content
    if content is None:
        return f"dump  {out}"
    oldest, newest = content.versions
    under = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
    lines = [
        f"dump          {out}",
        f"trajectories  {content.trajectories} in {content.groups} groups of up to {content.group_size}, {under}",
        f"success       {content.success:.1%}",
        f"return        {number(content.return_mean, 3)}",
        f"tokens        {content.sampled_tokens} sampled in {content.turns} turns",
        f"digest        {content.digest}",
        f"use it        bin/train JOB --from-dump {out}   bin/sft JOB --data {out}   bin/replay {out} --under RUN",
    ]
    if content.lost:
        lines.insert(2, f"lost          {lost(content.lost)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
