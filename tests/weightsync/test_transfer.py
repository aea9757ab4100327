"""From the publisher's memory to an engine's, block by block, over real nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from actors.core import Actor, Node, Ref, handler
from actors.weightsync import publisher as publisher_module
from actors.weightsync.manifest import Manifest, TensorFact, digest
from actors.weightsync.messages import Block, Blocks, Fetch
from actors.weightsync.publisher import KEPT, Snapshot, WeightPublisher
from actors.weightsync.receiver import IncompleteVersion, fetch
from bus.message import RemoteError
from tests.support.loops import run

TENSORS = {
    "embed": torch.arange(5_000, dtype=torch.float32).view(100, 50),
    "half": torch.linspace(-3, 3, 7, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
}


def manifest_of(version: int, snapshot: Snapshot) -> Manifest:
    return Manifest(version, "float32", snapshot.facts, np.zeros(2, np.int32), np.zeros(1, np.float32))


@asynccontextmanager
async def nodes(source: Actor) -> AsyncIterator[tuple[Node, Ref]]:
    """An engine's node, and the ref of a publisher on another."""
    async with Node("trainer-0") as trainer, Node("engine-0") as engine:
        yield engine, await trainer.spawn(lambda: source, "publisher", restarts=0)


def test_every_tensor_arrives_as_it_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "BLOCK_BYTES", 4096)  # several blocks of the largest

    async def test() -> None:
        publisher = WeightPublisher()
        snapshot = Snapshot(TENSORS.items())
        manifest = manifest_of(3, snapshot)
        publisher.publish(manifest, snapshot)
        async with nodes(publisher) as (engine, source):
            staged = await fetch(engine, source, manifest)
        arrived = dict(staged.tensors())
        assert list(arrived) == list(TENSORS)
        for name, tensor in TENSORS.items():
            assert arrived[name].dtype == tensor.dtype
            assert arrived[name].shape == tensor.shape
            assert torch.equal(arrived[name], tensor)
        assert staged.bytes == 5_000 * 4 + 7 * 2 + 4
        assert staged.manifest is manifest

    run(test())


def test_facts_name_dtype_shape_and_digest_of_the_bytes() -> None:
    facts = Snapshot({"w": torch.tensor([[1.0, 2.0]])}.items()).facts
    assert facts == {"w": TensorFact("float32", (1, 2), digest(np.array([1, 2], "<f4").tobytes()))}


def test_a_strided_tensor_is_published_row_by_row() -> None:
    (message,) = Snapshot({"w": torch.arange(6, dtype=torch.float32).view(2, 3).T}.items()).blocks()
    assert message.blocks[0].data.view("<f4").tolist() == [0, 3, 1, 4, 2, 5]


def test_small_tensors_travel_together_and_large_ones_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "BLOCK_BYTES", 16)
    monkeypatch.setattr(publisher_module, "MOST_TOGETHER", 3)
    sizes = {"a": 4, "b": 4, "c": 40, "d": 4, "e": 4, "f": 0, "g": 4}  # bytes
    snapshot = Snapshot({name: torch.zeros(size // 4) for name, size in sizes.items()}.items())
    messages = [[(block.name, block.offset, block.data.nbytes) for block in each.blocks] for each in snapshot.blocks()]
    assert messages == [
        [("a", 0, 4), ("b", 0, 4), ("c", 0, 16)],
        [("c", 16, 16)],
        [("c", 32, 8), ("d", 0, 4), ("e", 0, 4)],
        [("f", 0, 0), ("g", 0, 4)],
    ]


def test_only_the_newest_versions_are_kept() -> None:
    async def test() -> None:
        publisher = WeightPublisher()
        snapshots = [Snapshot({"w": torch.full((2,), float(version))}.items()) for version in range(4)]
        for version, snapshot in enumerate(snapshots):
            publisher.publish(manifest_of(version, snapshot), snapshot)
        async with nodes(publisher) as (engine, source):
            for version in range(4 - KEPT, 4):
                staged = await fetch(engine, source, manifest_of(version, snapshots[version]))
                assert dict(staged.tensors())["w"].tolist() == [version, version]
            with pytest.raises(RemoteError, match="version 1 is not kept here; kept are: 2, 3"):
                await fetch(engine, source, manifest_of(1, snapshots[1]))
        assert KEPT == 2

    run(test())


class ScriptedPublisher(Actor):
    """Sends the blocks that it is given, whatever is asked for."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks

    @handler
    async def fetch(self, message: Fetch) -> AsyncIterator[Blocks]:
        for block in self.blocks[:1]:  # one by itself, the others together
            yield Blocks([block])
        yield Blocks(self.blocks[1:])


def block(name: str, offset: int, size: int) -> Block:
    return Block(name, offset, np.arange(size, dtype=np.uint8))


WHOLE = [block("a", 0, 8), block("b", 0, 2), block("b", 2, 2)]
WRONG = {
    "a tensor is missing": (WHOLE[1:], "1 tensors are incomplete, first a"),
    "the last block is missing": (WHOLE[:2], "1 tensors are incomplete, first b"),
    "nothing comes": ([], "2 tensors are incomplete, first a"),
    "a block comes twice": (
        [WHOLE[0], WHOLE[1], WHOLE[1], WHOLE[2]],
        "b has 2 of 4 bytes, and the next .* 2 bytes at 0",
    ),
    "a block is left out": ([WHOLE[0], WHOLE[2]], "b has 0 of 4 bytes, and the next .* 2 bytes at 2"),
    "blocks overlap": ([WHOLE[0], WHOLE[1], block("b", 1, 3)], "b has 2 of 4 bytes"),
    "a block is too long": ([block("a", 0, 9)], "a has 0 of 8 bytes, and the next block is 9 bytes at 0"),
    "a block has a negative offset": ([block("a", -1, 4)], "4 bytes at -1"),
    "a foreign tensor comes": ([*WHOLE, block("c", 0, 1)], "a block of c, which is not in the manifest"),
    "numbers come instead of bytes": (
        [Block("a", 0, np.zeros(8, np.float32))],
        r"a came as float32 \(8,\), not as bytes",
    ),
    "a table comes instead of bytes": ([Block("a", 0, np.zeros((2, 4), np.uint8))], r"a came as uint8 \(2, 4\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_version_is_refused_where(case: str) -> None:
    blocks, message = WRONG[case]
    facts = {"a": TensorFact("float32", (2,), ""), "b": TensorFact("bfloat16", (2,), "")}
    manifest = Manifest(7, "float32", facts, np.zeros(2, np.int32), np.zeros(1, np.float32))

    async def test() -> None:
        async with nodes(ScriptedPublisher(blocks)) as (engine, source):
            with pytest.raises(IncompleteVersion, match=f"version 7: .*{message}"):
                await fetch(engine, source, manifest)

    run(test())


def test_whole_blocks_in_any_mixture_are_accepted() -> None:
    facts = {"a": TensorFact("float32", (2,), ""), "b": TensorFact("bfloat16", (2,), "")}
    manifest = Manifest(7, "float32", facts, np.zeros(2, np.int32), np.zeros(1, np.float32))

    async def test() -> int:
        async with nodes(ScriptedPublisher([WHOLE[1], WHOLE[0], WHOLE[2]])) as (engine, source):
            return (await fetch(engine, source, manifest)).bytes

    assert run(test()) == 12
