"""The ring changes while clients are at work: on embedded stores as shards, which can be looked into."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from coordinator.metadata.copying import Copier, keys_on, root_of
from coordinator.metadata.moving import Mover
from coordinator.metadata.protocol import (
    Change,
    Check,
    CheckFailed,
    Entry,
    StoreError,
    StoreTimeout,
    VersionMismatch,
    Watch,
)
from coordinator.metadata.ringstate import FENCE_PATH, RING_PATH, SLOTS, RingState, decode_ring, holder, moves, slot_of
from coordinator.metadata.ringwriter import LOCK_PATH, RingBusy
from coordinator.metadata.shard import Shard
from coordinator.metadata.sharded import ShardedStore
from tests.metadata.backends import run
from tests.metadata.shards import client, embedded_shards, hosts

NODES = [f"/jobs/j/nodes/n{number}" for number in range(40)]


def on_ring(
    directory: Path, of: int, spare: int, scenario: Callable[[ShardedStore, list[Shard]], Awaitable[None]]
) -> None:
    """A ring of the first shards; the spare ones can be added."""

    async def opened() -> None:
        async with embedded_shards(directory, of + spare) as shards:
            store = await client(shards, range(of))
            try:
                await scenario(store, shards)
            finally:
                await store.close()

    run(opened())


async def filled(store: ShardedStore) -> dict[str, Entry]:
    """Entries of many prefixes, written so often as their number says."""
    entries = {}
    for number, node in enumerate(NODES):
        path = f"{node}/deep/er"
        await store.create(path, b"")
        for time in range(number % 4):
            await store.write(path, f"{number}.{time}".encode())
        entry = await store.get(path)
        assert entry is not None
        entries[path] = entry
    return entries


async def contents(shard: Shard) -> set[str]:
    return set(await keys_on(shard))


def test_an_added_ensemble_gets_its_share_and_nothing_else_moves(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        entries = await filled(store)
        before = {path: store.shard_of(path) for path in entries}
        moved = await Mover(store.ring).add(hosts(2))
        after = {path: store.shard_of(path) for path in entries}
        changed = [path for path in entries if before[path] != after[path]]
        assert {after[path] for path in changed} == {"2"}
        assert moved.prefixes == len(changed) + (holder(store.ring.state, "j") == "2")
        assert (moved.of, moved.shards) == (len(entries) + 1, 3)
        for path, entry in entries.items():
            assert await store.get(path) == entry
            held = [number for number, shard in enumerate(shards) if await shard.get(path) is not None]
            assert held == [int(after[path])]
        state = decode_ring((await shards[0].get(RING_PATH) or Entry("", b"", 0)).value)
        assert (state.ring, state.before, state.next_id) == (("0", "1", "2"), (), 3)

    on_ring(tmp_path, 2, 1, scenario)


def test_what_moves_over_many_prefixes_keeps_to_the_bound(tmp_path: Path) -> None:
    """1.2/N of 400 prefixes: 3 shards become 4, and 4 become 3 again."""

    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        await asyncio.gather(*(store.create(f"/jobs/many/nodes/n{number}", b"") for number in range(399)))
        for change in (Mover(store.ring).add(hosts(3)), Mover(store.ring).remove("3")):
            moved = await change
            assert (moved.of, moved.shards) == (400, 4)
            assert 0.5 < moved.versus_bound <= 1.0
        assert len(await store.children("/jobs/many/nodes")) == 399

    on_ring(tmp_path, 3, 1, scenario)


def test_a_removed_ensemble_keeps_nothing_and_may_come_back_under_a_new_number(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        entries = await filled(store)
        await Mover(store.ring).remove("1")
        assert {store.shard_of(path) for path in entries} == {"0", "2"}
        assert await contents(shards[1]) == set()
        assert [await store.get(path) for path in entries] == list(entries.values())
        with pytest.raises(StoreError, match="s1:1 is not in the ring"):
            await client(shards, [0, 1, 2])
        await Mover(store.ring).add(hosts(1))
        assert {store.shard_of(path) for path in entries} == {"0", "2", "3"}
        assert [await store.get(path) for path in entries] == list(entries.values())

    on_ring(tmp_path, 3, 0, scenario)


def test_numbers_go_on_rising_after_a_move(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        for node in NODES:
            for _ in range(3):
                last = await store.create(f"{node}/e-", b"", sequential=True)
            await store.delete(last)
        moved = await Mover(store.ring).add(hosts(1))
        assert moved.prefixes > 5
        for node in NODES:
            assert int((await store.create(f"{node}/e-", b"", sequential=True))[-10:]) >= 3

    on_ring(tmp_path, 1, 1, scenario)


async def count_up(store: ShardedStore, path: str, stop: asyncio.Event) -> int:
    """By compare-and-set; how often it was acknowledged."""
    counted = 0
    while not stop.is_set():
        entry = await store.get(path)
        assert entry is not None
        try:
            await store.write(path, str(int(entry.value or b"0") + 1).encode(), expected=entry.version)
            counted += 1
        except VersionMismatch:
            continue
    return counted


@pytest.mark.parametrize("deaf", [False, True])
def test_no_count_is_lost_by_clients_that_go_on_through_changes_of_the_ring(tmp_path: Path, deaf: bool) -> None:
    """Be it that one of them hears of a change only when it runs into a fence."""

    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        other = await client(shards, [0], deaf=deaf)
        paths = [f"{node}/counter" for node in NODES[:12]]
        for path in paths:
            await store.create(path, b"0")
        stop = asyncio.Event()
        counting = [asyncio.create_task(count_up(one, path, stop)) for path in paths for one in (store, other)]
        await Mover(store.ring).add(hosts(2))
        await Mover(store.ring).remove("1")
        stop.set()
        counted = await asyncio.gather(*counting)
        for number, path in enumerate(paths):
            total = counted[2 * number] + counted[2 * number + 1]
            assert await store.get(path) == Entry(path, str(total).encode(), total)
        await other.close()

    on_ring(tmp_path, 2, 1, scenario)


@pytest.mark.parametrize("call", ["get", "children", "create", "write", "delete"])
def test_a_client_that_has_not_heard_of_a_change_is_sent_to_the_new_shard_by_the_fence(
    tmp_path: Path, call: str
) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        deaf = await client(shards, [0], deaf=True)
        for node in NODES[:12]:
            await deaf.create(f"{node}/a", b"")
        await Mover(store.ring).add(hosts(1))
        node = next(node for node in NODES[:12] if store.shard_of(node) == "1")
        assert deaf.shard_of(node) == "0"
        if call == "get":
            assert await deaf.get(f"{node}/a") == Entry(f"{node}/a", b"", 0)
        elif call == "children":
            assert await deaf.children(node) == ["a"]
        elif call == "create":
            await deaf.create(f"{node}/new", b"late")
            assert await store.get(f"{node}/new") == Entry(f"{node}/new", b"late", 0)
        elif call == "write":
            assert await deaf.write(f"{node}/a", b"late") == 1
            assert await store.get(f"{node}/a") == Entry(f"{node}/a", b"late", 1)
        else:
            await deaf.delete(f"{node}/a")
            assert await store.children(node) == []
        assert deaf.shard_of(node) == "1"
        await deaf.close()

    on_ring(tmp_path, 1, 1, scenario)


async def follow(store: ShardedStore, watch: Watch, prefix: str, seen: dict[str, bytes]) -> None:
    """What somebody knows who reads again whatever a change names."""
    for name in await store.children(prefix):
        await look(store, f"{prefix}/{name}", seen)
    async for change in watch:
        await look(store, change.path, seen)


async def look(store: ShardedStore, path: str, seen: dict[str, bytes]) -> None:
    entry = await store.get(path)
    if entry is None:
        seen.pop(path, None)
    else:
        seen[path] = entry.value


@pytest.mark.parametrize("prefix", ["/jobs/j/nodes", "/jobs/j/nodes/n0", "/jobs/j/nodes/n1", "/jobs/j/nodes/n2"])
def test_a_watch_misses_nothing_while_its_entries_move(tmp_path: Path, prefix: str) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        writer = await client(shards, [0, 1])
        await writer.create("/jobs/j/nodes/n0/first", b"")
        watch = store.watch(prefix)
        seen: dict[str, bytes] = {}
        following = asyncio.create_task(follow(store, watch, prefix, seen))
        stop = asyncio.Event()

        async def change(number: int) -> None:
            path = f"{prefix}/e{number}"
            times = 0
            while not stop.is_set():
                await writer.create(path, b"0")
                for _ in range(3):
                    times += 1
                    await writer.write(path, str(times).encode())
                if number % 2 or stop.is_set():
                    await writer.delete(path)
                else:
                    await writer.write(path, b"last")
                    return

        changing = [asyncio.create_task(change(number)) for number in range(6)]
        await Mover(writer.ring).add(hosts(2))
        await Mover(writer.ring).remove("1")
        stop.set()
        await asyncio.gather(*changing)
        now: dict[str, bytes] = {}
        for name in await writer.children(prefix):
            await look(writer, f"{prefix}/{name}", now)
        for _ in range(3_000):
            if seen == now:
                break
            await asyncio.sleep(0.02)
        assert seen == now
        await watch.aclose()
        await following
        await writer.close()

    on_ring(tmp_path, 2, 1, scenario)


def test_a_move_alone_says_written_of_what_moved_and_deletes_nothing(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        for node in NODES:
            await store.create(f"{node}/a", b"")
        watch = store.watch("/jobs/j/nodes")
        before = {node: store.shard_of(node) for node in NODES}
        await Mover(store.ring).add(hosts(1))
        moved = [node for node in NODES if store.shard_of(node) != before[node]]
        await store.create("/jobs/j/nodes/last", b"")
        changes: list[Change] = []
        while not changes or changes[-1].path != "/jobs/j/nodes/last":
            changes.append(await anext(watch))
        assert {change.path for change in changes if change.kind == "written"} == set(moved)
        assert [change for change in changes if change.kind == "deleted"] == []

    on_ring(tmp_path, 1, 1, scenario)


def test_an_ephemeral_entry_is_never_missing_and_still_goes_with_its_owner(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        reader = await client(shards, [0])
        paths = [f"{node}/alive" for node in NODES]
        for path in paths:
            await store.create(path, b"", ephemeral=True)
            await store.write(path, b"1")
        missing: list[str] = []

        async def look_always() -> None:
            while True:
                missing.extend([path for path in paths if await reader.get(path) != Entry(path, b"1", 1)])

        looking = asyncio.create_task(look_always())
        assert (await Mover(reader.ring).add(hosts(1))).prefixes > 5
        looking.cancel()
        assert missing == []
        kinds = [await shards[int(store.shard_of(path))].inspect(path) for path in paths]
        assert {raw.owner for raw in kinds if raw is not None} == {"me"}
        assert {store.shard_of(path) for path in paths} == {"0", "1"}
        await reader.close()

    on_ring(tmp_path, 1, 1, scenario)


def test_an_owner_that_does_not_come_keeps_the_prefix_where_it_was_and_is_named(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        paths = [f"{node}/alive" for node in NODES]
        for path in paths:  # past the store: its owner does not know that it owns it
            await shards[0].create(path, b"", ephemeral=True)
        with pytest.raises(StoreError, match=r"/alive: the client that owns it .* shard 1 within 0.2 s"):
            await Mover(store.ring, owners_s=0.2).add(hosts(1))
        for path in paths:
            assert await store.get(path) == Entry(path, b"", 0)
        with pytest.raises(RingBusy, match="not finished; run bin/admin shards resume first"):
            await Mover(store.ring).add(hosts(1))
        for path in paths:
            await shards[0].delete(path)
        await store.create(f"{NODES[0]}/kept", b"x")
        assert (await Mover(store.ring).resume()).shards == 2
        assert await store.get(f"{NODES[0]}/kept") == Entry(f"{NODES[0]}/kept", b"x", 0)
        assert store.ring.state.before == ()

    on_ring(tmp_path, 1, 1, scenario)


def test_a_mover_that_died_leaves_a_part_that_waits_until_another_one_resumes(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        entries = await filled(store)
        state = store.ring.state
        entry = await shards[0].get(RING_PATH)
        assert entry is not None
        # As it left the ring, in the middle of a copy: everything that moves stands still.
        member = type(state.members[0])("1", hosts(1))
        left = msgspec.structs.replace(
            state,
            epoch=state.epoch + 1,
            members=(*state.members, member),
            ring=("0", "1"),
            before=("0",),
            next_id=2,
            frozen=SLOTS,
        )
        await shards[0].write(RING_PATH, msgspec.json.encode(left), expected=entry.version)
        impatient = await client(shards, [0], timeout_s=0.5)
        moving = next(path for path in entries if moves(left, f"j/{path.split('/')[4]}"))
        staying = next(path for path in entries if not moves(left, f"j/{path.split('/')[4]}"))
        for call in (impatient.get(moving), impatient.write(moving, b"")):
            with pytest.raises(StoreTimeout, match=r"on its way to another shard; .* run bin/admin shards resume"):
                await call
        assert await impatient.get(staying) == entries[staying]
        waiting = asyncio.create_task(store.write(moving, b"waited"))
        await Mover(store.ring).resume()
        assert await waiting == entries[moving].version + 1
        for path, before in entries.items():
            if path != moving:
                assert await impatient.get(path) == before
        await impatient.close()

    on_ring(tmp_path, 1, 1, scenario)


def test_a_mover_that_was_taken_for_dead_can_do_no_harm(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        entries = await filled(store)
        old = {}
        for shard in ("0", "1"):
            entry = await shards[int(shard)].get(FENCE_PATH)
            assert entry is not None
            old[shard] = Check(FENCE_PATH, entry.version)
        before = store.ring.state
        await Mover(store.ring).add(hosts(2))
        zombie = msgspec.structs.replace(before, ring=("0",), before=("0", "1"), frozen=SLOTS)
        late = Copier(store.ring.stores, zombie, old)
        with pytest.raises(CheckFailed):
            await late.copy(1.0)
        with pytest.raises(CheckFailed):
            await late.clear_sources()
        assert [await store.get(path) for path in entries] == list(entries.values())

    on_ring(tmp_path, 2, 1, scenario)


def test_what_a_failed_copy_left_does_not_come_back_to_life(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        await filled(store)
        for node in NODES:  # on an ensemble that does not hold it, as after a mover's death
            await shards[1].create(f"{node}/ghost", b"")
        await shards[1].create(FENCE_PATH, msgspec.json.encode({"shard": "1", "epoch": 1, "retired": True}))
        await Mover(store.ring).add(hosts(1))
        for node in NODES:
            assert await store.get(f"{node}/ghost") is None

    on_ring(tmp_path, 1, 1, scenario)


def test_what_cannot_be_done_to_the_ring_is_said(tmp_path: Path) -> None:
    async def scenario(store: ShardedStore, shards: list[Shard]) -> None:
        mover = Mover(store.ring)
        with pytest.raises(StoreError, match="shard 0 is the home ensemble"):
            await mover.remove("0")
        with pytest.raises(StoreError, match="shard 7: not in the ring, which has 0, 1"):
            await mover.remove("7")
        with pytest.raises(StoreError, match="s1:1: in the ring already"):
            await mover.add(hosts(1))
        with pytest.raises(StoreError, match="nothing to resume"):
            await mover.resume()
        await shards[2].create("/jobs/of-others", b"")
        with pytest.raises(StoreError, match="s2:1: expected an ensemble without entries"):
            await mover.add(hosts(2))
        await store.create(LOCK_PATH, b"", ephemeral=True)
        with pytest.raises(RingBusy, match=LOCK_PATH):
            await mover.remove("1")
        assert store.ring.state.epoch == 1

    on_ring(tmp_path, 2, 1, scenario)


def test_a_prefix_has_no_holder_between_two() -> None:
    keys = [f"j/n{number}" for number in range(200)]
    settled = RingState(1, (), ("0", "1"), 2)
    began = msgspec.structs.replace(settled, ring=("0", "1", "2"), before=("0", "1"))
    half = msgspec.structs.replace(began, done=SLOTS // 4, frozen=SLOTS // 2)
    ended = msgspec.structs.replace(began, before=())
    moving = [key for key in keys if holder(settled, key) != holder(ended, key)]
    assert {holder(ended, key) for key in moving} == {"2"}
    for key in keys:
        assert holder(began, key) == holder(settled, key)
        expected = holder(settled, key)
        if key in moving and slot_of(key) < SLOTS // 4:
            expected = "2"
        elif key in moving and slot_of(key) < SLOTS // 2:
            expected = None
        assert holder(half, key) == expected


def test_a_prefix_is_found_again_by_its_root() -> None:
    assert (root_of("j"), root_of("j/n")) == ("/jobs/j", "/jobs/j/nodes/n")
