"""What several runs have in common and where they differ: curves, outcomes and settings as plain numbers.

Invariant: a figure is the run's own or there is none (NaN): nothing is interpolated, and a run that was cut short, is
still going on or has unreadable lines is compared by what it has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from coordinator.observe.lines import read_lines
from coordinator.observe.records import EvalRecord, ImitationRecord, MetricRecord, StepRecord, decode_metric
from coordinator.observe.rundir import RunDirectory, RunDirectoryError
from coordinator.scheduling.journal import read_losses

T = TypeVar("T", StepRecord, EvalRecord, ImitationRecord)
NAN = math.nan


class ComparisonError(ValueError):
    """Runs that cannot be compared as asked; one line for the user."""


class Reading(NamedTuple):
    """One value of a curve."""

    version: int
    elapsed_s: float  # NaN where nothing says when it was
    value: float


class ComparedRun(msgspec.Struct, frozen=True):
    """All that a comparison needs of a run."""

    label: str  # "A", "B", ...: what tables and charts call it
    name: str
    path: Path
    job: dict[str, Any]
    steps: Sequence[StepRecord]
    evaluations: Sequence[EvalRecord]
    imitation: Sequence[ImitationRecord]
    lost: Mapping[str, int]  # by reason
    unreadable: int  # lines of metrics.jsonl


def read_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Two runs or more, labelled in their order. Raises ``ComparisonError`` or ``RunDirectoryError``."""
    if len(paths) < 2:
        raise ComparisonError(f"expected two or more run directories to compare, found {len(paths)}")
    directories = [RunDirectory.open(path) for path in paths]
    seen: dict[Path, Path] = {}
    for path, directory in zip(paths, directories, strict=True):
        if directory.path in seen:
            raise ComparisonError(f"{path}: the same run as {seen[directory.path]}; name each run once")
        seen[directory.path] = path
    return [_read(letters(index), directory) for index, directory in enumerate(directories)]


def _read(label: str, directory: RunDirectory) -> ComparedRun:
    try:
        metrics = read_lines(directory.metrics, decode_metric)
        lost = read_losses(directory.ledger).counts
    except (OSError, msgspec.MsgspecError) as error:
        raise RunDirectoryError(f"{directory.path}: its records cannot be read: {error}") from None
    steps = _of(metrics.records, StepRecord)
    return ComparedRun(
        label=label,
        name=directory.path.name,
        path=directory.path,
        job=directory.read_job(),
        steps=steps,
        evaluations=_of(metrics.records, EvalRecord),
        imitation=_of(metrics.records, ImitationRecord),
        lost=lost or (steps[-1].lost if steps else {}),
        unreadable=metrics.unreadable,
    )


def _of(records: Iterable[MetricRecord], kind: type[T]) -> list[T]:
    return [record for record in records if isinstance(record, kind)]


