"""What the engine's weights pass through inside vLLM's worker.

Invariant: after ``take_weights`` every layer computes with the tensors given, the language-model head included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

from actors.proxy.engines.torch_weights import tensor_digest

KEEPING = (type(None), UnquantizedEmbeddingMethod)
"""What leaves a layer's weights as they were loaded."""


class WeightTaker:
    """vLLM mixes this class into its worker (``worker_extension_cls``)."""

    model_runner: Any

    def take_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        """Reload in place from Hugging Face names; returns the digest of every tensor, taken as it is loaded."""
        digests: dict[str, str] = {}

        def digested() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                digests[name] = tensor_digest(tensor)
                yield name, tensor

        model = self.model_runner.get_model()
        packed = packed_layers(model)
        if packed is None:
            self.model_runner.reload_weights(weights_iterator=digested())
        else:
            reload_packed(model, packed, digested())
        refresh_head(model)
        return digests

    def take_weights_from(self, path: str) -> dict[str, str]:
        """Likewise, out of a safetensors file: what a worker in a process of its own is given."""
        with safe_open(path, framework="pt") as file:
            return self.take_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118


def packed_layers(model: Any) -> list[Any] | None:
    """The layers of which a CPU keeps only what oneDNN made of their weights; ``None`` where that is not all that
    became of the weights as they were loaded."""
    if not current_platform.is_cpu():
        return None
    packed = []
    for layer in model.modules():
        method = type(getattr(layer, "quant_method", None))
        if method is UnquantizedLinearMethod:
            packed.append(layer)
        elif method not in KEEPING or _reshaped(layer):
            return None
    return packed


def _reshaped(layer: Any) -> bool:
    """Whether a tensor of this layer is no longer what weights are loaded into."""
    parameters, buffers = get_layerwise_info(layer).restore_metadata
    return any(getattr(layer, name).shape != told.shape for name, told in (parameters | buffers).items())


def reload_packed(model: Any, packed: list[Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """What vLLM's own reload comes to for such layers. That one passes every tensor through its loader twice, to count
    what it fills, which takes a small policy twice as long."""
    for layer in packed:
        for name, told in get_layerwise_info(layer).restore_metadata[0].items():
            layer.register_parameter(name, materialize_meta_tensor(restore_layer_refs(told, layer)))
    model.load_weights(tensors)
    for layer in packed:
        layer.quant_method.process_weights_after_loading(layer)


def refresh_head(model: Any) -> None:
    """Make the head compute with the weights just loaded. Where it is tied to the embedding, nothing is loaded under
    its own name, so vLLM's reload leaves the kernel that it prepared from the old weights."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(head)
