"""Which model is trained: a shape to start from random weights, or a Hugging Face model directory.

Importable without torch: the control process writes ``config.json`` from here, the processes that hold weights
build the model from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec


class PolicyError(ValueError):
    """A policy directory that cannot be used: names the file and says what was expected of it."""


class Qwen3Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Qwen3 decoder (grouped-query attention, RMSNorm on queries and keys, SwiGLU, rotary positions)."""

    vocab_size: int = 264
    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    max_positions: int = 2048
    tied_embeddings: bool = True

    def hugging_face_config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied_embeddings,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": 257,
            "pad_token_id": 256,
            "dtype": "float32",
        }


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``path`` names a Hugging Face directory; without it ``shape`` starts from random weights."""

    path: str | None = None
    shape: Qwen3Shape = Qwen3Shape()
    tokenizer: str | None = None  # "bytes" or a directory; default: bytes for a shape, the model's own for a path
    dtype: Literal["float32", "bfloat16"] = "float32"


def write_config(shape: Qwen3Shape, directory: Path) -> None:
    """Write ``config.json`` for a policy that starts from a shape."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.hugging_face_config(), indent=2) + "\n")