def letters(index: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    label = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        label = chr(ord("A") + rest) + label
    return label


# ---- curves ---------------------------------------------------------------------------------------------------------

STEP_CURVES: dict[str, Callable[[StepRecord], float]] = {
    "Reward, mean of a step": lambda record: record.reward_mean,
    "Reward, trend": lambda record: record.reward_trend,
    "Success, training": lambda record: record.success_rate,
    "Loss": lambda record: record.loss,
    "Entropy, nats a token": lambda record: record.entropy,
    "Gradient norm": lambda record: record.grad_norm,
    "KL to the rollout, nats a token": lambda record: record.kl_rollout,
    "Tokens/s sampled": lambda record: record.tokens_per_s,
    "Turns a trajectory": lambda record: record.turns_mean,
    "Staleness, versions": lambda record: record.staleness_mean,
}

EVALUATION_CURVES: dict[str, Callable[[EvalRecord], float]] = {
    "Success, evaluation": lambda record: record.success,
    "Return, evaluation": lambda record: record.return_mean,
}

IMITATION_CURVES: dict[str, Callable[[ImitationRecord], float]] = {
    "Imitation, held-out loss": lambda record: record.held_out_loss,
    "Imitation, loss": lambda record: record.loss,
    "Imitation, entropy": lambda record: record.entropy,
    "Imitation, tokens/s": lambda record: record.tokens_per_s,
}


def curves(run: ComparedRun) -> dict[str, list[Reading]]:
    """Title -> readings, in the order in which a page shows them; a curve without a finite value is left out."""
    found: dict[str, list[Reading]] = {}
    times = {record.version: record.elapsed_s for record in run.steps}
    times.setdefault(0, 0.0)  # what is evaluated before the first step
    for title, evaluated in EVALUATION_CURVES.items():
        found[title] = [
            Reading(record.version, times.get(record.version, NAN), evaluated(record)) for record in run.evaluations
        ]
    for title, stepped in STEP_CURVES.items():
        found[title] = [Reading(record.version, record.elapsed_s, stepped(record)) for record in run.steps]
    for name in _names(run.evaluations):
        found[f"Environment, {name}, evaluation"] = [
            Reading(record.version, times.get(record.version, NAN), record.environment.get(name, NAN))
            for record in run.evaluations
        ]
    for name in _names(run.steps):
        found[f"Environment, {name}"] = [
            Reading(record.version, record.elapsed_s, record.environment.get(name, NAN)) for record in run.steps
        ]
    found["Seconds a step"] = _paces(run.steps)
    for phase in sorted({phase for record in run.steps for phase in record.seconds}):
        found[f"Seconds a step, {phase}"] = [
            Reading(record.version, record.elapsed_s, record.seconds.get(phase, NAN)) for record in run.steps
        ]
    for title, imitated in IMITATION_CURVES.items():
        found[title] = [Reading(record.version, record.elapsed_s, imitated(record)) for record in run.imitation]
    return {title: each for title, each in found.items() if any(math.isfinite(reading.value) for reading in each)}


def _names(records: Sequence[StepRecord] | Sequence[EvalRecord]) -> list[str]:
    """Of the environment's own metrics."""
    return sorted({name for record in records for name in record.environment})


def _paces(steps: Sequence[StepRecord]) -> list[Reading]:
    """From the end of one step to the end of the next: all that a step takes, evaluations and waiting included."""
    return [
        Reading(now.version, now.elapsed_s, now.elapsed_s - before.elapsed_s)
        for before, now in pairwise(steps)
        if now.step == before.step + 1
    ]


# ---- outcomes -------------------------------------------------------------------------------------------------------


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run; NaN where it has no such figure."""

    steps: int
    seconds: float  # wall time to the last step, in all sittings
    seconds_per_step: float  # from the end of the first step to the end of the last
    success_last: float  # of the last evaluation
    success_best: float
    success_best_version: int | None  # the first one that reached it
    success_training: float  # of the last step
    reward_trend: float  # at the last step
    loss: float  # of the last step
    entropy: float  # of the last step
    tokens_per_s: float  # mean over the steps
    trajectories: int  # trained on
    tokens: int  # trained on
    lost: int  # trajectories
    held_out_loss_last: float  # of imitation
    held_out_loss_best: float


BETTER: dict[str, Callable[[Iterable[float]], float]] = {
    "success_last": max,
    "success_best": max,
    "success_training": max,
    "reward_trend": max,
    "tokens_per_s": max,
    "seconds_per_step": min,
    "held_out_loss_last": min,
    "held_out_loss_best": min,
}
"""Figures of which one end is better whatever the job; a policy's loss and entropy are not among them."""


def outcome(run: ComparedRun) -> Outcome:
    """The figures of a run."""
    records = run.steps or run.imitation
    first, last = (records[0], records[-1]) if records else (None, None)
    step = run.steps[-1] if run.steps else None
    best = max(run.evaluations, key=lambda record: record.success, default=None)
    held_out = [record.held_out_loss for record in run.imitation if math.isfinite(record.held_out_loss)]
    imitated = run.imitation[-1] if run.imitation else None
    either = step or imitated
    return Outcome(
        steps=last.step if last else 0,
        seconds=last.elapsed_s if last else NAN,
        seconds_per_step=(last.elapsed_s - first.elapsed_s) / (last.step - first.step)
        if first and last and last.step > first.step
        else NAN,
        success_last=run.evaluations[-1].success if run.evaluations else NAN,
        success_best=best.success if best else NAN,
        success_best_version=best.version if best else None,
        success_training=step.success_rate if step else NAN,
        reward_trend=step.reward_trend if step else NAN,
        loss=either.loss if either else NAN,
        entropy=either.entropy if either else NAN,
        tokens_per_s=_mean([record.tokens_per_s for record in run.steps or run.imitation[1:]]),
        trajectories=sum(record.trajectories for record in run.steps),
        tokens=sum(record.tokens for record in records),
        lost=sum(run.lost.values()),
        held_out_loss_last=held_out[-1] if held_out else NAN,
        held_out_loss_best=min(held_out, default=NAN),
    )


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else NAN


def best_of(field: str, outcomes: Sequence[Outcome]) -> float:
    """The best value of a figure; NaN where none is better than another."""
    if field not in BETTER:
        return NAN
    finite = [value for each in outcomes if math.isfinite(value := getattr(each, field))]
    return BETTER[field](finite) if len(set(finite)) > 1 else NAN


# ---- settings -------------------------------------------------------------------------------------------------------

ABSENT = "(not set)"


def differences(jobs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """(settings that differ: the value of each job, settings that all share), by dotted key in the jobs' order."""
    flat = [flattened(job) for job in jobs]
    keys = list(dict.fromkeys(key for each in flat for key in each))
    rows = {key: [each.get(key, ABSENT) for each in flat] for key in keys}
    differing = {key: values for key, values in rows.items() if len(set(values)) > 1}
    return differing, {key: values[0] for key, values in rows.items() if key not in differing}


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key -> value as a person writes it."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat
