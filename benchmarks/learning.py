"""How fast and how surely a job learns, by default the quick start: several seeds, start-up included.

    python -m benchmarks.learning                     5 seeds each with the torch engine and with vLLM
    python -m benchmarks.learning --quick             one seed with the torch engine
    python -m benchmarks.learning --json              one JSON object
    python -m benchmarks.learning --curve docs/learning.svg
    python -m benchmarks.learning --job examples/frozenlake-maps.yaml --engines torch --seeds 3 --limit-s 1200 \\
        --fresh 400 --curve docs/learning-maps.svg --curve-of success

Every run is the whole command as a user gives it, timed from outside: the interpreter's start, imports, engines,
training, the last checkpoint. A run counts as solved when its last greedy evaluation reaches the job's target.
``--fresh N`` then plays the best checkpoint greedily on N held-out tasks that no evaluation of the run has used, so
that having stopped at a lucky evaluation does not flatter the figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from benchmarks.curves import draw
from coordinator.job import load
from coordinator.observe.lines import read_lines
from coordinator.observe.records import EvalRecord, StepRecord, decode_metric

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "examples" / "frozenlake.yaml"
LIMIT_S = {"torch": 180.0, "vllm": 240.0}
"""What the quick start may take."""

PATIENCE = 3.0
"""A run that takes this many times its limit is killed."""


class Outcome(msgspec.Struct, frozen=True):
    """One run."""

    engine: str
    seed: int
    status: int
    seconds: float  # the whole command
    cpu_s: float  # processor time of all its processes: comparable between a busy machine and an idle one
    first_reward_s: float  # from the command's start to its first step line
    first_success: float  # greedy, before any training
    last_success: float
    steps: int
    evaluations: list[tuple[float, float]]  # seconds since the command's start, greedy success
    rewards: list[tuple[float, float]]  # seconds, mean reward of a step
    fresh: dict[str, float] | None = None  # what the eval command printed of the best checkpoint


def run(job: Path, engine: str, seed: int, overrides: list[str], *, limit_s: float, fresh: int) -> Outcome:
    """One whole training run in a temporary directory."""
    with tempfile.TemporaryDirectory() as base:
        command = [sys.executable, "-u", "-m", "coordinator.commands.train", str(job), f"rollout.engine={engine}"]
        command += [f"seed={seed}", "--runs", base, *overrides]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        start, first_step, cpu_before_s = time.monotonic(), float("nan"), children_cpu_s()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        overdue = threading.Timer(PATIENCE * limit_s, process.kill)
        overdue.start()
        if process.stdout is not None:
            for line in process.stdout:
                if line.startswith("step 1/"):
                    first_step = time.monotonic() - start
        status = process.wait()
        overdue.cancel()
        seconds, cpu_s = time.monotonic() - start, children_cpu_s() - cpu_before_s
        latest = Path(base) / "latest"
        records = read_lines(latest / "metrics.jsonl", decode_metric).records
        measured = evaluated(latest, fresh, environment) if fresh and status == 0 else None
    steps = [record for record in records if isinstance(record, StepRecord)]
    evaluations = [record for record in records if isinstance(record, EvalRecord)]
    offset = first_step - steps[0].elapsed_s if steps else 0.0
    when = {step.version: step.elapsed_s + offset for step in steps}
    return Outcome(
        engine,
        seed,
        status,
        seconds,
        cpu_s,
        first_step,
        evaluations[0].success if evaluations else float("nan"),
        evaluations[-1].success if evaluations else float("nan"),
        len(steps),
        [(when.get(record.version, first_step), record.success) for record in evaluations],
        [(when[step.version], step.reward_mean) for step in steps],
        measured,
    )


def children_cpu_s() -> float:
    """Processor time of ended children and of those of their descendants that were waited for."""
    times = os.times()
    return times.children_user + times.children_system


def evaluated(run_directory: Path, episodes: int, environment: dict[str, str]) -> dict[str, float]:
    """The figures of the eval command, on tasks that the run has not used."""
    command = [sys.executable, "-m", "coordinator.commands.eval", str(run_directory), "--episodes", str(episodes)]
    ended = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, env=environment, check=True)
    figures: dict[str, float] = json.loads(ended.stdout)
    return figures


def table(outcomes: list[Outcome]) -> str:
    """For people."""
    lines = ["engine  seed  status  seconds    cpu s  first reward  steps  success before -> after"]
    lines += [
        f"{o.engine:6}  {o.seed:4}  {o.status:6}  {o.seconds:7.1f}  {o.cpu_s:7.1f}  {o.first_reward_s:10.1f} s  "
        f"{o.steps:5}  {o.first_success:.2f} -> {o.last_success:.2f}{on_fresh(o.fresh)}"
        for o in outcomes
    ]
    return "\n".join(lines)


def on_fresh(figures: dict[str, float] | None) -> str:
    if figures is None:
        return ""
    low, high = figures["success_low"], figures["success_high"]
    return f"  on {figures['episodes']:g} fresh tasks {figures['success']:.3f} ({low:.3f} to {high:.3f})"


def figures(outcomes: list[Outcome], target: float, limits_s: dict[str, float]) -> dict[str, float]:
    """Median and worst of each engine."""
    result: dict[str, float] = {}
    for engine in sorted({outcome.engine for outcome in outcomes}):
        mine = [outcome for outcome in outcomes if outcome.engine == engine]
        result[f"{engine}_solved_share"] = sum(o.last_success >= target and o.status == 0 for o in mine) / len(mine)
        result[f"{engine}_seconds_median"] = statistics.median(o.seconds for o in mine)
        result[f"{engine}_seconds_worst"] = max(o.seconds for o in mine)
        result[f"{engine}_seconds_worst_over_limit"] = max(o.seconds for o in mine) / limits_s[engine]
        result[f"{engine}_cpu_s_worst"] = max(o.cpu_s for o in mine)
        result[f"{engine}_first_reward_s_worst"] = max(o.first_reward_s for o in mine)
        result[f"{engine}_steps_median"] = statistics.median(o.steps for o in mine)
        fresh = [o.fresh["success"] for o in mine if o.fresh is not None]
        if fresh:
            result[f"{engine}_fresh_success_worst"] = min(fresh)
    return result


def draw_curves(path: Path, outcomes: list[Outcome], what: str) -> None:
    """One line a run, over seconds since the command's start."""
    curves = {f"{o.engine} seed {o.seed}": o.rewards if what == "reward" else o.evaluations for o in outcomes}
    draw(path, curves, "seconds", what)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--job", type=Path, default=JOB, help="job file (default: the quick start)")
    parser.add_argument("--engines", nargs="+", default=["torch", "vllm"], choices=["torch", "vllm"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed with the torch engine")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--curve", type=Path, help="draw the curves into this SVG file")
    parser.add_argument("--curve-of", choices=["reward", "success"], default="reward", help="what to draw")
    parser.add_argument("--limit-s", type=float, help="seconds a run may take (default: the quick start's)")
    parser.add_argument("--fresh", type=int, default=0, help="held-out tasks to play after each run (default: none)")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    arguments = parser.parse_intermixed_args(argv)
    engines, seeds = (["torch"], 1) if arguments.quick else (arguments.engines, arguments.seeds)
    limits_s = LIMIT_S if arguments.limit_s is None else dict.fromkeys(engines, arguments.limit_s)
    target = load(arguments.job, arguments.overrides).evaluation.target
    outcomes = []
    for seed in range(seeds):
        for engine in engines:
            which = (arguments.job, engine, seed, arguments.overrides)
            outcomes.append(run(*which, limit_s=limits_s[engine], fresh=arguments.fresh))
            print(table(outcomes[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if arguments.curve is not None:
        draw_curves(arguments.curve, outcomes, arguments.curve_of)
    command = "python -m benchmarks.learning " + " ".join(sys.argv[1:] if argv is None else argv)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    numbers = figures(outcomes, 1.0 if target is None else target, limits_s)
    report = {"figures": numbers, "command": command.strip(), "machine": machine}
    if arguments.json:
        print(json.dumps(report))
    else:
        print(table(outcomes))
        print("\n".join(f"{name:36} {value:8.2f}" for name, value in numbers.items()))
    return 0 if all(outcome.status == 0 for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
