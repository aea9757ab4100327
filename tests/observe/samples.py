"""Records for the tests, with values that can be told apart."""

from __future__ import annotations

from typing import Any

from coordinator.observe.records import EvalRecord, SampleRecord, StepRecord


def step(number: int, **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "step": number,
        "version": number,
        "elapsed_s": 2.0 * number,
        "reward_mean": 0.42,
        "reward_std": 0.5,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "reward_trend": 0.40,
        "success_rate": 0.42,
        "trajectories": 64,
        "tokens": 512,
        "tokens_per_s": 1840.4,
        "staleness_mean": 0.9,
        "staleness_max": 1,
        "in_flight": 64,
        "buffered": 12,
        "lost": {"stale": 2, "env_failed": 1},
        "loss": -0.03,
        "grad_norm": 0.7,
        "entropy": 1.2,
        "ratio_mean": 1.0,
        "kl_rollout": 0.001,
        "seconds": {"wait_batch": 0.9, "train": 0.8, "publish": 0.3},
        "turns_mean": 7.5,
    }
    return StepRecord(**(fields | changes))


def evaluation(version: int, **changes: Any) -> EvalRecord:
    fields: dict[str, Any] = {
        "version": version,
        "episodes": 8,
        "success": 0.625,
        "return_mean": 0.625,
        "turns_mean": 7.1,
    }
    return EvalRecord(**(fields | changes))


def sample(ticket: str, **changes: Any) -> SampleRecord:
    fields: dict[str, Any] = {
        "ticket": ticket,
        "version": 3,
        "reward": 1.0,
        "success": True,
        "transcript": [("observation", "S.\n.G"), ("action", "right")],
    }
    return SampleRecord(**(fields | changes))
