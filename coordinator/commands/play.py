"""``bin/play RUN``: watch one episode, turn by turn."""

from __future__ import annotations

import argparse
import sys
import time

from actors.env.messages import Outcome
from coordinator.checkpoints import CheckpointUnusable
from coordinator.commands.eval import FIRST_FRESH, add_run_arguments, fresh_tickets
from coordinator.commands.finished import FinishedRun, Interrupted, PlayFailed
from coordinator.commands.usage import examples
from coordinator.job import JobError
from coordinator.observe.rundir import RunDirectoryError
from coordinator.observe.text import readable


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="play",
        description="Watch a run's policy play one episode, turn by turn.",
        epilog=examples(
            "play runs/latest",
            "play runs/latest --task 7 --sample --delay 1",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_arguments(result)
    result.add_argument("--task", type=int, default=0, help="which held-out task (default: 0)")
    result.add_argument("--delay", type=float, default=0.4, help="seconds between turns on a terminal (default: 0.4)")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        run = FinishedRun(arguments.run, arguments.version, arguments.overrides)
        tickets = fresh_tickets(run, 1, FIRST_FRESH + arguments.task, sample=arguments.sample)
        outcome = run.play(tickets, lambda text: print(text, file=sys.stderr))[0]
    except (JobError, RunDirectoryError, CheckpointUnusable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (PlayFailed, Interrupted) as error:
        print(f"error: {error}", file=sys.stderr)
        return 130 if isinstance(error, Interrupted) else 1
    try:
        show(outcome, arguments.delay if sys.stdout.isatty() else 0.0)
    except KeyboardInterrupt:
        return 130
    return 0 if outcome.state == "evaluated" else 1


def show(outcome: Outcome, delay_s: float) -> None:
    """Print an episode's turns, then how it ended."""
    turn = 0
    for speaker, text in outcome.transcript:
        if speaker == "action":
            turn += 1
            print(f"  turn {turn}: {readable(text)}", flush=True)
        else:
            print(readable(text), flush=True)
        time.sleep(delay_s)
    if outcome.state == "lost":
        print(f"the episode did not run to its end: {outcome.reason}")
    else:
        ending = "success" if outcome.success else "no success"
        print(f"{ending} after {outcome.turns} turns, return {outcome.env_return:g}")


if __name__ == "__main__":
    sys.exit(main())
