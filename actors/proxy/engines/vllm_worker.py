"""What the engine's weights pass through inside vLLM's worker.

Invariant: after ``take_weights`` every layer computes with the tensors given, the language-model head included.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class WeightTaker:
    """vLLM mixes this class into its worker (``worker_extension_cls``)."""

    model_runner: Any

    def take_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Reload in place from Hugging Face names."""
        self.model_runner.reload_weights(weights_iterator=tensors)
        refresh_head(self.model_runner.get_model())


def refresh_head(model: Any) -> None:
    """Make the head compute with the weights just loaded. Where it is tied to the embedding, nothing is loaded under
    its own name, so vLLM's reload leaves the kernel that it prepared from the old weights."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(head)
