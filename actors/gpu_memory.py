"""A process's share of its GPU's memory: torch's allocator refuses what goes beyond it.

Invariant: without a GPU nothing happens; with one, this process takes at most the share that it was started with, so
that what is in reserve stays free for whoever else computes there (a swap of weights, a second engine, the driver).
"""

from __future__ import annotations

import os

import torch

GPU_SHARE = "ROLLART_GPU_SHARE"
"""Environment variable of a child process: a number above 0, 1 at most."""


def keep_to_share() -> float | None:
    """Limit this process; returns the share, or None where there is no GPU or none was given. Raises ``ValueError``."""
    share = given_share()
    if share is None or not torch.cuda.is_available():
        return None
    torch.cuda.set_per_process_memory_fraction(share)
    return share


def given_share() -> float | None:
    """What this process was started with. Raises ``ValueError``."""
    text = os.environ.get(GPU_SHARE, "")
    if not text:
        return None
    share = float(text)
    if not 0 < share <= 1:
        raise ValueError(f"{GPU_SHARE}: expected a number above 0, 1 at most, found {text!r}")
    return share
