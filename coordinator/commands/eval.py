"""``bin/eval RUN``: how often the policy of a run succeeds on tasks that it has never seen."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.env.messages import Outcome, Ticket
from actors.env.protocol import evaluation_task
from coordinator.checkpoints import CheckpointUnusable
from coordinator.commands.finished import FinishedRun, Interrupted, PlayFailed
from coordinator.commands.usage import examples
from coordinator.job import JobError
from coordinator.observe.recorder import mean_metrics
from coordinator.observe.rundir import RunDirectoryError

FIRST_FRESH = 1_000_000
"""Evaluations during training use the first held-out tasks; this command starts far behind them."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="eval",
        description="Evaluate a run's policy on fresh held-out tasks.",
        epilog=examples(
            "eval runs/latest",
            "eval runs/latest --episodes 200 --sample",
            "eval runs/latest --version 20",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_arguments(result)
    result.add_argument("--episodes", type=int, default=64, help="how many (default: 64)")
    result.add_argument("--save", type=Path, metavar="FILE", help="also write every episode, a JSON line each")
    result.add_argument("--json", action="store_true", help="print one JSON object")
    return result


def add_run_arguments(result: argparse.ArgumentParser) -> None:
    """Whose policy plays, and how."""
    result.add_argument("run", type=Path, help="run directory, e.g. runs/latest")
    result.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings to change")
    result.add_argument(
        "--version", default="best", help="checkpoint: best (default), latest or a version (0: before training)"
    )
    result.add_argument("--sample", action="store_true", help="sample at the training temperature instead of greedily")


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    if arguments.episodes < 1:
        print(f"error: --episodes: expected 1 or more, found {arguments.episodes}", file=sys.stderr)
        return 2
    if arguments.save is not None and not arguments.save.parent.is_dir():
        print(f"error: --save: there is no directory {arguments.save.parent}", file=sys.stderr)
        return 2
    try:
        run = FinishedRun(arguments.run, arguments.version, arguments.overrides)
        tickets = fresh_tickets(run, arguments.episodes, FIRST_FRESH, sample=arguments.sample)
        outcomes = run.play(tickets, lambda text: print(text, file=sys.stderr))
    except (JobError, RunDirectoryError, CheckpointUnusable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (PlayFailed, Interrupted) as error:
        print(f"error: {error}", file=sys.stderr)
        return 130 if isinstance(error, Interrupted) else 1
    figures = summarise(run.version, outcomes)
    print(json.dumps(figures) if arguments.json else describe(figures))
    if arguments.save is not None:
        try:
            arguments.save.write_bytes(b"".join(msgspec.json.encode(outcome) + b"\n" for outcome in outcomes))
        except OSError as error:
            print(f"error: --save: {arguments.save}: {error.strerror}", file=sys.stderr)
            return 1
    return 0


def fresh_tickets(run: FinishedRun, count: int, first: int, *, sample: bool) -> list[Ticket]:
    """Evaluation tickets for held-out tasks from ``first`` on."""
    temperature = run.job.rollout.temperature if sample else 0.0
    return [
        Ticket(f"e{index}", -1, evaluation_task(first + index), "evaluate", temperature, run.job.seed + first + index)
        for index in range(count)
    ]


def summarise(version: int, outcomes: list[Outcome]) -> dict[str, Any]:
    """Figures of an evaluation; lost episodes count as failures and are reported."""
    successes = sum(outcome.success for outcome in outcomes)
    low, high = wilson(successes, len(outcomes))
    return {
        "version": version,
        "episodes": len(outcomes),
        "success": successes / len(outcomes),
        "success_low": low,
        "success_high": high,
        "return_mean": float(np.mean([outcome.env_return for outcome in outcomes])),
        "turns_mean": float(np.mean([outcome.turns for outcome in outcomes])),
        "environment": mean_metrics(outcomes),
        "lost": sum(outcome.state == "lost" for outcome in outcomes),
    }


def wilson(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """95% interval of a rate (Wilson 1927)."""
    rate = successes / trials
    centre = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def describe(figures: dict[str, Any]) -> str:
    interval = f"95% interval {figures['success_low']:.1%} to {figures['success_high']:.1%}"
    lines = [
        f"version {figures['version']:g}, {figures['episodes']:g} episodes",
        f"success  {figures['success']:.1%}  ({interval})",
        f"return   {figures['return_mean']:.3f}",
        f"turns    {figures['turns_mean']:.1f}",
    ]
    lines += [f"{name.replace('_', ' ')}  {mean:.2f} an episode" for name, mean in figures["environment"].items()]
    if figures["lost"]:
        lines.append(f"lost     {figures['lost']:g} episodes did not run to their end; they count as failures")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
