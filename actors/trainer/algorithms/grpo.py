"""Group-relative policy optimisation: rewards to advantages, log-probabilities to a loss.

Invariant: the loss of a batch is one sum over its sampled tokens, each with a weight that depends only on the whole
batch (``token_weights``); so it may be computed in any split of the batch and the gradients add up to the same.

Sources: advantages and clipping, DeepSeekMath (arXiv 2402.03300, eq. 3); token-level aggregation, DAPO (2503.14476,
eq. 8); truncated importance weight between rollout and trainer, Yao et al. 2025 ("Your efficient RL framework
secretly brings you off-policy RL training"). Equal to TRL's ``GRPOTrainer`` (``loss_type`` "bnpo" and "dapo" for
"token", "grpo" for "sequence"; ``vllm_importance_sampling_mode="token_truncate"``).

Uses tensors through their methods only, so that it is importable without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

if TYPE_CHECKING:
    import torch


def advantages(rewards: np.ndarray, *, scale: bool, epsilon: float) -> np.ndarray:
    """Reward minus its group's mean, divided by (standard deviation + epsilon) where ``scale``.

    ``rewards`` is [G, N]: G groups of N >= 2 trajectories of one task. The deviation is the sample's (N - 1), as in
    TRL. Returns float64 [G, N]; a group whose members all score alike is exactly 0. Raises ``ValueError``.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards: expected shape [groups, 2 or more members], found {rewards.shape}")
    if not np.isfinite(rewards).all():
        group, member = np.argwhere(~np.isfinite(rewards))[0]
        raise ValueError(
            f"rewards: group {group}, member {member} is {rewards[group, member]}, expected a finite number"
        )
    centred: np.ndarray = rewards - rewards.mean(axis=1, keepdims=True)
    centred[np.ptp(rewards, axis=1) == 0] = 0.0  # the mean of equal numbers is not always that number
    if scale:
        centred /= rewards.std(axis=1, ddof=1, keepdims=True) + epsilon
    return centred


def token_weights(
    owners: Sequence[str], counts: Sequence[int], aggregation: Literal["token", "sequence"]
) -> np.ndarray:
    """The weight of one sampled token of each segment in the batch's loss, float64 [segments].

    ``owners`` names the trajectory of each segment and ``counts`` its sampled tokens. "token": every token of the
    batch counts alike. "sequence": every trajectory counts alike, and within it every token, over all its segments.
    """
    tokens = np.asarray(counts, dtype=np.float64)
    if aggregation == "token":
        return np.full(len(tokens), 1.0 / max(tokens.sum(), 1.0))
    names, index = np.unique(np.asarray(owners), return_inverse=True)
    per_trajectory = np.bincount(index, weights=tokens, minlength=len(names))
    return np.asarray(1.0 / (len(names) * np.maximum(per_trajectory[index], 1.0)))


class TokenLoss(msgspec.Struct, frozen=True):
    """Losses and figures of M sampled tokens, all tensors float32 [M]; only ``loss`` carries gradients."""

    loss: torch.Tensor  # not yet weighted
    ratio: torch.Tensor  # trainer's probability over the rollout's, before truncation
    kl: torch.Tensor  # ratio - 1 - log ratio, an estimate of KL(rollout || trainer) that is never negative
    clipped: torch.Tensor  # 1 where PPO's clipping removed the gradient
    truncated: torch.Tensor  # 1 where the importance weight was cut to the cap


def token_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    behaviour: torch.Tensor,
    advantage: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    tis_cap: float,
) -> TokenLoss:
    """PPO's clipped surrogate times the truncated importance weight min(exp(old - behaviour), cap), per token.

    All tensors are float32 [M]. ``new`` carries the gradient; ``old`` is the trainer's log-probability before the
    first optimiser step on this batch (``new.detach()`` where there is only one); ``behaviour`` is what the engine
    recorded.
    """
    policy_ratio = (new - old).exp()
    clipped_ratio = policy_ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = (policy_ratio * advantage).minimum(clipped_ratio * advantage)
    correction = (old.detach() - behaviour).exp()
    weight = correction.clamp(max=tis_cap)
    with_gradient = -surrogate * weight

    ratio_now = policy_ratio.detach()
    too_low = (ratio_now < 1.0 - clip_low) & (advantage < 0)
    too_high = (ratio_now > 1.0 + clip_high) & (advantage > 0)
    log_ratio = new.detach() - behaviour
    ratio = log_ratio.exp()
    return TokenLoss(
        loss=with_gradient,
        ratio=ratio,
        kl=ratio - 1.0 - log_ratio,
        clipped=(too_low | too_high).float(),
        truncated=(correction > tis_cap).float(),
    )
