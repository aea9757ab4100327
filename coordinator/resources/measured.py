"""The mix of a run that has been played: what its trajectories really were, to plan hardware for more of them.

Invariant: read from what the run left behind (job, metrics, samples), nothing is started; what a run does not measure
(how long its environments take) is left at zero and said so in ``describe``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from actors.env.tokenizers import ByteTokenizer, HuggingFaceTokenizer, TokenizerError, load_tokenizer
from coordinator.job import Job, JobError, convert
from coordinator.observe.records import SampleRecord, StepRecord, decode_metric, decode_sample
from coordinator.observe.rundir import RunDirectory, RunDirectoryError
from coordinator.resources.mix import Mix, MixError, TaskShape
from hwprobe.cost import ModelSize

LATEST = 20
"""Steps, and samples, that are looked at: the last ones, since lengths change as a policy learns."""

LEFT_OUT = "the environment's own time is not measured: reset_s and step_s are 0"


def mix_of_run(path: Path) -> Mix:
    """Raises ``MixError``."""
    try:
        with RunDirectory.open(path) as directory:
            job = convert(directory.read_job(), str(directory.job_file), [])
            steps = [
                record
                for record in map(decode_metric, _lines(directory.path / "metrics.jsonl"))
                if isinstance(record, StepRecord)
            ][-LATEST:]
            samples = [decode_sample(line) for line in _lines(directory.path / "samples" / "index.jsonl")][-LATEST:]
            config = _config(job, directory.path)
            tokenizer = load_tokenizer(job.policy)
    except (RunDirectoryError, JobError, TokenizerError, msgspec.MsgspecError, OSError, ValueError) as error:
        raise MixError(f"{path}: cannot be read as a run: {error}") from None
    if not steps or not samples:
        raise MixError(f"{path}: expected a run with a training step and a sampled trajectory, found none")
    in_flight = (1 + job.scheduling.alpha) * job.train.groups_per_step * job.train.group_size
    return Mix(tasks={job.environment.name: _shape(steps, samples, tokenizer)}, model=config, in_flight=in_flight)


def _lines(path: Path) -> Iterable[bytes]:
    return path.read_bytes().splitlines()


def _shape(
    steps: list[StepRecord], samples: list[SampleRecord], tokenizer: ByteTokenizer | HuggingFaceTokenizer
) -> TaskShape:
    """Turns and sampled tokens from the metrics, which cover every trajectory; prompts from the samples."""
    turns = fmean(step.turns_mean for step in steps)
    sampled = fmean(step.tokens / step.trajectories for step in steps if step.trajectories)
    observed = [
        [len(tokenizer.encode(text)) for kind, text in sample.transcript if kind == "observation"] for sample in samples
    ]
    later = [tokens for trajectory in observed for tokens in trajectory[1:]]
    return TaskShape(
        turns=max(1.0, turns),
        prompt=max(1.0, fmean(trajectory[0] for trajectory in observed if trajectory)),
        observation=fmean(later) if later else 0.0,
        response=max(1.0, sampled / max(1.0, turns)),
    )


def _config(job: Job, run: Path) -> ModelSize:
    directory = Path(job.policy.path) if job.policy.path is not None else run / "policy"
    return model_size(json.loads((directory / "config.json").read_text(encoding="utf-8")))


def model_size(config: dict[str, Any]) -> ModelSize:
    """Of a decoder with grouped-query attention and SwiGLU (Qwen3, Qwen2, Llama), from its ``config.json``."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    feed_forward = 3 * hidden * config["intermediate_size"]
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelSize(
        parameters=float(layers * (attention + feed_forward) + embeddings),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
