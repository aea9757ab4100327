"""Sampling a batch of rows, each with its own temperature, allowed tokens and seed.

Invariant: the log-probability returned for a token is that of the distribution that it was drawn from (after
temperature and mask, float32 nats; for a greedy row that of temperature 1), and a row's draw depends on nothing but
its logits, its seed and its position.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from actors.proxy.engines.seeds import uniforms

Allowed = tuple[int, ...] | None
_INDEX_CACHE_SIZE = 1024

_BLOCK = 256
"""Large vocabularies are searched in two steps: which block of this many tokens, then which token of it."""


@dataclass(frozen=True)
class RowSampling:
    """How one row is sampled."""

    temperature: float  # 0 is greedy
    allowed: Allowed
    seed: int
    position: int  # tokens sampled so far in this request


class Sampler:
    """Draws for many rows at once; rows with the same allowed set share one pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._indices: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()

    def __call__(self, logits: torch.Tensor, rows: list[RowSampling]) -> tuple[np.ndarray, np.ndarray]:
        """``logits`` [B, V] -> token ids int32 [B] and log-probabilities float32 [B]."""
        groups: dict[Allowed, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(row.allowed, []).append(index)
        tokens = np.empty(len(rows), dtype=np.int32)
        logprobs = np.empty(len(rows), dtype=np.float32)
        for allowed, members in groups.items():
            part = logits if len(members) == len(rows) else logits[torch.tensor(members, device=self._device)]
            ids = None if allowed is None else self._index(allowed)
            if ids is not None:
                part = part.index_select(1, ids)
            chosen, chosen_logprobs = _draw(part.float(), [rows[index] for index in members])
            tokens[members] = (chosen if ids is None else ids[chosen]).cpu().numpy()
            logprobs[members] = chosen_logprobs.cpu().numpy()
        return tokens, logprobs

    def _index(self, allowed: tuple[int, ...]) -> torch.Tensor:
        found = self._indices.get(allowed)
        if found is None:
            found = torch.tensor(sorted(set(allowed)), dtype=torch.int64, device=self._device)
            self._indices[allowed] = found
            if len(self._indices) > _INDEX_CACHE_SIZE:
                self._indices.popitem(last=False)
        return found


def _draw(logits: torch.Tensor, rows: list[RowSampling]) -> tuple[torch.Tensor, torch.Tensor]:
    temperatures = np.array([row.temperature for row in rows], dtype=np.float32)
    greedy = temperatures == 0
    if not (temperatures == 1).all():
        divisors = torch.from_numpy(np.where(greedy, np.float32(1), temperatures)).to(logits.device)
        logits = logits / divisors[:, None]
    logprobs = logits.log_softmax(-1)
    if greedy.all():
        chosen = logprobs.argmax(-1)
    else:
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        points = torch.from_numpy(uniforms(seeds, np.array([row.position for row in rows]))).to(logits.device)
        chosen = _invert(logprobs.exp(), points)
        if greedy.any():
            chosen = torch.where(torch.from_numpy(greedy).to(logits.device), logprobs.argmax(-1), chosen)
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]


def _invert(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """For each row of ``weights`` [B, V], the first token at which the cumulated sum exceeds the row's point (float64
    in [0, 1)) of its total: never one of weight 0."""
    width = weights.shape[1]
    whole = width // _BLOCK * _BLOCK
    if whole < 2 * _BLOCK:
        return _first_above(weights.double().cumsum(-1), points[:, None])
    blocks = weights[:, :whole].reshape(len(weights), -1, _BLOCK).sum(-1).double()
    tail = weights[:, whole:].sum(-1, keepdim=True).double()
    cumulated = torch.cat([blocks, tail], dim=1).cumsum(-1)
    block = _first_above(cumulated, points[:, None])
    before = torch.where(block > 0, cumulated.gather(1, (block[:, None] - 1).clamp(min=0))[:, 0], 0.0)
    within = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, within.clamp(max=width - 1)).double().masked_fill(within >= width, 0.0)
    # What is left of the point for this block; rounding must not carry it past the block's last token.
    left = points * cumulated[:, -1] - before
    place = torch.searchsorted(inside.cumsum(-1), left[:, None], right=True)[:, 0]
    last = (inside > 0).int().cumsum(-1).argmax(-1)
    return block * _BLOCK + torch.minimum(place, last)


def _first_above(cumulated: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    chosen = torch.searchsorted(cumulated, points * cumulated[:, -1:], right=True)[:, 0]
    return chosen.clamp(max=cumulated.shape[1] - 1)
