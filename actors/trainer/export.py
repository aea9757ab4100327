"""A backend's weights as a model directory that ``policy.path``, transformers and vLLM can load.

Invariant: the file appears whole or not at all, and holds every weight under its Hugging Face name (a tied
``lm_head.weight`` is left out, as ``save_pretrained`` does).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

WEIGHTS_FILE = "model.safetensors"


def write_weights(directory: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write ``model.safetensors`` into an existing directory. Raises ``OSError``."""
    partial = directory / f".{WEIGHTS_FILE}.partial"
    save_file(dict(tensors), partial, metadata={"format": "pt"})
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    partial.replace(directory / WEIGHTS_FILE)
