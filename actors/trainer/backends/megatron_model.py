"""megatron-core's GPT model for a policy, built without Transformer Engine or fused kernels.

Invariant: it computes what transformers computes for the same weights, to rounding; dropout is off.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from actors.trainer.backends.megatron_attention import CausalAttention
from actors.trainer.backends.megatron_convert import Shape


def build_gpt(shape: Shape, ranks: int, dtype: torch.dtype, seed: int) -> torch.nn.Module:
    """This rank's part of the model, its weights not yet filled in. Megatron's groups must be set up."""
    model_parallel_cuda_manual_seed(seed)
    model: torch.nn.Module = GPTModel(
        config=_config(shape, ranks, dtype),
        transformer_layer_spec=_layer_spec(shape),
        vocab_size=shape.padded_vocabulary(ranks),
        max_sequence_length=shape.positions,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rotary_base,
    )
    return model


def _layer_spec(shape: Shape) -> Any:
    spec: Any = get_gpt_layer_local_spec(qk_layernorm=shape.query_key_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec


def gather_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [R, padded vocabulary] of hidden states [R, H], whole on every rank; the backward pass keeps the rank's
    own columns."""
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    sharded, _ = model.output_layer(hidden[:, None], weight=weight)
    logits: torch.Tensor = gather_from_tensor_model_parallel_region(sharded)
    return logits[:, 0]


def _config(shape: Shape, ranks: int, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        qk_layernorm=shape.query_key_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
