"""Attention of a packed batch over per-row KV slots, plugged into any transformers causal language model.

Invariant: a query at position p of a row attends to exactly positions 0..p of that row's own slot; what lies beyond,
or in other slots, never reaches the result.

The tokens of all rows are laid end to end, so that linear layers see no padding. Only here are they spread out, in
groups of rows with similar numbers of new tokens and similar lengths, so that a long prompt does not make the
decoding rows beside it pay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

IMPLEMENTATION = "rollart_slots"
"""Name under which transformers finds ``attend``; it makes no mask of its own for a name that it does not know."""

QUERY_BUCKETS = (1, 8, 64, 512)
LENGTH_BUCKETS = (256, 1024, 4096, 16384)


class KvStore:
    """Keys and values of ``slots`` rows: ``layers[i]`` is ``[2 * slots, kv_heads, max_len, head_dim]``, all keys, then
    all values."""

    def __init__(self, config: Any, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.heads, self.head_dim = kv_geometry(config)
        self.max_len = max_len
        self.slots = slots
        layers = int(config.num_hidden_layers)
        self._all = _zeroed((layers, 2, slots, self.heads, max_len, self.head_dim), dtype, device)
        self.layers = [layer.flatten(0, 1) for layer in self._all]
        self.vectors = [layer.view(-1, self.head_dim) for layer in self.layers]
        self._used = np.zeros(slots, dtype=np.int64)  # tokens of each slot that were ever written

    def reset(self) -> None:
        """Forget everything. Zeroed, because a masked key's weight of 0 times a NaN left in memory is NaN; but only
        what was written: fresh memory would have to be mapped, and zeroed by the kernel, all over again."""
        for slot in np.flatnonzero(self._used).tolist():
            self._all[:, :, slot, :, : int(self._used[slot])] = 0
        self._used[:] = 0

    def written(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """These slots (each at most once) hold something up to these positions."""
        self._used[slots] = np.maximum(self._used[slots], ends)

    def copy(self, source: int, target: int, count: int) -> None:
        """Give a slot the first ``count`` keys and values of another."""
        self._all[:, :, target, :, :count] = self._all[:, :, source, :, :count]
        self._used[target] = max(int(self._used[target]), count)

    def release(self) -> None:
        """Give the memory back; nothing can be stored any more."""
        self._all = torch.empty(0)
        self._used[:] = 0
        self.layers = []
        self.vectors = []


def _zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU ``torch.zeros`` writes every byte at once; NumPy asks the kernel for pages that are zero when first
    touched, so that a store much larger than what is used costs next to nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def kv_geometry(config: Any) -> tuple[int, int]:
    """Number of key-value heads and size of a head of a transformers configuration."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return kv_heads, int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over all layers."""
    kv_heads, head_dim = kv_geometry(config)
    return 2 * int(config.num_hidden_layers) * kv_heads * head_dim * dtype.itemsize


@dataclass
class RowWork:
    """New tokens of one row in one step."""

    slot: int
    start: int  # position of the first new token; all before are in the slot
    tokens: np.ndarray  # int32 [T], T >= 1


