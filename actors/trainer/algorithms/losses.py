"""Log-probabilities and advantages to a loss of each sampled token.

Invariant: a token's loss depends on its own segment only, so the losses of a batch do not depend on how it was split
into micro-batches of whole segments; no log-probabilities above -1e6 and advantages of common size make a loss or a
gradient that is not finite.

The ratio r of a loss is exp(new - old) with a correction (``corrections``), and exp(new - behaviour) without one: then
it is the loss that decides what stale tokens count. A is the advantage, sg stops the gradient, a sequence is a segment.

    clip       -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)    PPO, arXiv 1707.06347; DAPO, 2503.14476
    gspo       the same with s = (product of the sequence's r)^(1/length), as sg[s] r / sg[r]
                                                                     2507.18071
    cispo      -sg[clip(r, 1 - clip_low, 1 + clip_high)] A new      2506.13585
    sapo       -(4 / t) sigmoid(t (r - 1)) A, t by the sign of A    2511.20347
    topr       -A new where A >= 0, else -sg[min(product of the sequence's r, 1)] A new    2503.14286
    reinforce  -A new                                               Williams 1992

To the policy's loss comes ``kl_coefficient`` times an estimate of KL(policy || reference), d = reference - new:
k2 d^2 / 2, or k3 exp(d) - d - 1 (Schulman 2020, "Approximating KL divergence"). Its k1, -d, has no gradient in
expectation, so it is no loss: ``kl_coefficient`` times it, with the log-probability that the ratio is over in place of
new, is taken off each token's advantage. With ``estimator: distillation`` A is reference - the log-probability that the
ratio is over: the gradient of KL(policy || teacher) at the sampled tokens.

Equal to TRL's ``GRPOTrainer`` where it has the loss. Importable without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from actors.trainer.algorithms.algorithm import Algorithm
from actors.trainer.algorithms.corrections import importance
from actors.trainer.algorithms.sampled import Sampled, bounded, nowhere

if TYPE_CHECKING:
    import torch


class TokenLoss(msgspec.Struct, frozen=True):
    """Losses and figures of M sampled tokens, all tensors [M]; only ``loss`` carries gradients."""

    loss: torch.Tensor  # not yet weighted
    ratio: torch.Tensor  # trainer's probability over the rollout's, before any cut
    kl: torch.Tensor  # ratio - 1 - log ratio, an estimate of KL(rollout || trainer) that is never negative
    clipped: torch.Tensor  # 1 where clipping removed the gradient, or cut the weight of CISPO and TOPR
    truncated: torch.Tensor  # 1 where the correction cut or masked the weight
    reference_kl: torch.Tensor  # estimate of KL(policy || reference); 0 without one


def policy_loss(tokens: Sampled, algorithm: Algorithm) -> TokenLoss:
    """See the module docstring. Raises ``ValueError`` where the algorithm needs a reference and there is none."""
    if algorithm.needs_reference and tokens.reference is None:
        raise ValueError(f"{algorithm.name}: log-probabilities of a reference are needed, and there are none")
    over = tokens.behaviour if algorithm.correction == "none" else tokens.old.detach()
    if algorithm.estimator == "distillation" and tokens.reference is not None:
        tokens = msgspec.structs.replace(tokens, advantage=tokens.reference - over)
    if algorithm.kl == "k1" and algorithm.kl_coefficient > 0 and tokens.reference is not None:
        penalty = algorithm.kl_coefficient * (over - tokens.reference)
        tokens = msgspec.structs.replace(tokens, advantage=tokens.advantage - penalty)
    loss, clipped = _LOSSES[algorithm.loss](bounded(tokens.new - over), tokens, algorithm)
    weight, truncated = importance(tokens, algorithm)
    loss = loss * weight
    divergence = reference_kl(tokens, algorithm)
    if algorithm.kl_coefficient > 0 and algorithm.kl != "k1":
        loss = loss + algorithm.kl_coefficient * divergence
    log_ratio = bounded(tokens.new.detach() - tokens.behaviour)
    ratio = log_ratio.exp()
    return TokenLoss(
        loss=loss,
        ratio=ratio,
        kl=ratio - 1.0 - log_ratio,
        clipped=clipped.to(ratio.dtype),
        truncated=truncated,
        reference_kl=divergence.detach(),
    )


def reference_kl(tokens: Sampled, algorithm: Algorithm) -> torch.Tensor:
    """An estimate of KL(policy || reference) at each token, [M]; 0 without a reference."""
    if tokens.reference is None:
        return tokens.new.detach() * 0.0
    difference = tokens.reference - tokens.new
    if algorithm.kl == "k1":
        return -difference
    if algorithm.kl == "k2":
        return difference * difference / 2.0
    difference = bounded(difference)
    return difference.exp() - difference - 1.0


def _clip(log_ratio: torch.Tensor, tokens: Sampled, algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    ratio = log_ratio.exp()
    loss = -(ratio * tokens.advantage).minimum(ratio.clamp(low, high) * tokens.advantage)
    now = ratio.detach()
    return loss, ((now < low) & (tokens.advantage < 0)) | ((now > high) & (tokens.advantage > 0))


def _gspo(log_ratio: torch.Tensor, tokens: Sampled, algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    # Its value is the sequence's ratio, its gradient goes through the token's own: with one advantage for the sequence
    # the sum over tokens has the gradient of the sequence's loss, and with several each token gets what is its own.
    whole = tokens.segment_mean(log_ratio.detach())
    return _clip(whole + log_ratio - log_ratio.detach(), tokens, algorithm)


def _cispo(log_ratio: torch.Tensor, tokens: Sampled, algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    ratio = log_ratio.detach().exp()
    return -ratio.clamp(low, high) * tokens.advantage * tokens.new, (ratio < low) | (ratio > high)


def _sapo(log_ratio: torch.Tensor, tokens: Sampled, algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    negative = tokens.advantage.new_full((), algorithm.sapo_negative)
    temperature = negative.where(tokens.advantage <= 0, negative.new_full((), algorithm.sapo_positive))
    gate = (temperature * (log_ratio.exp() - 1.0)).sigmoid() * 4.0 / temperature
    return -gate * tokens.advantage, nowhere(tokens.advantage)


def _topr(log_ratio: torch.Tensor, tokens: Sampled, algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    whole = tokens.segment_sum((tokens.new - tokens.behaviour).detach())
    negative = tokens.advantage < 0
    taper = bounded(whole).clamp(max=0.0).exp()
    weight = taper.where(negative, taper.new_ones(()))
    return -weight * tokens.advantage * tokens.new, negative & (whole > 0)


def _reinforce(log_ratio: torch.Tensor, tokens: Sampled, algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    return -tokens.advantage * tokens.new, nowhere(tokens.advantage)


_LOSSES: dict[str, Callable[[torch.Tensor, Sampled, Algorithm], tuple[torch.Tensor, torch.Tensor]]] = {
    "clip": _clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "topr": _topr,
    "reinforce": _reinforce,
}
