"""megatron-core's GPT model for a policy, built without Transformer Engine or fused kernels.

Invariant: it computes what transformers computes for the same weights, to rounding; dropout is off. A rank holds the
chunks of layers of its stage: one, or several with the interleaved schedule.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from actors.settings import TrainSettings
from actors.trainer.backends.megatron_attention import CausalAttention
from actors.trainer.backends.megatron_convert import Shape


class Mesh(msgspec.Struct, frozen=True):
    """How many ranks share a matrix, how many stages and replicas there are, and how they work together."""

    tensor: int
    pipeline: int
    data: int
    chunks: int  # of layers on one stage
    sequence: bool
    sharded: bool  # the optimizer

    @classmethod
    def of(cls, settings: TrainSettings) -> Mesh:
        """As a job asks for it."""
        return cls(
            tensor=settings.tensor_parallel,
            pipeline=settings.pipeline_parallel,
            data=settings.data_parallel,
            chunks=settings.virtual_pipeline,
            sequence=settings.sequence_parallel,
            sharded=settings.distributed_optimizer,
        )

    @property
    def arrangement(self) -> str:
        """What a checkpoint's parts depend on, beyond a rank's number of how many: "" with tensor parallelism alone."""
        differs = {
            "pipeline": self.pipeline if self.pipeline > 1 else 0,
            "chunks": self.chunks if self.chunks > 1 else 0,
            "data": self.data if self.data > 1 else 0,
            "sharded": int(self.sharded),
        }
        return " ".join(f"{name}={number}" for name, number in differs.items() if number)

    def stage_of(self, layer: int, layers: int) -> int:
        """Which stage computes a layer: chunks go round the stages."""
        return layer // (layers // (self.pipeline * self.chunks)) % self.pipeline


class Norm(torch.nn.RMSNorm):
    """Megatron's own wrapper refuses to compute on a part of the positions, which is all the same to a norm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)


def build_chunks(shape: Shape, mesh: Mesh, dtype: torch.dtype, seed: int) -> list[torch.nn.Module]:
    """This rank's parts of the model, their weights not yet filled in. Megatron's groups must be set up."""
    model_parallel_cuda_manual_seed(seed)
    config = _config(shape, mesh, dtype)
    layer: Any = get_gpt_layer_local_spec(qk_layernorm=shape.query_key_norm, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = CausalAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if shape.query_key_norm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
    of_chunk = shape.layers // (mesh.pipeline * mesh.chunks)
    chunks: list[torch.nn.Module] = []
    for number in range(mesh.chunks):
        vp_stage = number if mesh.chunks > 1 else None
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=TransformerBlockSubmodules([layer] * of_chunk, layer_norm=Norm),
                vocab_size=shape.padded_vocabulary(mesh.tensor),
                max_sequence_length=shape.positions,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                share_embeddings_and_output_weights=shape.tied,
                position_embedding_type="rope",
                rotary_base=shape.rotary_base,
                vp_stage=vp_stage,
            )
        )
    return chunks


def named_parameters(chunks: list[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Of all chunks, with layers numbered through the whole model."""
    named: dict[str, torch.nn.Parameter] = {}
    for chunk in chunks:
        model: Any = chunk
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in chunk.named_parameters():
            parts = name.split(".")
            if name.startswith("decoder.layers."):
                parts[2] = str(numbers[int(parts[2])])
            named[".".join(parts)] = parameter
    return named


def gather_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [R, padded vocabulary] of hidden states [R, H], whole on every rank that shares the head; the backward
    pass keeps the rank's own columns. Not by the output layer's own pass, which wants all positions."""
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    own = torch.nn.functional.linear(copy_to_tensor_model_parallel_region(hidden), weight)
    logits: torch.Tensor = gather_from_tensor_model_parallel_region(own)
    return logits


def _config(shape: Shape, mesh: Mesh, dtype: torch.dtype) -> TransformerConfig:
    interleaved = mesh.chunks > 1
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
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        virtual_pipeline_model_parallel_size=mesh.chunks if interleaved else None,
        sequence_parallel=mesh.sequence,
        # With two stages both neighbours are the same rank, and batched messages of both directions would be mixed up.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        calculate_per_token_loss=True,  # weights are of the whole batch: no mean over micro-batches
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
