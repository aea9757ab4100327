"""What a request costs on a hardware class: seconds of prefill and of a decoding step, from roofline and model size.

Invariant: a pure function of its arguments; the only fitted figures are the two efficiencies of a class: those below,
whose origin is said beside them, until ``fitting`` has learned better ones from a run.

    prefill(n tokens) = 2 P n / (FLOP/s x efficiency)
    step(batch B, context C) = max(2 P B / (FLOP/s x efficiency), (W + B C k) / (bytes/s x efficiency))

with P parameters, W bytes of weights, k bytes of keys and values a token: every parameter is one multiply-add a token,
a step reads all weights once and each sequence's cache. Attention's own FLOPs are left out: below 32k tokens they are a
small part of either (Qwen3-32B at 32k: about a fifth of prefill).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hwprobe.roofline import GIB, lookup_class

RESERVE = 0.15
"""Share of a device's memory that engines leave free (the brief's)."""


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a class reaches of its peaks."""

    compute: float
    bandwidth: float


EFFICIENCY = {
    # Fitted so that prefill of one model on H800 is 3.2 times as fast as on H20 (their peaks: 6.7) and decoding on H20
    # 1.41 times as fast as on H800 (their bandwidths: 1.19), as the brief has measured; 0.8 of an H20 is the anchor.
    # The 3.2 is of Qwen3-32B, which the paper serves on four devices: presumably with what they exchange. Of one device
    # there is no measurement; benchmarks.proxy infers 5.3 there, by assuming what the link reaches.
    "H20": Efficiency(compute=0.80, bandwidth=0.80),
    "H800": Efficiency(compute=0.80 * (148 / 989.5) * 3.2, bandwidth=0.80 * (4.0 / 3.35) / 1.41),
}
USUAL = Efficiency(compute=0.45, bandwidth=0.70)
"""Of classes that nobody has measured."""


class ModelSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A dense decoder, as far as cost goes; the default is Qwen3-8B."""

    parameters: float = 8.2e9
    layers: int = 36
    kv_heads: int = 8
    head_dim: int = 128
    bytes_per_value: int = 2  # bf16

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_value

    @property
    def cache_bytes(self) -> int:
        """Of one token: a key and a value in every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value


class DeviceCost(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's speed: of one device, or of several that share the model (``devices``)."""

    hardware_class: str
    flops: float  # FLOP/s that are reached, of all its devices
    bandwidth: float  # bytes/s that are reached
    memory_bytes: float
    devices: int = 1

    def prefill_s(self, model: ModelSize, tokens: float) -> float:
        return 2 * model.parameters * tokens / self.flops

    def step_s(self, model: ModelSize, batch: float, context: float) -> float:
        """One token for each of ``batch`` sequences that are ``context`` tokens long on average."""
        compute = 2 * model.parameters * batch / self.flops
        return max(compute, (model.weight_bytes + batch * context * model.cache_bytes) / self.bandwidth)

    def train_s(self, model: ModelSize, tokens: float) -> float:
        """Forward and backward: three times the multiply-adds of a prefill."""
        return 3 * self.prefill_s(model, tokens)

    def cache_tokens(self, model: ModelSize, *, share: float = 1 - RESERVE) -> int:
        """Tokens whose caches fit beside the weights in this share of the memory; 0: not even the weights do."""
        return max(0, int((self.memory_bytes * share - model.weight_bytes) / model.cache_bytes))

    def places(self, model: ModelSize, context: float, ceiling: int) -> int:
        """Sequences of this length whose caches fit beside the weights and the reserve."""
        return min(ceiling, int(self.cache_tokens(model) / context))


def model_size(config: Mapping[str, Any], *, bytes_per_value: int = 2) -> ModelSize:
    """Of a decoder with grouped-query attention and SwiGLU (Qwen3, Qwen2, Llama), from its ``config.json``. Raises
    ``KeyError`` where that lacks something."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    feed_forward = 3 * hidden * config["intermediate_size"]
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelSize(
        parameters=float(layers * (attention + feed_forward) + embeddings),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        bytes_per_value=bytes_per_value,
    )


def device_cost(
    hardware_class: str, model: ModelSize, memory_gib: float | None = None, efficiency: Efficiency | None = None
) -> DeviceCost:
    """The smallest engine that holds the model with as much again for caches as a tenth of the memory: 1, 2, 4 or 8
    devices. ``efficiency``: as measured; default: as it is known, or usual. Raises ``ValueError`` for a class without
    figures and for a model that fits no engine."""
    figures = lookup_class(hardware_class)
    if figures is None:
        raise ValueError(f"hardware class {hardware_class}: no figures in the built-in table (hwprobe.roofline)")
    efficiency = efficiency or EFFICIENCY.get(hardware_class, USUAL)
    memory = figures.memory_bytes if memory_gib is None else memory_gib * GIB
    for devices in (1, 2, 4, 8):
        if memory * devices * (1 - RESERVE - 0.1) >= model.weight_bytes:
            return DeviceCost(
                hardware_class=hardware_class,
                flops=figures.peak_bf16_flops * efficiency.compute * devices,
                bandwidth=figures.bandwidth * efficiency.bandwidth * devices,
                memory_bytes=memory * devices,
                devices=devices,
            )
    raise ValueError(
        f"hardware class {hardware_class}: {model.weight_bytes / GIB:.0f} GiB of weights fit no engine of up to 8"
        f" devices with {memory / GIB:.0f} GiB each"
    )
