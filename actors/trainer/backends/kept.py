"""Weights of the newest versions, kept beside the model, so that what was sampled under them can be scored under them.

Invariant: the model has its own weights again after whatever was computed under others, however that ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from msgspec.structs import replace

from actors.trainer.algorithms.sampled import BOUND
from actors.trainer.backends.protocol import TrainBatch, TrainSequence

Score = Callable[[TrainBatch, list[int]], list[np.ndarray]]
"""(batch, indices of sequences) -> log-probabilities of their sampled tokens, per sequence of the batch float32 [T]."""


class KeptVersions:
    """See the module docstring. ``most``: so many versions are kept, in main memory; 0 keeps none."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], most: int) -> None:
        self._parameters = parameters
        self._most = most
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def versions(self) -> Collection[int]:
        return self._kept.keys()

    def keep(self, version: int) -> None:
        """The model's weights are this version's; the lowest of more than ``most`` versions is forgotten."""
        if not self._most:
            return
        self._kept[version] = {name: p.detach().to("cpu", copy=True) for name, p in self._parameters.items()}
        for old in sorted(self._kept)[: -self._most]:
            del self._kept[old]

    def forget(self) -> None:
        """What comes now is another history of the weights."""
        self._kept.clear()

    @contextmanager
    def under(self, version: int) -> Iterator[None]:
        """The model computes with a version's weights. Raises ``KeyError`` for one that is not kept."""
        kept = self._kept[version]
        own = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = kept[name].to(parameter.device)
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]

    def recompute(self, batch: TrainBatch, score: Score) -> tuple[TrainBatch, dict[str, float]]:
        """The batch with log-probabilities under the kept version that sampled a token, in place of those that its
        engine recorded. Also ``recomputed_fraction`` of the tokens, and ``kl_engine``, their mean estimate of
        KL(engine || trainer) under one version, in nats; both only where anything was computed."""
        spans: dict[int, list[int]] = {}
        for i, sequence in enumerate(batch.sequences):
            for version in _sampled_under(sequence):
                if version in self._kept:
                    spans.setdefault(version, []).append(i)
        if not spans or batch.loss == "imitation":
            return batch, {}
        logprobs = [sequence.logprobs.copy() for sequence in batch.sequences]
        differences = []
        for version, indices in sorted(spans.items()):
            with self.under(version):
                scored = score(batch, indices)
            for i in indices:
                sequence = batch.sequences[i]
                span = (sequence.loss_mask == 1) & (sequence.versions == version)
                differences.append(scored[i][span] - logprobs[i][span])
                logprobs[i][span] = scored[i][span]
        d = np.clip(np.concatenate(differences).astype(np.float64), -BOUND, BOUND)
        sequences = [replace(each, logprobs=own) for each, own in zip(batch.sequences, logprobs, strict=True)]
        sampled = sum(int(sequence.loss_mask.sum()) for sequence in batch.sequences)
        figures = {"recomputed_fraction": d.size / sampled, "kl_engine": float((np.exp(d) - d - 1.0).mean())}
        return replace(batch, sequences=sequences), figures


def _sampled_under(sequence: TrainSequence) -> list[int]:
    """The versions that sampled its tokens."""
    if sequence.versions is None:
        return []
    versions: list[int] = np.unique(sequence.versions[sequence.loss_mask == 1]).tolist()
    return versions
