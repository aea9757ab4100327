"""What a batch would do, taken apart: figures of each token, and the sum of the trajectories' gradients.

Invariant: nothing is left out for not being finite; the gradients of all trajectories add up to the batch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from actors.trainer.algorithms.losses import TokenLoss
from actors.trainer.backends.packing import MicroBatch
from actors.trainer.backends.protocol import Inspection


class Inspector:
    """Gathers the micro-batches of one batch. ``lengths``: tokens of each segment."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.total: dict[str, torch.Tensor] = {}
        self._logprobs = [np.zeros(length, np.float32) for length in lengths]
        self._ratios = [np.ones(length, np.float32) for length in lengths]
        self._losses = [np.zeros(length, np.float32) for length in lengths]

    def add(self, micro: MicroBatch, new: torch.Tensor, tokens: TokenLoss) -> None:
        """Note the figures of a micro-batch's tokens."""
        columns = (new, tokens.ratio, tokens.loss * micro.weight)
        figures = zip(micro.sequence, micro.place, *(column.detach().cpu().numpy() for column in columns), strict=True)
        for sequence, place, logprob, ratio, loss in figures:
            self._logprobs[sequence][place] = logprob
            self._ratios[sequence][place] = ratio
            self._losses[sequence][place] = loss

    def keep(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add one trajectory's gradient to the batch's."""
        for name, gradient in gradients.items():
            if name in self.total:
                self.total[name] += gradient
            else:
                self.total[name] = gradient.clone()

    def result(self, norms: dict[str, float], norm: float) -> Inspection:
        return Inspection(self._logprobs, self._ratios, self._losses, norms, norm)
