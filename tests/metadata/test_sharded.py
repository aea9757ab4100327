"""Where a path lies: on two embedded stores as shards, which can be looked into."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from coordinator.metadata.embedded import EmbeddedStore
from coordinator.metadata.protocol import (
    Check,
    CheckFailed,
    Create,
    Delete,
    Entry,
    Refused,
    StoreError,
    StoreTimeout,
    Write,
)
from coordinator.metadata.shard import Shard
from coordinator.metadata.sharded import ShardedStore, placement_key
from tests.metadata.backends import run
from tests.metadata.shards import client, embedded_shards

Scenario = Callable[[ShardedStore, list[Shard]], Awaitable[None]]


def on_shards(directory: Path, count: int, scenario: Scenario) -> None:
    async def opened() -> None:
        async with embedded_shards(directory, count) as shards:
            store = await client(shards, range(count))
            try:
                await scenario(store, shards)
            finally:
                await store.close()

    run(opened())


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/", None),
        ("/members/proxy-0", None),
        ("/leader", None),
        ("/leader-epoch", None),
        ("/ring", None),
        ("/jobs", None),
        ("/jobsite/j", None),
        ("/jobs/j", "j"),
        ("/jobs/j/versions/7", "j"),
        ("/jobs/j/nodes", "j"),
        ("/jobs/j/nodesque/n", "j"),
        ("/jobs/j/nodes/n", "j/n"),
        ("/jobs/j/nodes/n/engines/0", "j/n"),
    ],
)
def test_the_placement_prefix_of_a_path(path: str, key: str | None) -> None:
    assert placement_key(path) == key


def test_an_entry_lies_on_its_shard_and_on_no_other(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        nodes = [f"/jobs/j/nodes/n{number}/x" for number in range(20)]
        paths = ["/members/m", "/leader", "/jobs/j/version", *nodes]
        for path in paths:
            await store.create(path, path.encode())
        for path in paths:
            holders = [number for number, shard in enumerate(shards) if await shard.get(path) is not None]
            assert holders == [int(store.shard_of(path))]
        assert {store.shard_of(path) for path in nodes} == {"0", "1", "2"}
        assert store.shard_of("/members/m") == store.shard_of("/leader") == "0"

    on_shards(tmp_path, 3, scenario)


def test_a_nodes_entries_change_together_and_those_of_two_nodes_do_not(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        nodes = [f"/jobs/j/nodes/n{number}" for number in range(20)]
        here = nodes[0]
        elsewhere = next(node for node in nodes if store.shard_of(node) != store.shard_of(here))
        await store.create(f"{here}/a", b"")
        with pytest.raises(Refused, match=f"several shards.*{elsewhere}/a on shard {store.shard_of(elsewhere)}"):
            await store.multi([Write(f"{here}/a", b"1"), Create(f"{elsewhere}/a", b"")])
        assert await store.get(f"{elsewhere}/a") is None
        await store.multi([Write(f"{here}/a", b"1", expected=0), Create(f"{here}/b", b"")])
        assert await store.children(here) == ["a", "b"]

    on_shards(tmp_path, 2, scenario)


def test_a_sequential_entry_whose_number_would_choose_its_shard_is_refused(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        for path in ("/jobs/j-", "/jobs/j/nodes/n-"):
            with pytest.raises(Refused, match="several shards"):
                await store.create(path, b"", sequential=True)
        assert await store.create("/jobs/j/nodes/n/e-", b"", sequential=True) == "/jobs/j/nodes/n/e-0000000000"

    on_shards(tmp_path, 2, scenario)


def test_multi_deletes_the_nodes_directory_only_when_no_shard_has_a_node(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        nodes = [f"/jobs/j/nodes/n{number}" for number in range(20)]
        far = next(node for node in nodes if store.shard_of(node) != store.shard_of("/jobs/j"))
        await store.create(far, b"")
        with pytest.raises(StoreError, match="entries lie below"):
            await store.multi([Delete("/jobs/j/nodes")])
        await store.delete(far)
        await store.multi([Delete("/jobs/j/nodes")])
        assert await store.children("/jobs/j") == []

    on_shards(tmp_path, 2, scenario)


def test_shards_listed_in_another_order_or_unknown_ones_are_refused(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        assert await store.children("/") == ["ring", "ring-fence"]
        for away_from_home in ([2, 1, 0], [1]):
            with pytest.raises(StoreError, match=r"/ring on .*same order as before"):
                await client(shards, away_from_home)
        with pytest.raises(StoreError, match=r"s7:1 is not in the ring, which has s0:1; s1:1; s2:1.*shards add"):
            await client(shards, [0, 1, 7])
        for named in ([0, 1, 2], [0, 1], [0]):  # the ring says which others there are
            other = await client(shards, named)
            assert sorted(other.ring.stores) == ["0", "1", "2"]
            await other.close()

    on_shards(tmp_path, 3, scenario)


class Stuck(EmbeddedStore):
    """A shard that stops answering, and keeps no deadline itself."""

    async def children_then(self, path: str, mark: str) -> tuple[list[str], Entry | None]:
        await asyncio.Event().wait()
        return [], None


def test_a_shard_that_does_not_answer_is_a_timeout_of_the_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        shards: list[Shard] = [
            await EmbeddedStore.open(tmp_path / "0", timeout_s=10.0),
            await Stuck.open(tmp_path / "1", timeout_s=10.0),
        ]
        store = await client(shards, [0, 1], timeout_s=2.0)
        with pytest.raises(StoreTimeout, match="test"):
            await store.children("/jobs")
        for opened in (store, *shards):
            await opened.close()

    run(scenario())


def test_a_check_of_the_callers_own_says_so_and_changes_nothing(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        await store.create("/jobs/j/epoch", b"1")
        await store.create("/jobs/j/a", b"")
        assert await store.multi([Check("/jobs/j/epoch", 0), Write("/jobs/j/a", b"x")]) == [None, 1]
        await store.write("/jobs/j/epoch", b"2")
        with pytest.raises(CheckFailed, match="/jobs/j/epoch: checked for version 0"):
            await store.multi([Check("/jobs/j/epoch", 0), Write("/jobs/j/a", b"y")])
        assert await store.get("/jobs/j/a") == Entry("/jobs/j/a", b"x", 1)

    on_shards(tmp_path, 2, scenario)
