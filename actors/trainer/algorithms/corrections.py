"""What a token counts whose engine did not sample it from the policy that is trained: importance weights.

Invariant: a weight has no gradient, is finite and not negative, and is a function of log-probabilities before the step
(``old``: the trainer's, ``behaviour``: the engine's). A sequence is a segment: the tokens of one context.

    none           1: the loss's own ratio is over ``behaviour``
    decoupled      w = exp(old - behaviour). Decoupled PPO: Hilton et al., arXiv 2110.00641; AReaL, 2505.24298
    tis            min(w, tis_cap). Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL"
    icepop         w within [mask_low, mask_high], else 0. Ling team, arXiv 2510.18855
    sequence_tis   min(product of the sequence's w, tis_cap)
    sequence_mask  product of the sequence's w within [mask_low, mask_high], else 0. Liu et al. 2025, "When speed
                   kills stability"

Beside any of them ``off_policy_kl`` masks sequences with a negative advantage whose mean of (behaviour - new) is
larger: DeepSeek-V3.2, arXiv 2512.02556.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.trainer.algorithms.algorithm import Algorithm
from actors.trainer.algorithms.sampled import Sampled, bounded, nowhere

if TYPE_CHECKING:
    import torch


def importance(tokens: Sampled, algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [M], and 1 where one was cut or masked, else 0."""
    weight, cut = _weights(tokens, algorithm)
    if algorithm.off_policy_kl > 0:
        far = tokens.segment_mean((tokens.behaviour - tokens.new).detach()) > algorithm.off_policy_kl
        masked = far & (tokens.advantage < 0)
        weight, cut = weight * (~masked).to(weight.dtype), cut | masked
    return weight, cut.to(weight.dtype)


def _weights(tokens: Sampled, algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    difference = tokens.old.detach() - tokens.behaviour
    if algorithm.correction in ("sequence_tis", "sequence_mask"):
        difference = tokens.segment_sum(difference)
    weight = bounded(difference).exp()
    match algorithm.correction:
        case "none":
            return weight.new_ones(len(weight)), nowhere(weight)
        case "decoupled":
            return weight, nowhere(weight)
        case "tis" | "sequence_tis":
            return weight.clamp(max=algorithm.tis_cap), weight > algorithm.tis_cap
        case _:
            outside = (weight < algorithm.mask_low) | (weight > algorithm.mask_high)
            return weight * (~outside).to(weight.dtype), outside
