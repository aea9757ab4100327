"""A model's forward pass over a packed batch, as the torch engine wants it.

Invariant: whichever way a model is run, its logits are those of its transformers class on the same weights, and
loading a weight by its name in place is all that a new version takes.

Transformers' modules cost several times what they compute where a step is one token for each of some dozen rows of a
small policy. ``Decoder`` calls the same arithmetic without them, for the structures that it knows (float32 Llama,
Qwen2 and Qwen3: RMSNorm, rotary positions, grouped queries, SwiGLU); any other model runs as transformers wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from actors.proxy.engines.torch_attention import StepPlan

Forward = Callable[[StepPlan, torch.Tensor], torch.Tensor]
"""A plan and packed places int64 [K], ascending -> logits [K, V] at those places; fills the plan's slots."""

KNOWN = ("llama", "qwen2", "qwen3")


FIXED_ANGLES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles depend on the position alone; those of others also on how long a row is."""


def forward_of(model: Any, max_model_len: int) -> Forward:
    """The fastest forward pass there is for a transformers causal language model; ``attend`` is its attention."""
    config = model.config
    plain = config.hidden_act == "silu" if config.model_type in KNOWN else False
    # In other precisions the order of rounding would differ from what the trainer's modules do.
    return Decoder(model, max_model_len) if plain and model.dtype == torch.float32 else Modules(model)


class Modules:
    """The model as transformers runs it."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, plan: StepPlan, keep: torch.Tensor) -> torch.Tensor:
        output = self._model(
            input_ids=plan.tokens[None],
            position_ids=plan.positions[None],
            logits_to_keep=keep,
            use_cache=False,
            plan=plan,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


class Decoder:
    """The known structures, by their weights. Matrices with the same input become one, whose rows the model's own
    parameters are from then on."""

    def __init__(self, model: Any, max_model_len: int) -> None:
        self._embedding: torch.Tensor = model.model.embed_tokens.weight
        self._head: torch.Tensor = model.lm_head.weight
        self._layers = [_Layer(index, layer) for index, layer in enumerate(model.model.layers)]
        self._norm = _Norm(model.model.norm)
        self._rotary = _Rotary(model.model.rotary_emb, self._embedding, max_model_len)

    def __call__(self, plan: StepPlan, keep: torch.Tensor) -> torch.Tensor:
        hidden = F.embedding(plan.tokens, self._embedding)
        cosine, turning = self._rotary(plan.positions)
        for layer in self._layers:
            layer(hidden, cosine, turning, plan)
        if len(keep) < len(hidden):
            hidden = hidden.index_select(0, keep)
        return F.linear(self._norm(hidden), self._head)


class _Rotary:
    """Cosines and sines of positions. They are looked up where a position's never change: the module computes them with
    a dozen small operations."""

    def __init__(self, module: Any, like: torch.Tensor, max_model_len: int) -> None:
        self._module, self._like = module, like
        self._table: torch.Tensor | None = None
        if module.rope_type in FIXED_ANGLES:
            self._table = self._compute(torch.arange(max_model_len, device=like.device))

    def __call__(self, positions: torch.Tensor) -> Sequence[torch.Tensor]:
        """int64 [N] -> cosines and turning sines, each [N, 1, D]."""
        angles = self._compute(positions) if self._table is None else self._table.index_select(0, positions)
        return angles.unbind(1)

    def _compute(self, positions: torch.Tensor) -> torch.Tensor:
        """[N, 2, 1, D]; the sines are those of ``[b, a]`` instead of ``[-b, a]``."""
        cosine, sine = (angle[0] for angle in self._module(self._like, positions[None]))
        half = sine.shape[-1] // 2
        turning = torch.cat((-sine[:, :half], sine[:, half:]), -1)
        return torch.stack((cosine, turning), 1)[:, :, None]


class _Layer:
    """One decoder layer."""

    def __init__(self, index: int, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        self._before, self._after = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._project = _Linear.joined((attention.q_proj, attention.k_proj, attention.v_proj))
        self._output = _Linear.joined((attention.o_proj,))
        self._open = _Linear.joined((mlp.gate_proj, mlp.up_proj))
        self._close = _Linear.joined((mlp.down_proj,))
        self._size = int(attention.head_dim)
        self._queries = attention.q_proj.out_features // self._size
        self._keys = attention.k_proj.out_features // self._size
        self._norms = _HeadNorms(attention, self._queries, self._keys) if hasattr(attention, "q_norm") else None
        self._scale = float(attention.scaling)
        self._window: int | None = getattr(attention, "sliding_window", None)

    def __call__(self, hidden: torch.Tensor, cosine: torch.Tensor, turning: torch.Tensor, plan: StepPlan) -> None:
        """``hidden`` [N, hidden size] becomes the next layer's; ``cosine`` and ``turning`` are [N, 1, D]."""
        count, size, queries, turned = len(hidden), self._size, self._queries, self._queries + self._keys
        states = self._project(self._before(hidden)).view(count, turned + self._keys, size)
        both = states[:, :turned]
        plain = both if self._norms is None else self._norms(both)
        torch.addcmul(plain * cosine, plain.roll(size // 2, -1), turning, out=both)
        new = states[:, queries:].view(count, 2, self._keys, size)
        mixed = plan.attend(self._index, states[:, :queries], new, scale=self._scale, window=self._window)
        self._output.add_to(hidden, mixed.reshape(count, -1))
        gate, up = self._open(self._after(hidden)).chunk(2, -1)
        self._close.add_to(hidden, F.silu(gate, inplace=True).mul_(up))


class _Norm:
    """RMSNorm: what the module computes in float32, in one call."""

    def __init__(self, module: Any) -> None:
        self.weight: torch.Tensor = module.weight
        self.epsilon = float(module.variance_epsilon)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(states, self.weight.shape, self.weight, self.epsilon)


class _HeadNorms:
    """RMSNorm of each head, with one weight for the queries' and one for the keys'."""

    def __init__(self, attention: Any, queries: int, keys: int) -> None:
        parameters = [attention.q_norm.weight, attention.k_norm.weight]
        self._weights = _joined(parameters).view(2, -1)
        self._of_head = torch.tensor([0] * queries + [1] * keys, device=self._weights.device)
        self._epsilon = float(attention.q_norm.variance_epsilon)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """[N, queries + keys, D]"""
        weights = self._weights.index_select(0, self._of_head)
        return F.rms_norm(heads, heads.shape[-1:], None, self._epsilon).mul_(weights)


class _Linear:
    """A matrix [out, in], with a bias [out] or none."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._transposed = weight.t()

    @classmethod
    def joined(cls, modules: Sequence[nn.Linear]) -> _Linear:
        """One for several of the same input; their outputs follow each other."""
        weight = _joined([module.weight for module in modules])
        biases = [module.bias for module in modules if module.bias is not None]
        if biases and len(biases) != len(modules):
            raise ValueError(f"expected a bias in each of the {len(modules)} joined layers or in none: {modules}")
        return cls(weight, _joined(biases) if biases else None)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, states: torch.Tensor) -> None:
        residual.addmm_(states, self._transposed)
        if self._bias is not None:
            residual.add_(self._bias)


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parameters end to end, in memory that they share from now on."""
    if len(parameters) == 1:
        return parameters[0]
    whole = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = whole[start : start + len(parameter)]
        start += len(parameter)
    return whole
