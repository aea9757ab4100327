"""Embedded stores as the shards of a ring: several clients share them, and a test can look into them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

from coordinator.metadata.embedded import EmbeddedStore
from coordinator.metadata.protocol import Watch
from coordinator.metadata.shard import Shard
from coordinator.metadata.sharded import ShardedStore
from coordinator.metadata.watching import ChangeQueue


class _Borrowed:
    """A shard that stays open when the client that borrowed it closes it. (What is ephemeral on it stays, too.)"""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shard, name)

    async def close(self) -> None:
        return


class _Silent(_Borrowed):
    """One that never tells of a change."""

    def watch(self, prefix: str) -> Watch:
        return ChangeQueue(on_close=lambda _: None)


def borrowed(shard: Shard) -> Shard:
    return cast(Shard, _Borrowed(shard))


def hosts(number: int) -> str:
    return f"s{number}:1"


async def client(
    shards: Sequence[Shard], named: Sequence[int], *, timeout_s: float = 60.0, deaf: bool = False
) -> ShardedStore:
    """A client that lists those shards, by their numbers, home first. ``deaf``: no watch tells it of a new ring."""

    async def connect(wanted: str) -> Shard:
        return borrowed(shards[int(wanted[1:].partition(":")[0])])

    return await ShardedStore.open(
        [hosts(number) for number in named],
        home=cast(Shard, _Silent(shards[named[0]])) if deaf else borrowed(shards[named[0]]),
        connect=connect,
        name="test",
        timeout_s=timeout_s,
    )


@asynccontextmanager
async def embedded_shards(directory: Path, count: int) -> AsyncIterator[list[Shard]]:
    async with AsyncExitStack() as stack:
        shards: list[Shard] = []
        for number in range(count):
            shard = await EmbeddedStore.open(directory / str(number), timeout_s=60.0)
            stack.push_async_callback(shard.close)
            shards.append(shard)
        yield shards
