"""Hugging Face weights to one rank's Megatron shards, and back, bit for bit.

Invariant: ``merge`` over all ranks of ``split`` is the identity. Nothing is computed: rows are reordered, cut and,
for the vocabulary, padded with zero rows that no token reaches.

Layouts, with tensor parallelism over R ranks (Megatron-LM, arXiv 1909.08053):
- ``linear_qkv``: for each group of query heads, the group's queries, then its key, then its value; ranks take
  consecutive groups.
- ``linear_fc1``: the rank's part of the gate, then its part of the up projection.
- ``linear_proj``, ``linear_fc2``: columns are cut. ``word_embeddings``, ``output_layer``: rows are cut, padded so that
  every rank has equally many, a multiple of ``VOCABULARY_MULTIPLE``.
- norms lie whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from actors.policy import PolicyError

VOCABULARY_MULTIPLE = 64
"""Rows of the vocabulary on one rank are a multiple of this, for the sake of matrix units."""


class Shape(msgspec.Struct, frozen=True):
    """What the conversion and the Megatron model need to know of a policy."""

    layers: int
    hidden: int
    heads: int
    groups: int  # key-value heads
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    norm_epsilon: float
    rotary_base: float
    tied: bool
    query_key_norm: bool  # Qwen3
    qkv_bias: bool  # Qwen2

    def padded_vocabulary(self, ranks: int) -> int:
        """Rows of the embedding over all ranks."""
        multiple = VOCABULARY_MULTIPLE * ranks
        return -(-self.vocabulary // multiple) * multiple


def shape_of(config: Any) -> Shape:
    """Read a transformers configuration. Raises ``PolicyError`` for a model that Megatron is not set up for here."""
    kind = config.model_type
    if kind not in ("qwen3", "qwen2", "llama"):
        raise PolicyError(
            f"model_type {kind}: the megatron backend trains qwen3, qwen2 and llama; use train.backend=torch"
        )
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise PolicyError(f"rope_parameters {rope}: the megatron backend supports plain rotary positions only")
    windowed = [kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"]
    unsupported = {
        "sliding window": bool(windowed),
        "attention_bias": kind != "qwen2" and config.attention_bias,
        "mlp_bias": getattr(config, "mlp_bias", False),
        f"hidden_act {config.hidden_act}": config.hidden_act != "silu",
    }
    for name, found in unsupported.items():
        if found:
            raise PolicyError(f"{kind} with {name}: not supported by the megatron backend; use train.backend=torch")
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        norm_epsilon=config.rms_norm_eps,
        rotary_base=rope["rope_theta"],
        tied=config.tie_word_embeddings,
        query_key_norm=kind == "qwen3",
        qkv_bias=kind == "qwen2",
    )


class Rule(msgspec.Struct, frozen=True):
    """One Megatron parameter: which Hugging Face tensors it is made of and how."""

    megatron: str
    hugging_face: tuple[str, ...]
    sharded: bool  # False: lies whole on every rank
    split: Callable[[Sequence[torch.Tensor], int], list[torch.Tensor]]  # (tensors, ranks) -> each rank's shard
    merge: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]  # shards of all ranks -> tensors
    partial_gradient: bool = False  # whole on every rank, but its gradient there is only that of the rank's heads
    copy: bool = False  # the last stage's copy of the first stage's embedding, where they are tied


def rules(shape: Shape, *, stages: int = 1) -> list[Rule]:
    """Every parameter of the model, in Megatron's order; layers are numbered through the whole model."""
    result = [_vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight", shape)]
    for layer in range(shape.layers):
        result += _layer_rules(shape, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    result.append(_whole("decoder.final_layernorm.weight", "model.norm.weight"))
    if not shape.tied:
        result.append(_vocabulary("output_layer.weight", "lm_head.weight", shape))
    elif stages > 1:
        rule = _vocabulary("output_layer.weight", "model.embed_tokens.weight", shape)
        result.append(msgspec.structs.replace(rule, copy=True))
    return result


def split(chosen: Iterable[Rule], state: Mapping[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """One rank's Megatron parameters from the whole Hugging Face state."""
    return {
        rule.megatron: rule.split([state[name] for name in rule.hugging_face], ranks)[rank].contiguous()
        for rule in chosen
    }


def merge(rule: Rule, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The Hugging Face tensors of one rule from the shards of all ranks."""
    return dict(zip(rule.hugging_face, rule.merge(shards), strict=True))


def _layer_rules(shape: Shape, megatron: str, hf: str) -> list[Rule]:
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention = megatron + "self_attention."
    result = [
        _whole(megatron + "input_layernorm.weight", hf + "input_layernorm.weight"),
        _columns(attention + "linear_proj.weight", hf + "self_attn.o_proj.weight"),
        _qkv(attention + "linear_qkv.weight", tuple(f"{hf}{name}.weight" for name in qkv), shape),
    ]
    if shape.qkv_bias:
        result.append(_qkv(attention + "linear_qkv.bias", tuple(f"{hf}{name}.bias" for name in qkv), shape))
    if shape.query_key_norm:
        for theirs, ours in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
            rule = _whole(f"{attention}{theirs}.weight", f"{hf}self_attn.{ours}.weight")
            result.append(msgspec.structs.replace(rule, partial_gradient=True))
    gate_up = (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight")
    result += [
        _whole(megatron + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight"),
        _gate_up(megatron + "mlp.linear_fc1.weight", gate_up),
        _columns(megatron + "mlp.linear_fc2.weight", hf + "mlp.down_proj.weight"),
    ]
    return result


def _whole(megatron: str, hf: str) -> Rule:
    return Rule(megatron, (hf,), False, lambda tensors, ranks: [tensors[0]] * ranks, lambda shards: [shards[0]])


def _columns(megatron: str, hf: str) -> Rule:
    return Rule(
        megatron,
        (hf,),
        True,
        lambda tensors, ranks: list(tensors[0].chunk(ranks, dim=1)),
        lambda shards: [torch.cat(list(shards), dim=1)],
    )


def _gate_up(megatron: str, hf: tuple[str, ...]) -> Rule:
    def split_both(tensors: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
        gate, up = (tensor.chunk(ranks, dim=0) for tensor in tensors)
        return [torch.cat(pair) for pair in zip(gate, up, strict=True)]

    def merge_both(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]

    return Rule(megatron, hf, True, split_both, merge_both)


def _qkv(megatron: str, hf: tuple[str, ...], shape: Shape) -> Rule:
    queries = shape.heads // shape.groups * shape.head_dim  # rows of one group
    rows = [queries, shape.head_dim, shape.head_dim]

    def pack(tensors: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
        grouped = [t.reshape(shape.groups, n, *t.shape[1:]) for t, n in zip(tensors, rows, strict=True)]
        return list(torch.cat(grouped, dim=1).flatten(0, 1).chunk(ranks, dim=0))

    def unpack(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        whole = torch.cat(list(shards))
        grouped = whole.reshape(shape.groups, sum(rows), *whole.shape[1:])
        return [part.flatten(0, 1).contiguous() for part in torch.split(grouped, rows, dim=1)]

    return Rule(megatron, hf, True, pack, unpack)


def _vocabulary(megatron: str, hf: str, shape: Shape) -> Rule:
    def pad(tensors: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
        missing = shape.padded_vocabulary(ranks) - shape.vocabulary
        padded = torch.cat([tensors[0], tensors[0].new_zeros(missing, shape.hidden)])
        return list(padded.chunk(ranks, dim=0))

    def cut(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(list(shards))[: shape.vocabulary]]

    return Rule(megatron, (hf,), True, pad, cut)
