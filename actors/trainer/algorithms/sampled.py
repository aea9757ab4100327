"""The sampled tokens of whole segments, as losses and corrections see them.

Invariant: a segment's tokens are all there, so what depends on a whole sequence may be computed from them.

Uses tensors through their methods only, so that it is importable without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

BOUND = 20.0
"""Nats. A ratio beyond e^20 (or below e^-20) counts as that, without a gradient: its float32 would soon be infinite,
and the gradient of what is clipped NaN (0 x infinity)."""


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """The logarithm of a ratio, within +-``BOUND``; NaN stays NaN."""
    return log_ratio.clamp(-BOUND, BOUND)


def nowhere(values: torch.Tensor) -> torch.Tensor:
    """bool [M], all false."""
    return values.isnan() & False


class Sampled(msgspec.Struct, frozen=True):
    """M sampled tokens of S whole segments; all but ``segment`` are of one floating type, [M]."""

    new: torch.Tensor  # log-probability now; the only one that carries a gradient
    old: torch.Tensor  # the trainer's before the first optimiser step on the batch
    behaviour: torch.Tensor  # what the engine recorded
    advantage: torch.Tensor
    segment: torch.Tensor  # int64 [M], which of the S segments
    segments: int  # S
    reference: torch.Tensor | None = None  # a reference's or a teacher's, where one is compared with

    def segment_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[M]: for each token the sum over its segment."""
        return values.new_zeros(self.segments).index_add(0, self.segment, values)[self.segment]

    def segment_mean(self, values: torch.Tensor) -> torch.Tensor:
        """[M]: for each token the mean over its segment."""
        return self.segment_sum(values) / self.segment_sum(values.new_ones(len(values)))
