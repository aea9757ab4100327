"""Causal attention for megatron-core by torch's own kernel, which never writes the matrix of scores down.

Invariant: what ``DotProductAttention`` computes under a causal mask, to rounding, without dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention


class CausalAttention(torch.nn.Module):
    """In place of megatron-core's ``DotProductAttention``, with its signature."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """``query`` [T, B, heads, D], ``key`` and ``value`` [T, B, groups, D] -> [T, B, heads x D]."""
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
        return attended.permute(2, 0, 1, 3).flatten(2)
