"""What a batch would do, taken apart: figures of each token, and the sum of the trajectories' gradients.

Invariant: nothing is left out for not being finite; the gradients of all trajectories add up to the batch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from actors.trainer.algorithms.losses import TokenLoss
from actors.trainer.backends.packing import MicroBatch
from actors.trainer.backends.protocol import Inspection


class Inspector:
    """Gathers the micro-batches of one batch. ``masks``: which tokens of each segment are sampled."""

    def __init__(self, masks: Sequence[np.ndarray]) -> None:
        self._masks = masks
        lengths = [len(mask) for mask in masks]
        self.total: dict[str, torch.Tensor] = {}
        self._logprobs = [np.zeros(length, np.float32) for length in lengths]
        self._ratios = [np.zeros(length, np.float32) for length in lengths]
        self._losses = [np.zeros(length, np.float32) for length in lengths]

    def add(self, micro: MicroBatch, new: torch.Tensor, tokens: TokenLoss) -> None:
        """Note the figures of a micro-batch's tokens."""
        columns = (new, tokens.ratio, tokens.loss * micro.weight)
        figures = zip(micro.sequence, micro.place, *(column.detach().cpu().numpy() for column in columns), strict=True)
        for sequence, place, logprob, ratio, loss in figures:
            self._logprobs[sequence][place] = logprob
            self._ratios[sequence][place] = ratio
            self._losses[sequence][place] = loss

    def combine(self, total: Callable[[np.ndarray], np.ndarray]) -> None:
        """Over all ranks, of which each added other segments."""
        for arrays in (self._logprobs, self._ratios, self._losses):
            parts = np.split(total(np.concatenate(arrays)), np.cumsum([len(array) for array in arrays])[:-1])
            for array, part in zip(arrays, parts, strict=True):
                array[:] = part

    def keep(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add one trajectory's gradient to the batch's."""
        for name, gradient in gradients.items():
            if name in self.total:
                self.total[name] += gradient
            else:
                self.total[name] = gradient.clone()

    def result(self, norms: dict[str, float], norm: float) -> Inspection:
        ratios = [np.where(mask == 1, r, np.float32(1)) for mask, r in zip(self._masks, self._ratios, strict=True)]
        return Inspection(self._logprobs, ratios, self._losses, norms, norm)
