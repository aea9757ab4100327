"""The parts of a transformers model's forward pass that training needs.

Invariant: hidden states equal those of the model's own forward pass; where its structure is known, the last layer's
feed-forward block and the head are computed only at positions whose prediction is trained on, and prefixes that
segments share are computed once (see ``prefixes`` and ``shared_attention``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from actors.trainer.backends import shared_attention
from actors.trainer.backends.lean_decoder import KNOWN, LeanDecoder, is_lean
from actors.trainer.backends.packing import MicroBatch
from actors.trainer.backends.shared_attention import Attended


class Policy:
    """A model, and the parts of its forward pass that are needed: a policy, its reference or its critic.

    ``computes_trees``: whether ``hidden_states`` takes micro-batches that are a row of trees."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.model.eval()  # no dropout: the policy that is trained is the one that was sampled from
        self.decoder: Any = self.model.base_model
        self.width: int = self.model.config.hidden_size  # H
        self._lm_head: nn.Linear = self.model.get_output_embeddings()
        self._forward = _forward_of(self.model)
        self.computes_trees = self._forward is not None
        self.vocabulary: int = self._lm_head.weight.shape[0]

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Last hidden state [M, H] at ``positions`` of the flattened ``tokens`` [B, T], which pad on the right."""
        if self._forward is not None:
            rows, width = tokens.shape
            depths = torch.arange(width, device=tokens.device).repeat(rows)
            return self._forward(tokens.flatten(), depths, positions, shared_attention.Rows(width))
        hidden: torch.Tensor = self.decoder(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1)[positions]

    def hidden_states(self, micro: MicroBatch) -> torch.Tensor:
        """Last hidden state [M, H] that predicts each sampled token of a micro-batch."""
        if micro.row is None or self._forward is None:
            return self.hidden(micro.tokens, micro.positions)
        return tree_forward(self._forward, micro, self.decoder.dtype)

    def head(self, hidden: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Logits [R, A] of the given tokens, or of the whole vocabulary."""
        weight: torch.Tensor = self._lm_head.weight
        bias: torch.Tensor | None = self._lm_head.bias
        if token_ids is not None:
            weight = weight[token_ids]
            bias = None if bias is None else bias[token_ids]
        return nn.functional.linear(hidden, weight, bias)


def _forward_of(model: Any) -> LeanDecoder | Modules | None:
    """The pass over chosen positions and shared prefixes, where the structure is known."""
    kinds = getattr(model.config, "layer_types", None) or []
    if model.config.model_type not in KNOWN or any(kind != "full_attention" for kind in kinds):
        return None
    if is_lean(model):
        return LeanDecoder(model.base_model)
    model.set_attn_implementation(shared_attention.NAME)
    return Modules(model.base_model)


class Modules:
    """A known structure by its transformers modules, for precisions in which the order of rounding matters. Takes and
    returns what ``LeanDecoder`` does."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def __call__(
        self, tokens: torch.Tensor, depths: torch.Tensor, positions: torch.Tensor, plan: Attended
    ) -> torch.Tensor:
        decoder = self._decoder
        hidden = decoder.embed_tokens(tokens[None])
        position_ids = depths[None]
        rotary = decoder.rotary_emb(hidden, position_ids)
        *layers, last = decoder.layers
        for layer in layers:
            hidden = layer(hidden, position_embeddings=rotary, position_ids=position_ids, plan=plan)
        attended, _ = last.self_attn(
            hidden_states=last.input_layernorm(hidden), position_embeddings=rotary, attention_mask=None, plan=plan
        )
        chosen = hidden[0, positions] + attended[0, positions]
        chosen = chosen + last.mlp(last.post_attention_layernorm(chosen))
        result: torch.Tensor = decoder.norm(chosen)
        return result


def tree_forward(forward: LeanDecoder | Modules, micro: MicroBatch, dtype: torch.dtype) -> torch.Tensor:
    """The last hidden state at ``micro.positions`` of its row of trees, for weights of ``dtype``."""
    if micro.row is None:
        raise ValueError("expected a micro-batch that is a row of trees, found padded segments")
    device = micro.tokens.device
    plan = shared_attention.make_plan(micro.row, device, dtype)
    # Members that diverge at a place predict from it together.
    positions, members = torch.unique(micro.positions, return_inverse=True)
    depths = torch.from_numpy(micro.row.depths).to(device)
    return forward(micro.tokens[0], depths, positions, plan)[members]
