"""The forward pass of known decoders for training, in fewer and larger operations than their modules take.

Invariant: hidden states and gradients are those of the transformers modules on the same parameters, up to rounding; the
parameters stay the model's own, under their names.

A training step of a small policy is half matrix products, half operations on activations. Here matrices with the same
input are one product, RMSNorm, rotary positions and SwiGLU are single steps of the graph that keep only what their
backward pass needs, and attention over short sequences is three plain products. Known are the structures of Llama,
Qwen2 and Qwen3 in float32 (in other precisions the order of rounding would differ from the modules').
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from actors.trainer.backends.shared_attention import Attended

KNOWN = ("qwen3", "qwen2", "llama")
PRECISIONS = (torch.float32, torch.float64)


def is_lean(model: Any) -> bool:
    """Whether ``LeanDecoder`` computes what this transformers causal language model of a known structure does."""
    return bool(model.config.hidden_act == "silu" and model.dtype in PRECISIONS)


class LeanDecoder:
    """See the module docstring. ``decoder`` is the model without its head, every layer with full attention."""

    def __init__(self, decoder: Any) -> None:
        self._embedding: nn.Parameter = decoder.embed_tokens.weight
        self._rotary = decoder.rotary_emb
        self._layers = [_Layer(layer) for layer in decoder.layers]
        self._norm = decoder.norm

    def __call__(
        self, tokens: torch.Tensor, depths: torch.Tensor, positions: torch.Tensor, plan: Attended
    ) -> torch.Tensor:
        """Last hidden state [M, H] at ``positions`` of ``tokens`` [T], of which each has ``depths`` [T] tokens before
        it and sees what ``plan`` says."""
        hidden = F.embedding(tokens, self._embedding)
        cosine, sine = (angle[0][:, None] for angle in self._rotary(hidden, depths[None]))
        half = sine.shape[-1] // 2
        angles = cosine, torch.cat((-sine[..., :half], sine[..., half:]), -1)
        *layers, last = self._layers
        for layer in layers:
            hidden = layer.mlp(layer.attend(hidden, angles, plan))
        chosen = last.attend(hidden, angles, plan).index_select(0, positions)
        return _norm(last.mlp(chosen), self._norm)


class _Layer:
    """One decoder layer, as its two residual steps."""

    def __init__(self, layer: Any) -> None:
        self._attention, self._mlp = layer.self_attn, layer.mlp
        self._before, self._after = layer.input_layernorm, layer.post_attention_layernorm
        attention = self._attention
        self._size = int(attention.head_dim)
        self._queries = attention.q_proj.out_features // self._size
        self._keys = attention.k_proj.out_features // self._size

    def attend(self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], plan: Attended) -> torch.Tensor:
        """``hidden`` [T, H] plus attention's share."""
        attention, turned = self._attention, self._queries + self._keys
        states = _joined(_norm(hidden, self._before), (attention.q_proj, attention.k_proj, attention.v_proj))
        states = states.view(len(hidden), -1, self._size)
        heads, values = torch.split(states, [turned, self._keys], 1)
        if hasattr(attention, "q_norm"):
            heads = _normed(heads, self._head_weights(), attention.q_norm.variance_epsilon)
        queries, keys = torch.split(_applied(_Rotate, heads, *angles), [self._queries, self._keys], 1)
        mixed = plan.attend(queries, keys, values, float(attention.scaling))
        return _added(hidden, mixed.flatten(1), attention.o_proj)

    def _head_weights(self) -> torch.Tensor:
        """[queries + keys, D]"""
        parts = ((self._attention.q_norm, self._queries), (self._attention.k_norm, self._keys))
        return torch.cat([norm.weight.expand(heads, self._size) for norm, heads in parts])

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [T, H] plus the feed-forward block's share."""
        opened = _joined(_norm(hidden, self._after), (self._mlp.gate_proj, self._mlp.up_proj))
        return _added(hidden, _applied(_SwiGlu, opened), self._mlp.down_proj)


def _joined(states: torch.Tensor, layers: Sequence[nn.Linear]) -> torch.Tensor:
    """The outputs of several linear layers, one after the other; either all have a bias, or none."""
    weights: list[torch.Tensor] = [layer.weight for layer in layers]
    biases: list[Any] = [layer.bias for layer in layers]
    return F.linear(states, torch.cat(weights), None if biases[0] is None else torch.cat(biases))


def _added(residual: torch.Tensor, states: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    total = torch.addmm(residual, states, layer.weight.t())
    return total if layer.bias is None else total + layer.bias


def _norm(states: torch.Tensor, norm: Any) -> torch.Tensor:
    return _normed(states, norm.weight, norm.variance_epsilon)


def _normed(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return _applied(_RmsNorm, states, weight, epsilon)


def _applied(function: type[torch.autograd.Function], *arguments: object) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _RmsNorm(torch.autograd.Function):
    """``states`` [T, ..., D] over their last dimension, times ``weight`` [..., D]."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        inverse = norm.square_().div_(states.shape[-1]).add_(epsilon).rsqrt_()
        normed: torch.Tensor = states * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        normed, inverse, weight = ctx.saved_tensors
        of_weight = (gradient * normed).sum(0)
        inner = gradient * weight
        along = (inner * normed).sum(-1, keepdim=True)  # what only makes the vector longer has no effect
        return inner.addcmul_(normed, along, value=-1 / normed.shape[-1]).mul_(inverse), of_weight, None


class _Rotate(torch.autograd.Function):
    """Rotary positions: ``heads`` [T, N, D]; cosines and sines [T, 1, D], the first half of the sines negative."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cosine: torch.Tensor, turning: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosine, turning)
        return torch.addcmul(heads * cosine, heads.roll(heads.shape[-1] // 2, -1), turning)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cosine, turning = ctx.saved_tensors
        turned = (gradient * turning).roll(gradient.shape[-1] // 2, -1)
        return turned.addcmul_(gradient, cosine), None, None


class _SwiGlu(torch.autograd.Function):
    """``opened`` [T, 2 F], gates then values -> silu(gates) * values [T, F]."""

    @staticmethod
    def forward(ctx: Any, opened: torch.Tensor) -> torch.Tensor:
        gate, up = opened.chunk(2, -1)
        active = F.silu(gate)
        ctx.save_for_backward(opened, active)
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        opened, active = ctx.saved_tensors
        gate, up = opened.chunk(2, -1)
        result = torch.empty_like(opened)
        of_gate, of_up = result.chunk(2, -1)
        torch.mul(gradient, active, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return result
