"""The trainer's side of a publication: private copies of the newest versions, served block by block.

Invariant: a version's bytes do not change once ``publish`` has returned its manifest; the newest ``KEPT`` versions can
be fetched, an older one is refused by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator

import numpy as np
import torch

from actors.core import Actor, handler
from actors.weightsync.manifest import Manifest, TensorFact, digest
from actors.weightsync.messages import Block, Blocks, Fetch

KEPT = 2
BLOCK_BYTES = 4 << 20
MOST_TOGETHER = 256
"""Blocks in a message, however small."""


class Snapshot:
    """The bytes of one version."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.facts: dict[str, TensorFact] = {}
        self._bytes: dict[str, np.ndarray] = {}
        for name, tensor in tensors:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
            self._bytes[name] = flat
            self.facts[name] = TensorFact(
                str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest(flat.data)
            )

    def blocks(self) -> Iterator[Blocks]:
        """About ``BLOCK_BYTES`` at a time, and at most that of one tensor."""
        together: list[Block] = []
        room = BLOCK_BYTES
        for name, data in self._bytes.items():
            for offset in range(0, max(data.nbytes, 1), BLOCK_BYTES):
                block = Block(name, offset, data[offset : offset + BLOCK_BYTES])
                together.append(block)
                room -= block.data.nbytes
                if room <= 0 or len(together) == MOST_TOGETHER:
                    yield Blocks(together)
                    together, room = [], BLOCK_BYTES
        if together:
            yield Blocks(together)


class WeightPublisher(Actor):
    """Lives in the process of the trainer's rank 0."""

    def __init__(self) -> None:
        self._kept: dict[int, Snapshot] = {}

    def publish(self, manifest: Manifest, snapshot: Snapshot) -> None:
        """Called by the rank once a version is complete."""
        self._kept[manifest.version] = snapshot
        for version in sorted(self._kept)[:-KEPT]:
            del self._kept[version]

    @handler
    async def fetch(self, message: Fetch) -> AsyncIterator[Blocks]:
        snapshot = self._kept.get(message.version)
        if snapshot is None:
            kept = ", ".join(map(str, sorted(self._kept))) or "none"
            raise ValueError(f"version {message.version} is not kept here; kept are: {kept}")
        for blocks in snapshot.blocks():
            yield blocks
