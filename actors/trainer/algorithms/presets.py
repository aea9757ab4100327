"""The algorithms by name, with the values of the papers that describe them.

Invariant: a preset is data. What a job says itself (``train.clip_high`` ...) replaces that part, and what comes out has
been checked. What the parts compute, and where it is written down: ``estimators``, ``gigpo``, ``losses``,
``corrections``, ``aggregation``; docs/trainer.md has them in a table.

Two things are the same for all: there is one optimiser step a batch, and batches may be older than the policy. So a
correction that compares the trainer's own log-probabilities with the rollout's is what keeps stale trajectories in
check, and with ``correction: none`` it is the ratio of the loss, which is then over the policy that sampled.
"""

from __future__ import annotations

import msgspec

from actors.settings import AlgorithmName, TrainSettings
from actors.trainer.algorithms.algorithm import Algorithm, AlgorithmError, check

PPO = Algorithm(name="ppo", estimator="gae", correction="decoupled", gae_lambda=0.95)
"""Schulman et al., arXiv 1707.06347 and 1506.02438 (GAE): clipped surrogate over advantages from a critic."""

GRPO = Algorithm(name="grpo")
"""DeepSeekMath, arXiv 2402.03300: advantages relative to the group. Aggregated by token, as DAPO does (2503.14476),
not by response, and with a truncated importance weight (Yao et al. 2025)."""

DR_GRPO = Algorithm(name="dr_grpo", scale_advantages=False, aggregation="constant")
"""Liu et al., arXiv 2503.20783: GRPO without the two divisions that bias it, by the deviation and by the length."""

RLOO = Algorithm(name="rloo", estimator="rloo", loss="reinforce", aggregation="constant")
"""Ahmadian et al., arXiv 2402.14740: REINFORCE with the mean of the other members as baseline. The paper sums tokens of
a response; divided by a constant as here, that is the same direction."""

REINFORCE_PP = Algorithm(name="reinforce_pp", estimator="reinforce_pp")
"""Hu et al., arXiv 2501.03262: rewards normalised over the whole batch, clipped surrogate by token.
``train.estimator=reinforce_pp_baseline`` subtracts the group's mean first."""

DAPO = Algorithm(name="dapo", clip_high=0.28, overlong_share=0.2, dynamic_sampling=True)
"""Yu et al., arXiv 2503.14476: GRPO with a higher upper clip, by token, groups that score alike replaced, and answers
that come close to the longest allowed punished softly (4,096 of 20,480 tokens there)."""

GSPO = Algorithm(name="gspo", loss="gspo", correction="none", aggregation="sequence", clip_low=3e-4, clip_high=4e-4)
"""Zheng et al., arXiv 2507.18071: one ratio for a sequence, the geometric mean of its tokens' ratios."""

CISPO = Algorithm(name="cispo", loss="cispo", correction="none", clip_low=1.0, clip_high=4.0)
"""MiniMax-M1, arXiv 2506.13585: the ratio is a clipped weight, so no token loses its gradient. The paper gives no
number for the upper bound; 5 is that of TRL's documentation. There is no lower one."""

SAPO = Algorithm(name="sapo", loss="sapo", correction="none", aggregation="sequence")
"""Gao et al., arXiv 2511.20347: a smooth gate in place of clipping, steeper for negative advantages."""

TOPR = Algorithm(name="topr", loss="topr", correction="none", aggregation="constant", scale_advantages=False)
"""Le Roux et al., arXiv 2503.14286: sequences with a positive advantage are imitated, others weighed with
their ratio cut to [0, 1]. The group's mean is the baseline, where the paper has rewards of -1 and 1."""

GIGPO = Algorithm(name="gigpo", estimator="gigpo", gamma=0.95)
"""Feng et al., arXiv 2505.10978: beside the trajectory's advantage one of each turn, among turns of the group that
began in the same state. A turn's return is the trajectory's reward, discounted by the turns up to the end."""

DISTILLATION = Algorithm(name="distillation", estimator="distillation", loss="reinforce", correction="tis")
"""On-policy distillation: Agarwal et al., arXiv 2306.13649; per-token form: Lu et al. (Thinking Machines) 2025. Each
sampled token's advantage is log teacher - log policy: the gradient of KL(policy || teacher), token by token. Rewards do
not count."""

PRESETS: dict[AlgorithmName, Algorithm] = {
    "ppo": PPO,
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "rloo": RLOO,
    "reinforce_pp": REINFORCE_PP,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "topr": TOPR,
    "gigpo": GIGPO,
    "distillation": DISTILLATION,
}

_OWN = tuple(field for field in Algorithm.__struct_fields__ if field not in ("name", "length"))


def resolve(settings: TrainSettings, stream: str = "") -> Algorithm:
    """What trains trajectories of ``stream``. Raises ``AlgorithmError``."""
    preset = PRESETS[settings.algorithms.get(stream, settings.algorithm)]
    own = {key: getattr(settings, key) for key in _OWN if getattr(settings, key) is not None}
    length = 0 if settings.length == "auto" else settings.length
    algorithm = msgspec.structs.replace(preset, length=length, **own)
    check(algorithm)
    return algorithm


def all_of(settings: TrainSettings) -> list[Algorithm]:
    """Every algorithm that the settings ask for, the one for streams that name none first. Raises ``AlgorithmError``,
    also for what only the settings together can tell."""
    algorithms = [resolve(settings, stream) for stream in ("", *settings.algorithms)]
    for algorithm in algorithms:
        if algorithm.needs_reference and settings.reference is None:
            raise AlgorithmError(
                f"reference: {algorithm.name} compares with a reference; expected initial or a model directory"
            )
        if settings.group_size < algorithm.least_members:
            raise AlgorithmError(
                f"group_size: {algorithm.name} compares the members of a group; expected {algorithm.least_members} or "
                f"more, found {settings.group_size}"
            )
        if algorithm.needs_values and settings.backend != "torch":
            raise AlgorithmError(
                f"estimator: gae (of {algorithm.name}) needs a critic, which only the torch backend has; train.backend "
                f"is {settings.backend}"
            )
    if settings.reference is not None and settings.backend != "torch":
        raise AlgorithmError(f"reference: only the torch backend keeps one, train.backend is {settings.backend}")
    return algorithms
