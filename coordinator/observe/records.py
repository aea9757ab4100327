"""What a run tells about itself, as typed records that other parts fill.

Invariant: a record written as JSON is valid JSON whatever the numbers were (NaN and infinity become ``null``), and
``decode_metric`` gives back the record that was written, with NaN where a number was not finite.

A run's ``metrics.jsonl`` holds ``StepRecord``, ``EvalRecord`` and ``ImitationRecord`` lines, told apart by
``"record"``; its ``timeline.jsonl`` holds ``Span`` lines, ``samples/index.jsonl`` holds ``SampleRecord`` lines.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="step"):
    """One optimiser step. Counts are of this step alone unless they say otherwise."""

    step: int  # 1 for the first
    version: int  # of the weights that this step produced
    elapsed_s: float  # wall time since the run started, in all its sittings
    reward_mean: float  # over the trajectories trained on
    reward_std: float
    reward_min: float
    reward_max: float
    reward_trend: float  # exponential moving average of reward_mean; see ``moving_average``
    success_rate: float  # 0 to 1, of the trajectories trained on
    trajectories: int  # trained on
    tokens: int  # trained on (sampled tokens, no prompts)
    tokens_per_s: float  # sampled by all engines, over the last steps
    staleness_mean: float  # versions between the learner and a trajectory's initiating version
    staleness_max: int
    in_flight: int  # trajectories running when the step ended
    buffered: int  # trajectories finished, not yet trained on
    lost: dict[str, int]  # by reason, since the run started
    loss: float
    grad_norm: float  # before clipping
    entropy: float  # nats a token
    ratio_mean: float  # trainer's probability over the rollout's
    kl_rollout: float  # nats a token
    seconds: dict[str, float]  # by phase: wait_batch, train, publish
    turns_mean: float
    environment: dict[str, float] = {}  # its own metrics, a trajectory's mean
    kl_reference: float = 0.0  # nats a token, of the policy to its reference; 0 without one
    clipped_fraction: float = 0.0  # of tokens, that the loss clipped
    truncated_fraction: float = 0.0  # of tokens, whose importance weight the correction cut or masked
    recomputed_fraction: float = 0.0  # of tokens, whose log-probabilities the trainer computed under their version
    kl_engine: float = 0.0  # nats a token of those: of the engines to the trainer, under one version
    value_loss: float = 0.0  # half the mean squared error of a critic; 0 without one
    clip_norm: float = 0.0  # the greatest norm of the gradient that was not clipped
    explained_variance: float = 0.0  # of the returns, by a critic: 1 is all of it


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="evaluation"):
    """One held-out evaluation."""

    version: int
    episodes: int
    success: float  # 0 to 1
    return_mean: float  # of the environment's own rewards, undiscounted
    turns_mean: float
    environment: dict[str, float] = {}  # its own metrics, an episode's mean
    fluctuation: float | None = None  # of the last 20; not known before there are as many (``coordinator.steadiness``)
    lowering: bool = False  # whether alpha falls because of it
    lowered_to: int = -1  # the alpha that it has brought about; -1: none


class ImitationRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="imitation"):
    """One optimiser step of imitation (``bin/sft``)."""

    step: int  # 1 for the first; 0 is the measurement before it
    version: int  # of the weights that this step produced
    epoch: int  # 1 for the first
    elapsed_s: float  # wall time since the run started, in all its sittings
    loss: float  # nats a trained-on token, before the step
    held_out_loss: float  # nats a token of the held-out demonstrations, after the step; NaN where not measured
    grad_norm: float  # before clipping
    entropy: float  # nats a token
    learning_rate: float
    demonstrations: int
    tokens: int  # trained on
    tokens_per_s: float


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that is kept for people to read."""

    ticket: str
    version: int  # its initiating version
    reward: float
    success: bool
    transcript: list[tuple[str, str]]  # ("observation" | "action", text), in order


MetricRecord = StepRecord | EvalRecord | ImitationRecord
_METRIC: msgspec.json.Decoder[MetricRecord] = msgspec.json.Decoder(MetricRecord)


def moving_average(previous: float | None, value: float, decay: float = 0.8) -> float:
    """The next ``reward_trend``; a value that is not finite leaves the average where it was."""
    if previous is None or not math.isfinite(previous):
        return value
    return decay * previous + (1.0 - decay) * value if math.isfinite(value) else previous


def decode_metric(line: bytes) -> MetricRecord:
    """Read one line of ``metrics.jsonl``. Raises ``msgspec.DecodeError`` or ``msgspec.ValidationError``."""
    try:
        return _METRIC.decode(line)
    except msgspec.ValidationError:  # perhaps only a number that was not finite
        record: MetricRecord = msgspec.convert(_null_to_nan(msgspec.json.decode(line)), MetricRecord)
        return record


def decode_sample(line: bytes) -> SampleRecord:
    """Read one line of ``samples/index.jsonl``; raises like ``decode_metric``."""
    return msgspec.convert(_null_to_nan(msgspec.json.decode(line)), SampleRecord)


def _null_to_nan(tree: Any) -> Any:
    if tree is None:
        return math.nan
    if isinstance(tree, dict):
        return {key: _null_to_nan(value) for key, value in tree.items()}
    return tree
