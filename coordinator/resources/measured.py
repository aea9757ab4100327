"""The mix of a run that has been played: what its trajectories really were, to plan hardware for more of them.

Invariant: read from what the run left behind, nothing is started. Where it has kept its cost model (``cost.json``), the
tasks are as that has measured them, and classes reach what they reached; else turns and tokens come from metrics and
samples, and what those do not tell (how long environments take) is left at zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import msgspec

from actors.env.tokenizers import ByteTokenizer, HuggingFaceTokenizer, TokenizerError, load_tokenizer
from coordinator.job import Job, JobError, convert
from coordinator.observe.records import SampleRecord, StepRecord, decode_metric, decode_sample
from coordinator.observe.rundir import RunDirectory, RunDirectoryError
from coordinator.resources.mapper import COST_FILE
from coordinator.resources.mix import Mix, MixError
from hwprobe.cost import Efficiency, ModelSize, model_size
from hwprobe.costmodel import CostModel, decode_state
from hwprobe.flow import TaskShape
from hwprobe.roofline import lookup_class

LATEST = 20
"""Steps, and samples, that are looked at: the last ones, since lengths change as a policy learns."""

ENOUGH = 20
"""Reports from which on what a class reaches is taken for measured."""

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
            kept = _kept(directory.path)
            tokenizer = load_tokenizer(job.policy)
    except (RunDirectoryError, JobError, TokenizerError, msgspec.MsgspecError, OSError, KeyError, ValueError) as error:
        raise MixError(f"{path}: cannot be read as a run: {error}") from None
    if not steps or not samples:
        raise MixError(f"{path}: expected a run with a training step and a sampled trajectory, found none")
    in_flight = (1 + job.scheduling.alpha) * job.train.groups_per_step * job.train.group_size
    tasks = {} if kept is None else kept.shapes()
    tasks = tasks or {job.environment.name: _shape(steps, samples, tokenizer)}
    return Mix(tasks=tasks, model=config, in_flight=in_flight, efficiency={} if kept is None else _reached(kept))


def _kept(run: Path) -> CostModel | None:
    """Raises ``CostStateRefused``."""
    file = run / COST_FILE
    return CostModel(decode_state(file.read_bytes(), str(file))) if file.is_file() else None


def _reached(model: CostModel) -> dict[str, Efficiency]:
    """Of the classes with a data sheet: for others there is nothing that an efficiency would be a share of."""
    classes = model.state().classes
    return {name: f.reached() for name, f in classes.items() if f.reports >= ENOUGH and lookup_class(name) is not None}


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
