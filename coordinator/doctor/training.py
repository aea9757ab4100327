"""A run whose evaluations go up and down: what of its own records explains it.

Invariant: what is judged are the last ``EVALUATIONS`` evaluations and the steps between them, as the run wrote them.
What climbs is not called unsteady, nor what so few episodes do by chance; then the causes are looked at in their order:
staleness, rewards that are no numbers, clipping.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.trainer.algorithms.presets import PRESETS
from coordinator.observe.lines import each_line
from coordinator.observe.records import EvalRecord, StepRecord, decode_metric
from coordinator.observe.rundir import RunDirectory, RunDirectoryError
from coordinator.scheduling.journal import Losses, read_losses
from hwprobe.doctor import Examined, Unable

EVALUATIONS = 20
MOST = 0.15
BEYOND_CHANCE = 30.14 / 19
"""The variance of 20 evaluations over that of chance alone which it exceeds once in twenty times (chi squared, 19)."""

MOST_STEPS = 10_000
USUAL_ALPHA = 1
WIDE_CLIP = 0.3
CLIP_BITES = 0.2**2 / 2
"""Nats a token, of a policy whose probabilities are 0.2 off on average: a clip of 0.2 would cut some of them."""

SPIKE = 5.0
NOT_A_NUMBER = "finite number"  # actors.env.returned and actors.env.settling, of a reward


class Facts(msgspec.Struct, frozen=True):
    """What a run says of itself."""

    evaluations: Sequence[EvalRecord]  # the last ones
    steps: Sequence[StepRecord]  # since the first of those
    losses: Losses
    job: dict[str, Any]


class Unsteadiness(msgspec.Struct, frozen=True):
    """Of a figure over several evaluations."""

    figure: str
    mean: float
    share: float  # standard deviation over the mean
    about_the_trend: float  # the same, of what a straight line leaves
    by_chance: float | None  # the same, of that many episodes with one and the same policy; None where it is not known


def look(run: Path | None) -> Examined:
    """Raises ``Unable`` where there is no run, or too little of it."""
    if run is None:
        raise Unable("no run was named")
    return judge(read(run))


def read(run: Path) -> Facts:
    """Raises ``Unable``."""
    try:
        directory = RunDirectory.open(run)
        job = directory.read_job()
    except RunDirectoryError as error:
        raise Unable(str(error)) from None
    evaluations: deque[EvalRecord] = deque(maxlen=EVALUATIONS)
    steps: deque[StepRecord] = deque(maxlen=MOST_STEPS)
    for record in each_line(directory.metrics, decode_metric, lambda: None):
        if isinstance(record, EvalRecord):
            evaluations.append(record)
        elif isinstance(record, StepRecord):
            steps.append(record)
    first = evaluations[0].version if evaluations else 0
    since = [step for step in steps if step.version >= first]
    return Facts(list(evaluations), since, read_losses(directory.ledger), job)


def judge(facts: Facts) -> Examined:
    """Raises ``Unable`` for fewer than ``EVALUATIONS`` evaluations."""
    if len(facts.evaluations) < EVALUATIONS:
        raise Unable(f"it takes {EVALUATIONS} evaluations, the run has {len(facts.evaluations)}")
    examined = Examined()
    found = unsteadiness(facts.evaluations)
    if found is None:
        examined.note(f"the last {EVALUATIONS} evaluations have a mean of 0")
        return examined
    said = f"{found.figure} {found.mean:.3g} +- {100 * found.share:.0f}% over {EVALUATIONS} evaluations"
    if found.share <= MOST:
        examined.note(said)
    elif found.about_the_trend <= MOST:
        examined.note(f"{said}, and {100 * found.about_the_trend:.0f}% about its trend: it moves, but not up and down")
    elif found.by_chance is not None and found.about_the_trend**2 <= BEYOND_CHANCE * found.by_chance**2:
        episodes = facts.evaluations[-1].episodes
        examined.note(f"{said}: no more than chance does with {episodes} episodes (evaluation.episodes)")
    else:
        _explain(facts, f"{said}, expected at most {100 * MOST:.0f}%", examined)
    return examined


def unsteadiness(evaluations: Sequence[EvalRecord]) -> Unsteadiness | None:
    """Of the success rate where there is any success, else of the mean return; None where the mean is 0."""
    figure = "success" if any(evaluation.success > 0 for evaluation in evaluations) else "return_mean"
    values = np.array([getattr(evaluation, figure) for evaluation in evaluations], np.float64)
    mean = float(values.mean())
    if not math.isfinite(mean) or abs(mean) < 1e-9:
        return None
    places = np.arange(len(values))
    left = values - np.polyval(np.polyfit(places, values, 1), places)
    chance = None
    if figure == "success":
        episodes = float(np.mean([max(1, evaluation.episodes) for evaluation in evaluations]))
        chance = math.sqrt(mean * (1 - mean) / episodes) / mean
    return Unsteadiness(figure, mean, float(values.std()) / abs(mean), float(left.std()) / abs(mean), chance)


def _explain(facts: Facts, evidence: str, examined: Examined) -> None:
    """The first cause that the records bear out."""
    for why in (_staleness, _no_numbers, _clipping):
        if (found := why(facts)) is not None:
            seen, cause, remedy = found
            examined.warning("evaluations", f"{evidence}; {seen}", cause, remedy)
            return
    rate = _setting(facts.job, "train", "learning_rate", math.nan)
    examined.warning(
        "evaluations",
        f"{evidence}; staleness, rewards and clipping are as usual",
        f"steps are too large, or too noisy (train.learning_rate={rate:g}, {_batch(facts.job)} trajectories a step)",
        "halve train.learning_rate, or double train.groups_per_step",
    )


def _staleness(facts: Facts) -> tuple[str, str, str] | None:
    alpha = int(_setting(facts.job, "scheduling", "alpha", USUAL_ALPHA))
    oldest = max((step.staleness_max for step in facts.steps), default=0)
    if alpha <= USUAL_ALPHA or oldest <= USUAL_ALPHA:
        return None
    mean = float(np.mean([step.staleness_mean for step in facts.steps]))
    seen = f"scheduling.alpha is {alpha}, trajectories were up to {oldest} versions old, {mean:.1f} on average"
    return seen, "steps learn from what older policies did", f"scheduling.alpha={USUAL_ALPHA}, or 0"


def _no_numbers(facts: Facts) -> tuple[str, str, str] | None:
    lost = facts.losses.counts.get("reward_failed", 0)
    detail = facts.losses.details.get("reward_failed", "")
    broken = sum(not math.isfinite(step.reward_mean) for step in facts.steps)
    if not broken and not (lost and NOT_A_NUMBER in detail):
        return None
    name = facts.job.get("reward", {}).get("function", "environment")
    seen = f"{lost} trajectories were lost as reward_failed, the last: {detail[:160]}" if lost else f"{broken} steps"
    return (
        seen,
        "rewards that are no numbers take trajectories out of their groups, and not at random",
        f"make {name} return a number for whatever it is given; bin/replay names the first that did not",
    )


def _clipping(facts: Facts) -> tuple[str, str, str] | None:
    low, high = (float(_setting(facts.job, "train", name, 0.2)) for name in ("clip_low", "clip_high"))
    away = max((step.kl_rollout for step in facts.steps if math.isfinite(step.kl_rollout)), default=0.0)
    if max(low, high) > WIDE_CLIP and away > CLIP_BITES and _clips(facts.job):
        return (
            f"train.clip_low is {low:g}, train.clip_high {high:g}, the policy was up to {away:.2g} nats a token away "
            "from the one that sampled",
            "one step may move a token's probability far away from what it was sampled with",
            "train.clip_low=0.2 train.clip_high=0.2",
        )
    norms = [step.grad_norm for step in facts.steps if math.isfinite(step.grad_norm)]
    limit = float(_setting(facts.job, "train", "max_grad_norm", 1.0))
    usual = float(np.median(norms)) if norms else 0.0
    if not usual or max(norms) <= SPIKE * usual or limit < 2 * usual:
        return None
    return (
        f"gradients are {usual:.3g} long as a rule and up to {max(norms):.3g}, train.max_grad_norm is {limit:g}",
        "single steps are many times as large as the others, and are clipped too late",
        f"train.max_grad_norm={2 * usual:.2g}",
    )


def _clips(job: dict[str, Any]) -> bool:
    """Whether the loss's ratio can leave 1: with one optimiser step a batch, only over the policy that sampled."""
    train = job.get("train") or {}
    correction = train.get("correction")
    if correction is None:
        preset = PRESETS.get(train.get("algorithm", "grpo"))
        correction = preset.correction if preset is not None else "none"
    return bool(correction == "none")


def _setting(job: dict[str, Any], section: str, name: str, otherwise: float) -> float:
    value = (job.get(section) or {}).get(name, otherwise)
    return float(value) if isinstance(value, int | float) else otherwise


def _batch(job: dict[str, Any]) -> int:
    return int(_setting(job, "train", "groups_per_step", 8) * _setting(job, "train", "group_size", 8))
