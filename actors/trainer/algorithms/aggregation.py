"""What each sampled token counts in a batch's loss.

Invariant: the loss of a batch is one sum over its sampled tokens, each with a weight that depends only on the whole
batch; so it may be computed in any split of the batch and the gradients add up to the same.

Sources: "token", DAPO (arXiv 2503.14476, eq. 8; TRL's "bnpo" and "dapo"); "sequence", GRPO (2402.03300, eq. 3; TRL's
"grpo"); "constant", Dr.GRPO (2503.20783; TRL's "dr_grpo").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.settings import Aggregation
from actors.trainer.algorithms.algorithm import Algorithm, AlgorithmError


def token_weights(
    owners: Sequence[str], counts: Sequence[int], aggregation: Aggregation, length: int = 0
) -> np.ndarray:
    """The weight of one sampled token of each segment in the batch's loss, float64 [segments].

    ``owners`` names the trajectory of each segment and ``counts`` its sampled tokens. "token": every token of the
    batch counts alike. "sequence": every trajectory counts alike, and within it every token, over all its segments.
    "constant": a token counts 1 / (trajectories x ``length``), however long its own trajectory is.
    """
    tokens = np.asarray(counts, dtype=np.float64)
    if aggregation == "token":
        return np.full(len(tokens), 1.0 / max(tokens.sum(), 1.0))
    names, index = np.unique(np.asarray(owners), return_inverse=True)
    if aggregation == "constant":
        if length < 1:
            raise AlgorithmError(f"length: constant aggregation divides by it; expected 1 or more, found {length}")
        return np.full(len(tokens), 1.0 / (max(len(names), 1) * length))
    per_trajectory = np.bincount(index, weights=tokens, minlength=len(names))
    return np.asarray(1.0 / (len(names) * np.maximum(per_trajectory[index], 1.0)))


def batch_weights(
    owners: Sequence[str], counts: Sequence[int], chosen: Sequence[int], algorithms: Sequence[Algorithm]
) -> np.ndarray:
    """The same for a batch whose segments are trained by the algorithms ``chosen`` (their indices): each algorithm
    aggregates its own, and counts as much as it has trajectories. float64 [segments]."""
    weights = np.zeros(len(owners))
    numbers = np.asarray(chosen)
    trajectories = max(len(set(owners)), 1)
    for number in np.unique(numbers):
        own = np.flatnonzero(numbers == number)
        names, algorithm = [owners[i] for i in own], algorithms[number]
        share = len(set(names)) / trajectories
        weights[own] = share * token_weights(names, [counts[i] for i in own], algorithm.aggregation, algorithm.length)
    return weights
