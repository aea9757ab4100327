"""What both engines need to know about weights: a policy's precision and a tensor's digest.

Invariant: a tensor has one digest wherever it is taken, over its bytes in row-major order.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from actors.weightsync.manifest import digest


def tensor_digest(tensor: torch.Tensor) -> str:
    """``actors.weightsync.manifest.digest`` of a tensor of any dtype, shape and device."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return digest(memoryview(flat.view(torch.uint8).numpy()))


def policy_dtype(policy_dir: Path) -> str:
    """The precision that ``config.json`` names (``torch_dtype`` in older ones); float32 where it names none."""
    config = json.loads((policy_dir / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
