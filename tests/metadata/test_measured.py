"""A store whose calls are timed says what the store says, and counts what failed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.metadata import open_store
from coordinator.metadata.measured import BOUNDS_S, Shard
from coordinator.metadata.protocol import EntryExists, StoreError


def test_calls_are_counted_by_kind_and_only_what_a_store_cannot_do_is_a_failure(tmp_path: Path) -> None:
    shards: list[Shard] = []

    async def scenario() -> None:
        store = await open_store("embedded", directory=tmp_path, timeout_s=30.0, measure=shards)
        await store.create("/a", b"1")
        with pytest.raises(EntryExists):
            await store.create("/a", b"2")
        await store.write("/a", b"3")
        entry = await store.get("/a")
        assert entry is not None
        assert entry.value == b"3"
        await store.close()
        with pytest.raises(StoreError):
            await store.get("/a")

    asyncio.run(scenario())
    (shard,) = shards
    calls = {one.operation: (one.calls, one.failures) for one in shard.operations}
    assert shard.name == "embedded"
    assert calls == {"create": (2, 0), "write": (1, 0), "get": (2, 0)}
    for one in shard.operations:
        assert sum(one.counts) == one.calls
        assert 0 < one.slowest_s <= one.seconds


def test_a_call_is_counted_up_to_the_bound_that_it_reached() -> None:
    latency = Shard("x").of("get")
    for seconds in (0.0001, 0.0005, 0.0006, 99.0):
        latency.took(seconds)
    assert latency.counts[:2] == [2, 1]
    assert latency.counts[len(BOUNDS_S)] == 1
    assert latency.slowest_s == 99.0
