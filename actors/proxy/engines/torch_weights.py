"""The digest of a tensor, the same wherever it is taken: over its bytes as they lie in row-major order."""

from __future__ import annotations

import torch

from actors.weightsync.manifest import digest


def tensor_digest(tensor: torch.Tensor) -> str:
    """``actors.weightsync.manifest.digest`` of a tensor of any dtype, shape and device."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return digest(memoryview(flat.view(torch.uint8).numpy()))