@dataclass
class _Group:
    both: torch.Tensor  # int64 [2 * b]; where the rows' keys are in the store, then their values
    first: int | None  # the first of the rows' slots where they follow each other in the store
    length: int  # longest used length in the group
    gather: torch.Tensor | None  # int64 [b * T] packed index of each padded place; None where they coincide
    scatter: torch.Tensor | None  # int64 [n] padded place of each of the group's packed tokens
    packed: slice  # the group's stretch of the packed batch
    rows: int
    width: int  # T
    positions: torch.Tensor  # int64 [b, T]; position of each query, 0 in the padding (so that it sees something)
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    views: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def advance(self) -> None:
        """Each row's one token becomes the next one."""
        self.length += 1
        self.positions += 1
        self.masks.clear()

    def mask(self, window: int | None, dtype: torch.dtype, heads: int, repeats: int) -> torch.Tensor:
        """Additive mask ``[b * heads, repeats * T, length]``, or one that spreads to it; made once a step and kind of
        layer."""
        if window not in self.masks:
            keys = torch.arange(self.length, device=self.positions.device)
            hidden = keys > self.positions[..., None]
            if window is not None:
                hidden |= keys <= self.positions[..., None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            times = 1 if self.width == 1 else repeats
            self.masks[window] = mask[:, None].repeat(1, heads, times, 1).flatten(0, 1)
        return self.masks[window]

    def stored(self, layer: int, store: KvStore) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[b * kv_heads, length, D]`` of the rows: where they lie together, as they lie."""
        if self.first is None:
            both = store.layers[layer][:, :, : self.length].index_select(0, self.both).flatten(0, 1)
            return both[: len(both) // 2], both[len(both) // 2 :]
        if layer not in self.views:
            span = slice(self.first, self.first + self.rows)
            keys, values = (half[span].flatten(0, 1) for half in store.layers[layer].chunk(2))
            self.views[layer] = keys, values
        keys, values = self.views[layer]
        return keys.narrow(1, 0, self.length), values.narrow(1, 0, self.length)


class StepPlan:
    """Where each token of a packed batch lies and what it attends to. Rows are reordered: see ``order``. Where each row
    has one token, ``advance`` makes the plan of the next."""

    def __init__(self, rows: list[RowWork], store: KvStore, device: torch.device) -> None:
        self.store = store
        self.order = sorted(range(len(rows)), key=lambda index: (*_bucket(rows[index]), rows[index].slot))
        ordered = [rows[index] for index in self.order]
        counts = np.array([len(row.tokens) for row in ordered])
        starts = np.array([row.start for row in ordered])
        slots = np.array([row.slot for row in ordered])
        store.written(slots, starts + counts)
        ends = np.cumsum(counts)
        offsets = ends - counts
        positions = np.arange(ends[-1]) + np.repeat(starts - offsets, counts)
        heads = np.arange(store.heads)
        slot_of = np.repeat(slots, counts)[:, None, None] + np.array([[[0], [store.slots]]])  # of keys, of values
        places = (slot_of * store.heads + heads) * store.max_len + positions[:, None, None]
        self.slots, self._ends, self._widest = slots, starts + counts, int(counts.max())
        self._device = device
        self.tokens = self._tensor(np.concatenate([row.tokens for row in ordered]))
        self.positions = self._tensor(positions)
        self.last = ends - 1  # packed index of each ordered row's last new token
        self._places = self._tensor(places.reshape(-1))
        self._groups: list[_Group] = []
        first = 0
        for index in range(1, len(ordered) + 1):
            if index == len(ordered) or _bucket(ordered[index]) != _bucket(ordered[first]):
                self._groups.append(self._group(slice(first, index), slots, starts, counts, offsets))
                first = index

    def advance(self, tokens: np.ndarray) -> bool:
        """Each row's next token (int32 [B], rows as in ``order``). False where that takes a new plan: a row that had
        several tokens, or that grows out of its group."""
        room = np.searchsorted(LENGTH_BUCKETS, self._ends)
        if self._widest > 1 or (room != np.searchsorted(LENGTH_BUCKETS, self._ends + 1)).any():
            return False
        self._ends += 1
        self.store.written(self.slots, self._ends)
        self.tokens.copy_(torch.from_numpy(tokens))
        self.positions += 1
        self._places += 1  # positions follow each other within a slot
        for group in self._groups:
            group.advance()
        return True

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self._device)

    def _group(
        self, rows: slice, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, offsets: np.ndarray
    ) -> _Group:
        slots, starts, counts, offsets = slots[rows], starts[rows], counts[rows], offsets[rows]
        width = int(counts.max())
        places = np.arange(width)
        real = places < counts[:, None]
        gather = np.where(real, offsets[:, None] + places, offsets[:, None])
        padded = not bool(real.all())
        return _Group(
            both=self._tensor(np.concatenate((slots, slots + self.store.slots))),
            first=int(slots[0]) if (np.diff(slots) == 1).all() else None,
            length=int((starts + counts).max()),
            gather=self._tensor(gather.reshape(-1)) if padded else None,
            scatter=self._tensor(np.flatnonzero(real)) if padded else None,
            packed=slice(int(offsets[0]), int(offsets[-1] + counts[-1])),
            rows=len(counts),
            width=width,
            positions=self._tensor(np.where(real, starts[:, None] + places, 0)),
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        new: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """``query`` [N, heads, D], ``new`` [N, 2, kv_heads, D] (keys, values) -> [N, heads, D]."""
        size = self.store.head_dim
        self.store.vectors[layer].index_copy_(0, self._places, new.reshape(-1, size))
        if len(self._groups) == 1 and self._groups[0].gather is None:
            return self._attend(self._groups[0], layer, query, scale, window)
        result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in self._groups:
            part = query[group.packed] if group.gather is None else query.index_select(0, group.gather)
            out = self._attend(group, layer, part, scale, window)
            result[group.packed] = out if group.scatter is None else out.index_select(0, group.scatter)
        return result

    def _attend(self, group: _Group, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """One group, padded: ``query`` [b * T, heads, D] -> the same shape. Heads that share a key-value head become
        further queries of it: nothing is repeated in memory."""
        store, rows, width = self.store, group.rows, group.width
        heads, size = query.shape[1:]
        kv_heads, repeats = store.heads, heads // store.heads
        keys, values = group.stored(layer, store)
        if width == 1 and query.dtype == torch.float32 and query.device.type == "cpu":
            # One token a row: there the fused kernel costs more than its parts.
            mask = group.mask(window, query.dtype, kv_heads, repeats)
            queries = query.reshape(rows * kv_heads, repeats, size)
            scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale)
            return torch.bmm(scores.softmax(-1), values).view(rows, heads, size)
        keys, values = (part.view(rows, kv_heads, group.length, size) for part in (keys, values))
        mask = group.mask(window, query.dtype, 1, repeats)[:, None]
        part = query.reshape(rows, width, kv_heads, repeats, size).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            part.reshape(rows, kv_heads, repeats * width, size), keys, values, attn_mask=mask, scale=scale
        )
        return out.view(rows, kv_heads, repeats, width, size).permute(0, 3, 1, 2, 4).reshape(-1, heads, size)


def _bucket(row: RowWork) -> tuple[int, int]:
    count = len(row.tokens)
    queries = sum(count > bound for bound in QUERY_BUCKETS)
    return queries, sum(row.start + count > bound for bound in LENGTH_BUCKETS)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    plan: StepPlan,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in place of its own attention: ``[1, heads, N, D]`` in, ``[1, N, heads, D]`` out."""
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("the torch engine does not run attention with soft caps or sinks; use engine=vllm")
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    out = plan.attend(layer, query, torch.stack((key, value), 1), scale=scaling, window=sliding_window)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, attend)
