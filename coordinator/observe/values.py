"""A record as named numbers, the same names for every tracker.

Invariant: what is not finite is left out, so that no tracker meets a NaN.
"""

from __future__ import annotations

import math

from coordinator.observe.records import EvalRecord, ImitationRecord, MetricRecord, StepRecord

STEP_TAGS = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "reward_min": "reward/min",
    "reward_max": "reward/max",
    "reward_trend": "reward/trend",
    "success_rate": "success/training",
    "turns_mean": "rollout/turns",
    "tokens_per_s": "rollout/tokens_per_s",
    "staleness_mean": "rollout/staleness_mean",
    "staleness_max": "rollout/staleness_max",
    "in_flight": "rollout/in_flight",
    "buffered": "rollout/buffered",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "clip_norm": "train/clip_norm",
    "entropy": "train/entropy",
    "ratio_mean": "train/ratio_mean",
    "kl_rollout": "train/kl_rollout",
    "kl_reference": "train/kl_reference",
    "clipped_fraction": "train/clipped_fraction",
    "truncated_fraction": "train/truncated_fraction",
    "kl_engine": "train/kl_engine",
    "recomputed_fraction": "train/recomputed_fraction",
    "value_loss": "train/value_loss",
    "explained_variance": "train/explained_variance",
    "tokens": "train/tokens",
    "trajectories": "train/trajectories",
}
"""Field of ``StepRecord`` -> tag; ``lost``, ``seconds`` and ``environment`` become one tag for each key."""

EVAL_TAGS = {
    "success": "success/evaluation",
    "return_mean": "evaluation/return_mean",
    "turns_mean": "evaluation/turns",
}


IMITATION_TAGS = {
    "loss": "sft/loss",
    "held_out_loss": "sft/held_out_loss",
    "grad_norm": "sft/grad_norm",
    "entropy": "sft/entropy",
    "learning_rate": "sft/learning_rate",
    "tokens_per_s": "sft/tokens_per_s",
}


def step_values(record: StepRecord) -> dict[str, float]:
    """Tag -> value of one step."""
    values = _tagged(record, STEP_TAGS)
    values |= {f"lost/{reason}": float(count) for reason, count in record.lost.items()}
    values |= {f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()}
    values |= {f"environment/{name}": mean for name, mean in record.environment.items()}
    return _finite(values)


def evaluation_values(record: EvalRecord) -> dict[str, float]:
    """Tag -> value of one evaluation."""
    values = _tagged(record, EVAL_TAGS)
    if record.fluctuation is not None:
        values["evaluation/fluctuation"] = record.fluctuation
    values |= {f"evaluation/environment/{name}": mean for name, mean in record.environment.items()}
    return _finite(values)


def imitation_values(record: ImitationRecord) -> dict[str, float]:
    """Tag -> value of one step of imitation."""
    return _finite(_tagged(record, IMITATION_TAGS))


def _tagged(record: MetricRecord, tags: dict[str, str]) -> dict[str, float]:
    return {tag: float(getattr(record, field)) for field, tag in tags.items()}


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {tag: value for tag, value in values.items() if math.isfinite(value)}
