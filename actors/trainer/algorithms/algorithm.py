"""An algorithm as the parts that it is composed of.

Invariant: every value of an ``Algorithm`` is settled (``presets.resolve`` has applied the job's own keys to a preset),
and ``check`` has found no two parts that contradict each other.

    estimator    rewards -> advantages of trajectories, or of single tokens (``estimators``, ``gigpo``)
    loss         log-probabilities and advantages -> a loss of each sampled token (``losses``)
    correction   what a token counts whose engine did not sample as the trainer would (``corrections``)
    aggregation  weights of tokens in the batch's loss (``aggregation``)

Importable without torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.settings import Aggregation, Correction, Estimator, PolicyLoss


class AlgorithmError(ValueError):
    """Parts that do not go together; begins with the key that is wrong."""


class Algorithm(msgspec.Struct, frozen=True, kw_only=True):
    """See the module docstring. Field names are keys of ``train``."""

    name: str
    estimator: Estimator = "grpo"
    loss: PolicyLoss = "clip"
    correction: Correction = "tis"
    aggregation: Aggregation = "token"
    scale_advantages: bool = True  # divide by the group's standard deviation
    advantage_epsilon: float = 1e-6  # added to that deviation
    clip_low: float = 0.2  # ratios are clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    tis_cap: float = 2.0  # of the importance weight between trainer and rollout
    mask_low: float = 0.5  # icepop, sequence_mask: weights outside of [mask_low, mask_high] count as 0
    mask_high: float = 5.0
    off_policy_kl: float = 0.0  # segments with a negative advantage that are further than this from the policy that
    # sampled them (nats per token) do not count; 0 is off
    sapo_positive: float = 1.0  # temperature of the gate for advantages above 0
    sapo_negative: float = 1.05  # ... for the others
    gamma: float = 1.0  # discount of a turn (gigpo) or a token (gae)
    gae_lambda: float = 1.0
    step_weight: float = 1.0  # gigpo: of the advantage of a turn beside that of its trajectory
    kl: Literal["k1", "k2", "k3"] = "k3"  # KL(policy || reference); k1 in the advantages, else in the loss
    kl_coefficient: float = 0.0
    overlong_share: float = 0.0  # last part of ``length`` in which the reward falls linearly; 0 is off
    overlong_penalty: float = 1.0  # by how much, at ``length``
    dynamic_sampling: bool = False  # groups whose members all score alike are replaced
    length: int = 0  # most tokens that a trajectory may sample; 0: not known

    @property
    def needs_reference(self) -> bool:
        """Whether a step needs a reference's log-probabilities."""
        return self.kl_coefficient > 0 or self.estimator == "distillation"

    @property
    def needs_values(self) -> bool:
        """Whether advantages come from a critic."""
        return self.estimator == "gae"

    @property
    def needs_length(self) -> bool:
        return self.aggregation == "constant" or self.overlong_share > 0

    @property
    def least_members(self) -> int:
        """The smallest group that the estimator can compare."""
        return 1 if self.estimator in ("reinforce_pp", "distillation", "gae") else 2


def check(algorithm: Algorithm) -> None:
    """Refuse parts that cannot work together. Raises ``AlgorithmError``."""
    name = algorithm.name
    if algorithm.loss == "topr" and algorithm.correction != "none":
        raise AlgorithmError(
            f"correction: topr's loss (of {name}) has its own importance weight; expected none, found "
            f"{algorithm.correction}"
        )
    if algorithm.loss == "gspo" and algorithm.correction not in ("none", "sequence_tis", "sequence_mask"):
        raise AlgorithmError(
            f"correction: gspo's ratio (of {name}) is a sequence's; expected none, sequence_tis or sequence_mask, "
            f"found {algorithm.correction}"
        )
    if not algorithm.mask_low < algorithm.mask_high:
        raise AlgorithmError(f"mask_low: expected less than mask_high ({algorithm.mask_high:g}) in {name}")
    if algorithm.loss in ("clip", "gspo") and algorithm.clip_low >= 1:
        raise AlgorithmError(f"clip_low: a ratio is never below 0; expected less than 1, found {algorithm.clip_low:g}")
    for key, least in _LEAST.items():
        if not least <= getattr(algorithm, key) < float("inf"):
            raise AlgorithmError(f"{key}: expected {least:g} or more, found {getattr(algorithm, key):g}")
    for key in _ABOVE_ZERO:
        if not 0 < getattr(algorithm, key) < float("inf"):
            raise AlgorithmError(f"{key}: expected a number above 0, found {getattr(algorithm, key):g}")
    for key in _SHARES:
        if not 0 <= getattr(algorithm, key) <= 1:
            raise AlgorithmError(f"{key}: expected a number from 0 to 1, found {getattr(algorithm, key):g}")


_LEAST = dict.fromkeys(
    ("clip_low", "clip_high", "advantage_epsilon", "mask_low", "off_policy_kl", "step_weight", "kl_coefficient"), 0.0
)
_ABOVE_ZERO = ("tis_cap", "mask_high", "sapo_positive", "sapo_negative", "overlong_penalty")
_SHARES = ("gamma", "gae_lambda", "overlong_share")
