"""The engine's side of a publication: all blocks of a version into host memory, checked to be complete.

Invariant: what ``fetch`` returns holds every byte of every tensor of the manifest exactly once; anything else raises.
Digests are not taken here but where the engine loads the tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from actors.core import Node, Ref
from actors.weightsync.manifest import Manifest, size_bytes
from actors.weightsync.messages import Block, Blocks, Fetch
from bus.message import Lane

BLOCK_TIMEOUT_S = 30.0


class IncompleteVersion(RuntimeError):
    """Blocks are missing, doubled or foreign; the message says which."""


class StagedVersion:
    """A version in host memory."""

    def __init__(self, manifest: Manifest, buffers: dict[str, np.ndarray]) -> None:
        self.manifest = manifest
        self._buffers = buffers
        self.bytes = sum(buffer.nbytes for buffer in buffers.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor, in the manifest's order, as views of the staged bytes."""
        for name, fact in self.manifest.tensors.items():
            dtype = getattr(torch, fact.dtype)
            flat = torch.from_numpy(self._buffers[name])
            yield name, (flat.view(dtype) if flat.numel() else flat.to(dtype)).view(fact.shape)


async def fetch(node: Node, source: Ref, manifest: Manifest) -> StagedVersion:
    """Stream a version from its publisher. Raises ``IncompleteVersion`` or what the stream raises."""
    buffers = {name: np.empty(size_bytes(fact.dtype, fact.shape), np.uint8) for name, fact in manifest.tensors.items()}
    filled = dict.fromkeys(buffers, 0)
    about = f"version {manifest.version}"
    stream = node.stream(
        source, Fetch(manifest.version), Blocks, timeout_s=BLOCK_TIMEOUT_S, lane=Lane.BULK, about=about
    )
    async with contextlib.aclosing(stream) as messages:
        async for message in messages:
            for block in message.blocks:
                _place(block, buffers, filled, about)
    short = [name for name, count in filled.items() if count != buffers[name].nbytes]
    if short:
        raise IncompleteVersion(f"{about}: {len(short)} tensors are incomplete, first {short[0]}")
    return StagedVersion(manifest, buffers)


def _place(block: Block, buffers: dict[str, np.ndarray], filled: dict[str, int], about: str) -> None:
    buffer = buffers.get(block.name)
    if buffer is None:
        raise IncompleteVersion(f"{about}: a block of {block.name}, which is not in the manifest")
    if block.data.dtype != np.uint8 or block.data.ndim != 1:
        raise IncompleteVersion(f"{about}: {block.name} came as {block.data.dtype} {block.data.shape}, not as bytes")
    end = block.offset + block.data.nbytes
    if block.offset != filled[block.name] or end > buffer.nbytes:
        raise IncompleteVersion(
            f"{about}: {block.name} has {filled[block.name]} of {buffer.nbytes} bytes, "
            f"and the next block is {block.data.nbytes} bytes at {block.offset}"
        )
    buffer[block.offset : end] = block.data
    filled[block.name] = end
