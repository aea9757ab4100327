"""Training in one process with the transformers model itself, on the CPU or on one GPU.

Invariant: hidden states equal those of the model's own forward pass; where its structure is known, the last layer's
feed-forward block and the head are computed only at positions whose prediction is trained on, and prefixes that
segments share are computed once (see ``prefixes`` and ``shared_attention``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from actors.policy import PolicyError
from actors.settings import TrainSettings
from actors.trainer.backends import shared_attention
from actors.trainer.backends.common import PolicyBackend
from actors.trainer.backends.lean_decoder import KNOWN, LeanDecoder, is_lean
from actors.trainer.backends.packing import MicroBatch
from actors.trainer.backends.scoring import sampled_logprobs
from actors.trainer.backends.shared_attention import Attended
from actors.trainer.checkpointing import Layout
from actors.trainer.model import build_model, hf_state


class TorchBackend(PolicyBackend):
    """See ``actors.trainer.backends.protocol.Backend``. Raises ``PolicyError`` for an unusable ``policy_dir``."""

    def __init__(self, policy_dir: Path, *, seed: int, settings: TrainSettings, dtype: str, from_scratch: bool) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._policy = Policy(build_model(policy_dir, seed=seed, dtype=dtype, from_scratch=from_scratch).to(device))
        self.computes_trees = self._policy.computes_trees
        self._compared_with = None
        if settings.reference is not None:
            initial = settings.reference == "initial"
            model = build_model(
                policy_dir if initial else Path(settings.reference),
                seed=seed,
                dtype=dtype,
                from_scratch=initial and from_scratch,
            )
            self._compared_with = Policy(model.to(device))
            _refuse_other_vocabulary(self._compared_with, self._policy, settings.reference)
        torch.manual_seed(seed)
        super().__init__(
            settings=settings,
            vocabulary=self._policy.vocabulary,
            parameters=dict(self._policy.model.named_parameters()),
            device=device,
            layout=Layout(backend="torch", rank=0, world_size=1),
        )

    def _hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._policy.hidden(tokens, positions)

    def _hidden_states(self, micro: MicroBatch) -> torch.Tensor:
        return self._policy.hidden_states(micro)

    def _head(self, hidden: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        return self._policy.head(hidden, token_ids)

    def _reference(self, micro: MicroBatch) -> torch.Tensor:
        if self._compared_with is None:
            raise ValueError("train.reference: expected initial or a model directory, found none")
        return sampled_logprobs(self._compared_with.hidden_states(micro), self._compared_with.head, micro)[0]

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See the protocol."""
        for name, tensor in hf_state(self._policy.model).items():
            yield name, tensor.detach().to("cpu", copy=True).contiguous()


class Policy:
    """A model, and the parts of its forward pass that are needed: the policy that is trained, or its reference.

    ``computes_trees``: whether ``hidden_states`` takes micro-batches that are a row of trees."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.model.eval()  # no dropout: the policy that is trained is the one that was sampled from
        self._decoder: Any = self.model.base_model
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
        hidden: torch.Tensor = self._decoder(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1)[positions]

    def hidden_states(self, micro: MicroBatch) -> torch.Tensor:
        """Last hidden state [M, H] that predicts each sampled token of a micro-batch."""
        if micro.row is None or self._forward is None:
            return self.hidden(micro.tokens, micro.positions)
        return tree_forward(self._forward, micro, self._decoder.dtype)

    def head(self, hidden: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Logits [R, A] of the given tokens, or of the whole vocabulary."""
        weight: torch.Tensor = self._lm_head.weight
        bias: torch.Tensor | None = self._lm_head.bias
        if token_ids is not None:
            weight = weight[token_ids]
            bias = None if bias is None else bias[token_ids]
        return nn.functional.linear(hidden, weight, bias)


def _refuse_other_vocabulary(reference: Policy, policy: Policy, where: str) -> None:
    """Also where it has no trees, but the policy has: a micro-batch is laid out for both."""
    if reference.vocabulary != policy.vocabulary:
        raise PolicyError(
            f"train.reference: {where} has a vocabulary of {reference.vocabulary} tokens, the policy one of "
            f"{policy.vocabulary}"
        )
    if policy.computes_trees and not reference.computes_trees:
        raise PolicyError(f"train.reference: {where} is of an architecture that cannot share prefixes as the policy's")


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
