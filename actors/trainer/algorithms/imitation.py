"""Imitation (supervised fine-tuning): the negative log-likelihood of what a demonstration did.

Invariant: the loss of a batch is the mean over its trained-on tokens of -log p(token), which is what transformers'
``labels=`` computes with -100 at every other position; the weights of tokens come from ``aggregation.token_weights``,
so that a batch may be split as there (``train.aggregation: sequence`` weighs demonstrations alike instead of tokens).

Uses tensors through their methods only, so that it is importable without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.trainer.algorithms.losses import TokenLoss

if TYPE_CHECKING:
    import torch


def imitation_loss(new: torch.Tensor) -> TokenLoss:
    """``new`` float32 [M]: log-probability of each demonstrated token, with gradient. There is nobody to compare with:
    ratios are 1."""
    nothing = new.detach() * 0.0
    return TokenLoss(-new, ratio=nothing + 1.0, kl=nothing, clipped=nothing, truncated=nothing, reference_kl=nothing)
