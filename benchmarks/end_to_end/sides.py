"""One measured run of a side: ours with the torch engine, ours with vLLM, or TRL's.

Invariant: every run has processes of its own, on the same cores, and is judged in the same way: the mean over the last
three quarters of its steps (with rollouts beside training a single step's time means nothing), and the moment when the
mean reward of the last ``SMOOTH`` steps first reached the target.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from actors.telemetry import Span
from benchmarks.end_to_end import task
from benchmarks.end_to_end.watching import Watched, watched
from coordinator.observe.lines import read_lines
from coordinator.observe.records import StepRecord, decode_metric

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900.0
SMOOTH = 4
SETTLING = 0.25
"""Share of the steps that is not counted: caches fill, allocators and, on our side, the pipeline."""

Side = Literal["torch", "vllm", "trl"]


class Measured(msgspec.Struct, frozen=True):
    """One run."""

    side: Side
    step_s: float
    cpu_step_s: float  # of all its processes
    reward_s: float  # to the target, from the first step's begin; NaN where it was not reached
    whole_reward_s: float  # the same from the command's start
    last_reward: float
    peak_memory_mb: float


def measure(side: Side, steps: int, seed: int, directory: Path) -> Measured:
    """Raises ``CommandFailed``."""
    directory.mkdir(parents=True, exist_ok=True)
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    log = directory / "output.log"
    if side == "trl":
        words = [sys.executable, "-m", "benchmarks.end_to_end.trl_side", str(steps), str(seed)]
        run = watched(words, environment=environment, timeout_s=TIMEOUT_S, log=log)
        begin, times, rewards = _from_trl(run)
    else:
        job = directory / "job.yaml"
        job.write_text(yaml.safe_dump(our_job(side, steps, seed)))
        words = [sys.executable, "-m", "benchmarks.end_to_end.ours", str(job), "--runs", str(directory / "runs")]
        run = watched(words, environment=environment, timeout_s=TIMEOUT_S, log=log)
        begin, times, rewards = _from_ours(directory / "runs" / "latest")
    return _judge(side, run, begin, times, rewards)


def our_job(engine: str, steps: int, seed: int) -> dict[str, object]:
    """The same task, policy, batch and optimiser as TRL's."""
    return {
        "name": "letters",
        "seed": seed,
        "policy": {"shape": {"layers": task.SHAPE.layers, "tied_embeddings": task.SHAPE.tied_embeddings}},
        "environment": {"name": "benchmarks.end_to_end.task:Letters", "max_turns": 1},
        "rollout": {
            "engine": engine,
            "temperature": 1.0,
            "max_tokens_per_turn": task.COMPLETION_TOKENS,
            "max_model_len": 64,
        },
        "train": {
            "steps": steps,
            "groups_per_step": task.GROUPS,
            "group_size": task.GROUP_SIZE,
            "learning_rate": task.LEARNING_RATE,
            "adam_beta1": task.ADAM_BETAS[0],
            "adam_beta2": task.ADAM_BETAS[1],
        },
        "evaluation": {"every": 0, "episodes": 0},
        "checkpoint": {"every": 0},
    }


def _from_trl(run: Watched) -> tuple[float, list[float], list[float]]:
    lines = [json.loads(line) for line in run.output.splitlines() if line.startswith('{"')]
    begin = next(line["begin"] for line in lines if "begin" in line)
    steps = [line for line in lines if "time" in line]
    return begin, [step["time"] for step in steps], [step["reward"] for step in steps]


def _from_ours(directory: Path) -> tuple[float, list[float], list[float]]:
    """It begins with the first token that an engine samples; a step ends when it is on record."""
    records = read_lines(directory / "metrics.jsonl", decode_metric).records
    steps = [record for record in records if isinstance(record, StepRecord)]
    epoch = (directory / "metrics.jsonl").stat().st_mtime - steps[-1].elapsed_s  # the last one is written at once
    spans = read_lines(directory / "timeline.jsonl", msgspec.json.Decoder(Span).decode).records
    begin = min(span.start for span in spans if span.kind == "generate")
    return begin, [epoch + step.elapsed_s for step in steps], [step.reward_mean for step in steps]


def _judge(side: Side, run: Watched, begin: float, times: list[float], rewards: list[float]) -> Measured:
    first = int(len(times) * SETTLING)
    count = len(times) - 1 - first
    means = [sum(rewards[i - SMOOTH : i]) / SMOOTH for i in range(SMOOTH, len(rewards) + 1)]
    reached = next((times[i + SMOOTH - 1] for i, mean in enumerate(means) if mean >= task.TARGET_REWARD), float("nan"))
    return Measured(
        side=side,
        step_s=(times[-1] - times[first]) / count,
        cpu_step_s=run.cpu_between(times[first], times[-1]) / count,
        reward_s=reached - begin,
        whole_reward_s=reached - run.started,
        last_reward=means[-1],
        peak_memory_mb=run.peak_memory_bytes / 1e6,
    )
