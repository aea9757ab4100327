"""Attention over a row of trees: every token sees the tokens on its path, up to itself, and nothing else.

Invariant: the result at each place equals causal attention over the plain sequence that leads there.

Runs are the queries, their whole paths the keys: gathered, padded and batched with runs of like size, so that the work
is what attention over the plain sequences needs for the same queries, never the square of a row. A dense mask over the
row would cost that square: with groups of 8 that share half of 1,024 tokens, five times the attention that was there
before. Runs that share nothing with an earlier one are plain causal sequences and need no mask.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from actors.trainer.backends.prefixes import Path, Row

NAME = "shared_prefixes"
"""Under which transformers finds ``attention``."""

_WASTE = 1 / 4  # how much of a batch's query-key pairs may be padding
_OVERHEAD = 32768  # ... beyond these, which cost less than one more call


class Batch(msgspec.Struct, frozen=True):
    """G runs of at most N queries with paths of at most K keys; all indices are places in the row."""

    queries: torch.Tensor  # int64 [G, N]
    keys: torch.Tensor  # int64 [G, K]
    mask: torch.Tensor | None  # [G or 1, 1, N, K], added to the scores; None: causal, N = K


class Plan(msgspec.Struct, frozen=True):
    """How a row's attention is cut into calls."""

    batches: list[Batch]
    order: torch.Tensor  # int64 [T]; where each place's result is among all batches' results


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
    plan: Plan | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' layers call; without a plan it is transformers' own sdpa attention.

    ``query`` [1, H, T, D], ``key`` and ``value`` [1, KV, T, D]; returns [1, T, H, D].
    """
    if plan is None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return result
    width = query.shape[3]
    queries = _by_place(query)
    keys_values = torch.cat([_by_place(key), _by_place(value)], dim=1)
    parts = []
    for batch in plan.batches:
        chosen = _split_heads(functional.embedding(batch.queries, queries), width)
        keys, values = _split_heads(functional.embedding(batch.keys, keys_values), width).chunk(2, dim=1)
        attended, _ = sdpa_attention_forward(module, chosen, keys, values, batch.mask, scaling=scaling, **others)
        parts.append(attended.flatten(2).flatten(0, 1))  # [G, N, H, D] -> [G * N, H * D]
    by_place = functional.embedding(plan.order, torch.cat(parts))
    return by_place.view(1, len(by_place), -1, width), None


def _by_place(states: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, D] -> [T, heads * D]"""
    return states[0].transpose(0, 1).flatten(1)


def _split_heads(states: torch.Tensor, width: int) -> torch.Tensor:
    """[G, N, heads * D] -> [G, heads, N, D]"""
    return states.view(*states.shape[:2], -1, width).transpose(1, 2)


AttentionInterface.register(NAME, attention)
