"""Process-wide settings of vLLM, which it reads while it is imported.

Invariant: ``prepare`` runs before anything imports vllm; what the user has set in the environment wins.
"""

from __future__ import annotations

import os
import tempfile

import torch

EVERYWHERE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core lives in this process: no socket, no orphan
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
WITHOUT_GPU = {"TORCHDYNAMO_DISABLE": "1"}


def prepare() -> bool:
    """Set the environment; returns whether there is a GPU."""
    gpu = torch.cuda.is_available()
    for name, value in (EVERYWHERE if gpu else EVERYWHERE | WITHOUT_GPU).items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_RPC_BASE_PATH", tempfile.gettempdir())
    return gpu
