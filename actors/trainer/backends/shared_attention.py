"""Attention over a row of trees: every token sees the tokens on its path, up to itself, and nothing else.

Invariant: the result at each place equals causal attention over the plain sequence that leads there.

Runs are the queries, their whole paths the keys: gathered, padded and batched with runs of like size, so that the work
is what attention over the plain sequences needs for the same queries, never the square of a row. A dense mask over the
row would cost that square: with groups of 8 that share half of 1,024 tokens, five times the attention that was there
before. Runs that share nothing with an earlier one are plain causal sequences and need no mask.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from actors.trainer.backends.prefixes import Path, Row

NAME = "shared_prefixes"
"""Under which transformers finds ``attention``."""

SHORT = 16384
"""On a CPU so many queries times keys of a sequence are computed as plain products; the fused kernel, which never holds
the scores, is faster beyond."""

_WASTE = 1 / 4  # how much of a batch's query-key pairs may be padding
_OVERHEAD = 32768  # ... beyond these, which cost less than one more call


class Attended(Protocol):
    """What of the tokens each one sees."""

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """``queries`` [T, H, D], ``keys`` and ``values`` [T, KV, D] -> [T, H, D]."""


class Batch(msgspec.Struct, frozen=True):
    """G runs of at most N queries with paths of at most K keys; all indices are places in the row."""

    queries: torch.Tensor  # int64 [G, N]
    keys: torch.Tensor  # int64 [G, K]
    mask: torch.Tensor | None  # [G or 1, 1, N, K], added to the scores; None: causal, N = K


class Plan(msgspec.Struct, frozen=True):
    """How a row's attention is cut into calls."""

    batches: list[Batch]
    order: torch.Tensor  # int64 [T]; where each place's result is among all batches' results

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """See ``Attended``."""
        heads, width = queries.shape[1:]
        by_place, pairs = queries.flatten(1), torch.cat((keys, values), 1).flatten(1)
        parts = []
        for batch in self.batches:
            chosen = F.embedding(batch.queries, by_place).view(*batch.queries.shape, heads, width)
            seen_keys, seen_values = F.embedding(batch.keys, pairs).view(*batch.keys.shape, -1, width).chunk(2, 2)
            mixed = _products(chosen, seen_keys, seen_values, batch.mask, scale)
            parts.append(mixed.flatten(2).flatten(0, 1))
        return F.embedding(self.order, torch.cat(parts)).view(-1, heads, width)


class Rows(msgspec.Struct, frozen=True):
    """Plain sequences of one width, one after the other: each token sees those before it and itself."""

    width: int

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """See ``Attended``."""
        queries, keys, values = (
            states.reshape(-1, self.width, *states.shape[1:]) for states in (queries, keys, values)
        )
        return _products(queries, keys, values, None, scale).flatten(0, 1)


def _products(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """``queries`` [G, N, H, D], ``keys`` and ``values`` [G, K, KV, D], ``mask`` as in ``Batch`` -> [G, N, H, D]."""
    count, heads, width = queries.shape[1:]
    repeats = heads // keys.shape[2]
    if queries.device.type != "cpu" or count * keys.shape[1] > SHORT:
        keys, values = (states.transpose(1, 2).repeat_interleave(repeats, 1) for states in (keys, values))
        return F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
        ).transpose(1, 2)
    if mask is None:
        mask = torch.full((count, count), -torch.inf, dtype=queries.dtype).triu_(1)[None, None]
    # Heads that share keys become further queries of them: nothing is repeated in memory.
    spread = (
        queries.reshape(len(queries), count, -1, repeats, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
    )  # [G, KV, repeats * N, D]
    shared = mask.expand(-1, keys.shape[2] if len(mask) > 1 else 1, -1, -1).repeat(1, 1, repeats, 1).flatten(0, 1)
    keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (keys, values))
    scores = torch.baddbmm(shared, spread.flatten(0, 1), keys.transpose(1, 2), alpha=scale)
    mixed = torch.bmm(scores.softmax(-1), values)
    return mixed.view(-1, heads // repeats, repeats, count, width).permute(0, 3, 1, 2, 4).flatten(2, 3)


def make_plan(row: Row, device: torch.device, dtype: torch.dtype) -> Plan:
    """``dtype`` is that of the scores the masks are added to."""
    runs = [path for path in row.paths if len(path.places) > path.shared]
    batches: list[Batch] = []
    order = np.zeros(len(row.tokens), dtype=np.int64)
    size = 0
    for group in _batches(runs):
        batch, results = _pad(group, device, dtype)
        for path, start in zip(group, results, strict=True):
            own = path.places[path.shared :]
            order[own] = size + start + np.arange(len(own))
        size += batch.queries.numel()
        batches.append(batch)
    return Plan(batches=batches, order=torch.from_numpy(order).to(device))


def _batches(runs: list[Path]) -> list[list[Path]]:
    """Runs of like size together, those without and with a shared part apart."""
    groups: list[list[Path]] = []
    pairs = 0
    for path in sorted(runs, key=lambda p: (p.shared > 0, p.shared - len(p.places), -len(p.places))):
        queries, keys = len(path.places) - path.shared, len(path.places)
        if groups and (groups[-1][0].shared > 0) == (path.shared > 0):
            most_queries = len(groups[-1][0].places) - groups[-1][0].shared
            most_keys = max(keys, *(len(p.places) for p in groups[-1]), 0)
            padded = (len(groups[-1]) + 1) * most_queries * most_keys
            if padded - pairs - queries * keys <= max(_OVERHEAD, _WASTE * padded):
                groups[-1].append(path)
                pairs += queries * keys
                continue
        groups.append([path])
        pairs = queries * keys
    return groups


def _pad(group: list[Path], device: torch.device, dtype: torch.dtype) -> tuple[Batch, list[int]]:
    """The batch and, for each run, where its results begin in the batch's flattened ones."""
    shared = np.array([path.shared for path in group])
    lengths = np.array([len(path.places) for path in group])
    queries = np.zeros((len(group), int((lengths - shared).max())), dtype=np.int64)
    keys = np.zeros((len(group), int(lengths.max())), dtype=np.int64)
    for i, path in enumerate(group):
        queries[i, : lengths[i] - shared[i]] = path.places[path.shared :]
        keys[i, : lengths[i]] = path.places
    mask = None
    if shared.any():
        # Whatever pads a run's queries on the right sees at least its first key, so that nothing becomes NaN.
        alike = shared[:1] if (shared == shared[0]).all() else shared
        last = alike[:, None] + np.arange(queries.shape[1])
        hidden = torch.from_numpy(np.arange(keys.shape[1]) > last[:, :, None]).to(device)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None]
    batch = Batch(queries=torch.from_numpy(queries).to(device), keys=torch.from_numpy(keys).to(device), mask=mask)
    return batch, [i * queries.shape[1] for i in range(len(group))]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    plan: Attended,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' layers call: ``query`` [1, H, T, D], ``key`` and ``value`` [1, KV, T, D] -> [1, T, H, D]."""
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    return plan.attend(queries, keys, values, scaling)[None], None


AttentionInterface.register(NAME, attention)
