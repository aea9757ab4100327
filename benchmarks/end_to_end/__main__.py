"""How fast we train beside TRL's ``GRPOTrainer``, and how much our vLLM engine loses beside a bare one.

    python -m benchmarks.end_to_end                3 rounds: ours with the torch engine, TRL, ours with vLLM; throughput
    python -m benchmarks.end_to_end --quick        one short round: the torch engine and TRL
    python -m benchmarks.end_to_end --json         one JSON object

Both sides train the same 0.85-million-parameter Qwen3 from the same random weights on the same task with the same batch
(4 prompts, 8 answers each, 32 tokens an answer), optimiser and clipping, in float32, without a reference model, on two
cores. Ours is a whole run: control process, engine, environment worker and trainer, each a process of its own, rollouts
beside training (alpha 1), durable store and receipts included. TRL has its fastest simple settings (``trl_side``),
among them the number of torch threads that is faster here and now.

Every measured run starts processes of its own, the sides alternate within a round, and a figure "vs" is the median of
the rounds' ratios, so that what else the machine does falls on both. ``cpu_seconds_per_step_vs_trl`` is the same ratio
in CPU time of all processes, which other load disturbs least.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.end_to_end.sides import Measured, Side, measure
from benchmarks.end_to_end.watching import CommandFailed

CORES = 2
TARGETS = {
    "seconds_per_step_vs_trl": "<= 0.7",
    "seconds_per_step_vs_trl_vllm": "<= 1.2",
    "time_to_reward_vs_trl": "< 1",
    "throughput_vs_bare_vllm": ">= 0.9",
}


def figures(rounds: list[dict[Side, Measured]]) -> dict[str, float]:
    """Medians over the rounds; what was not reached or not measured is absent."""
    result: dict[str, float] = {}

    def add(name: str, values: list[float]) -> None:
        known = [value for value in values if math.isfinite(value)]
        if known:
            result[name] = statistics.median(known)

    sides: list[tuple[Side, str]] = [("torch", ""), ("vllm", "_vllm")]
    for side, suffix in sides:
        pairs = [(one[side], one["trl"]) for one in rounds if side in one]
        add(f"seconds_per_step_vs_trl{suffix}", [ours.step_s / trl.step_s for ours, trl in pairs])
        add(f"cpu_seconds_per_step_vs_trl{suffix}", [ours.cpu_step_s / trl.cpu_step_s for ours, trl in pairs])
        add(f"time_to_reward_vs_trl{suffix}", [ours.reward_s / trl.reward_s for ours, trl in pairs])
        add(f"whole_time_to_reward_vs_trl{suffix}", [o.whole_reward_s / trl.whole_reward_s for o, trl in pairs])
        add(f"peak_memory_mb{suffix}", [ours.peak_memory_mb for ours, _ in pairs])
        add(f"seconds_per_step{suffix}", [ours.step_s for ours, _ in pairs])
    add("peak_memory_mb_trl", [one["trl"].peak_memory_mb for one in rounds])
    add("seconds_per_step_trl", [one["trl"].step_s for one in rounds])
    return result


def table(rounds: list[dict[Side, Measured]]) -> str:
    """For people."""
    lines = ["round  side   s/step  CPU s/step  s to reward  from the start  reward    MB"]
    lines += [
        f"{number:5}  {one.side:5}  {one.step_s:6.3f}  {one.cpu_step_s:10.3f}  {one.reward_s:11.1f}  "
        f"{one.whole_reward_s:14.1f}  {one.last_reward:6.2f}  {one.peak_memory_mb:4.0f}"
        for number, sides in enumerate(rounds, 1)
        for one in sides.values()
    ]
    return "\n".join(lines)


def two_cores() -> str:
    """Keep this process and all it starts on two cores; says on which kind of machine, under what load."""
    count = os.cpu_count()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    return f"{platform.machine()}, {CORES} of {count} cores, load average {os.getloadavg()[0]:.1f} before"


def run(rounds: int, steps: int, order: list[Side], base: Path) -> list[dict[Side, Measured]]:
    """All training runs; every other round in the opposite order."""
    results: list[dict[Side, Measured]] = []
    for number in range(rounds):
        results.append({})
        for side in order if number % 2 == 0 else order[::-1]:
            results[-1][side] = measure(side, steps, number, base / f"{number}-{side}")
            print(table([{side: results[-1][side]}]).splitlines()[-1], file=sys.stderr, flush=True)
    return results


def missing() -> dict[str, str]:
    """What cannot be measured here, and what to do about it."""
    found = {}
    if importlib.util.find_spec("trl") is None:
        found["trl"] = "trl is not installed: bin/setup --dev, or pip install 'rollart[bench]'"
    if importlib.util.find_spec("vllm") is None:
        found["vllm"] = "vllm is not installed: bin/setup without --light"
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.end_to_end", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--quick", action="store_true", help="one round of 24 steps with the torch engine")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    absent = missing()
    for why in absent.values():
        print(why, file=sys.stderr)
    if "trl" in absent:
        return 2
    with_vllm = "vllm" not in absent and not arguments.quick
    order: list[Side] = ["torch", "trl", "vllm"] if with_vllm else ["torch", "trl"]
    rounds, steps = (1, 24) if arguments.quick else (arguments.rounds, arguments.steps)
    machine = two_cores()
    with tempfile.TemporaryDirectory(prefix="rollart-benchmark-") as base:
        try:
            results = run(rounds, steps, order, Path(base))
            found = figures(results)
            if with_vllm:
                from benchmarks.end_to_end.serving import measure as throughput  # noqa: PLC0415

                shares = throughput(3 * rounds, Path(base) / "serving").shares
                found["throughput_vs_bare_vllm"] = shares["pair"]
                found["throughput_vs_bare_vllm_in_process"] = shares["direct"]
                found["throughput_vs_vllm_client"] = shares["client"]
        except CommandFailed as error:
            print(error, file=sys.stderr)
            return 1
    command = "python -m benchmarks.end_to_end " + " ".join(sys.argv[1:] if argv is None else argv)
    if arguments.json:
        print(json.dumps({"figures": found, "command": command.strip(), "machine": machine, "missing": absent}))
        return 0
    print(table(results))
    print(f"\n{machine}")
    print("\n".join(f"{name:36} {value:9.3f}  {TARGETS.get(name, '')}".rstrip() for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
