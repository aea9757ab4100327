"""What both engines need to know about weights: a policy's precision and tensors, and a tensor's digest.

Invariant: a tensor has one digest wherever it is taken, over its bytes in row-major order.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from actors.weightsync.manifest import digest


def tensor_digest(tensor: torch.Tensor) -> str:
    """``actors.weightsync.manifest.digest`` of a tensor of any dtype, shape and device."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return digest(flat.view(torch.uint8).numpy().data)


def policy_dtype(policy_dir: Path) -> str:
    """The precision that ``config.json`` names (``torch_dtype`` in older ones); float32 where it names none."""
    config = json.loads((policy_dir / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def policy_tensors(policy_dir: Path) -> dict[str, torch.Size]:
    """Name and shape of every tensor of the policy, from its configuration alone; a tied head is not among them."""
    config = AutoConfig.from_pretrained(policy_dir, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tensor.shape for name, tensor in model.named_parameters()}


def gather(
    version: int, tensors: Iterable[tuple[str, torch.Tensor]], expected: dict[str, torch.Size]
) -> list[tuple[str, torch.Tensor]]:
    """Receive all tensors before the first one is put to use, so that a sender that fails half-way leaves a model
    that can still be loaded. Raises ``ValueError`` for a tensor that the policy does not have; one that is missing
    is for the receipt to find."""
    arrived = []
    for name, tensor in tensors:
        shape = expected.get(name)
        if shape != tensor.shape:
            wanted = "has no tensor of this name" if shape is None else f"wants shape {tuple(shape)}"
            raise ValueError(f"version {version}: got {name} of shape {tuple(tensor.shape)}, the policy {wanted}")
        arrived.append((name, tensor))
    return arrived


SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def passed_on(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[Path]:
    """A safetensors file for processes of this host, as long as the block runs: in memory where there is room."""
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * size
    with tempfile.TemporaryDirectory(prefix="rollart-weights-", dir=SHARED_MEMORY if roomy else None) as directory:
        path = Path(directory) / "weights.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors}, path)
        yield path
