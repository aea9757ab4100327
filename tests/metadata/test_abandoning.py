"""An ensemble that is lost for good: what it held is named, the rest is as it was. On real servers, one of them killed;
and on embedded stores as shards for what a change of the ring left unfinished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from coordinator.commands import shards as command
from coordinator.facts import Facts, RunStatus
from coordinator.metadata import adopting, open_sharded
from coordinator.metadata.abandoning import LOST_PATH, NAMES_PATH, Abandoned, abandon
from coordinator.metadata.moving import Mover
from coordinator.metadata.protocol import Entry, StoreError, StoreTimeout
from coordinator.metadata.ringclient import Held
from coordinator.metadata.ringindex import PrefixIndex
from coordinator.metadata.ringstate import HOME, RING_PATH, SLOTS, Member, RingState, source
from coordinator.metadata.shard import Shard
from coordinator.metadata.sharded import ShardedStore
from tests.metadata.backends import run
from tests.metadata.shards import borrowed, embedded_shards, hosts
from tests.support.zookeeper import Server, running_servers

NODES = [f"/jobs/j/nodes/n{number}" for number in range(24)]
LAST = "2"
"""The shard that is lost."""


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110 (bounded by the scenario's own deadline)
        await asyncio.sleep(0.05)


def key_of(node: str) -> str:
    return f"j/{node.rpartition('/')[2]}"


def test_a_killed_ensemble_is_taken_out_and_what_clients_have_told_is_told_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def scenario(servers: list[Server]) -> None:
        addresses = [server.address for server in servers]
        words = ["remove", LAST, "--dead", "--store", f"zk://{addresses[0]}", "--yes", "--json", "--timeout", "20"]
        store = await open_sharded("zk://" + ";".join(addresses), timeout_s=20.0)
        for number, node in enumerate(NODES):
            await store.create(f"{node}/stays", b"x")
            await store.create(f"{node}/mine", b"", ephemeral=True)
            await store.write(f"{node}/mine", str(number).encode())
        led = next(name for name in map(str, range(100)) if store.shard_of(f"/jobs/{name}") == LAST)
        facts = Facts(store, led)
        await facts.status("running", 7)
        telling = asyncio.create_task(facts.tell_again())
        assert await asyncio.to_thread(command.main, words) == 1
        assert f"shard {LAST} ({addresses[2]}) answers: remove it without --dead" in capsys.readouterr().err
        on_last = {key_of(node) for node in NODES if store.shard_of(node) == LAST}
        lost = sorted(on_last | {led} | ({"j"} if store.shard_of("/jobs/j") == LAST else set()))
        assert 2 < len(on_last) < len(NODES) - 2
        servers[2].kill()
        capsys.readouterr()
        assert await asyncio.to_thread(command.main, words) == 0
        said = msgspec.json.decode(capsys.readouterr().out, type=Abandoned)
        assert (said.prefixes, said.unfinished) == (lost, False)
        await until(lambda: _told(store, led))
        for number, node in enumerate(NODES):
            mine = f"{node}/mine"
            kept = key_of(node) not in lost
            await until(lambda mine=mine: _there(store, mine))  # type: ignore[misc]
            assert await store.get(mine) == Entry(mine, str(number).encode(), 1 if kept else 0)
            assert (await store.get(f"{node}/stays") is not None) == kept
            assert store.shard_of(node) in ("0", "1")
        mark = await store.get(f"{LOST_PATH}/{LAST}")
        assert mark is not None
        assert msgspec.json.decode(mark.value, type=Abandoned).lost == len(lost)
        await store.create(f"{NODES[0]}/new", b"")
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await store.close()

    with running_servers(3) as servers:
        run(scenario(servers))


async def _told(store: ShardedStore, job: str) -> bool:
    status = await Facts(store, job).last_status()
    return isinstance(status, RunStatus) and (status.state, status.version) == ("running", 7)


async def _there(store: ShardedStore, path: str) -> bool:
    return await store.get(path) is not None


def member(number: int) -> Member:
    return Member(str(number), hosts(number))


async def without_the_last(shards: list[Shard]) -> ShardedStore:
    async def connect(wanted: str) -> Shard:
        if wanted == hosts(int(LAST)):
            raise StoreError("nobody answers")
        return borrowed(shards[int(wanted[1:].partition(":")[0])])

    return await ShardedStore.open(
        [hosts(0)], home=borrowed(shards[0]), connect=connect, name="test", timeout_s=60.0, without=(LAST,)
    )


@pytest.mark.parametrize(
    ("before", "ring", "unfinished"),
    [
        ((), ("0", "1", "2"), False),
        (("0", "1"), ("0", "1", "2"), False),  # it was being added
        (("0", "1", "2"), ("0", "1"), False),  # removed
        (("0", "2"), ("0", "2", "1"), True),  # another one was
    ],
)
def test_a_change_that_was_under_way_loses_nothing_of_the_others(
    tmp_path: Path, before: tuple[str, ...], ring: tuple[str, ...], unfinished: bool
) -> None:
    """A third of the way done, another third in the middle of its copy."""

    async def scenario() -> None:
        async with embedded_shards(tmp_path, 3) as shards:
            done, frozen = (SLOTS // 3, 2 * SLOTS // 3) if before else (0, 0)
            state = RingState(5, tuple(map(member, range(3))), ring, 3, before, done, frozen)
            await shards[0].create(RING_PATH, msgspec.json.encode(state))
            index = PrefixIndex(shards[0])
            holders = {node: source(state, key_of(node)) for node in NODES}
            for node, holder in holders.items():
                await shards[int(holder)].create(f"{node}/a", node.encode())
                if holder != HOME:
                    await index.note(key_of(node))
                for other in {*before, *ring} - {holder, LAST} if before else ():  # what was copied, or not cleared yet
                    await shards[int(other)].create(f"{node}/a", b"old")
            store = await without_the_last(shards)
            found = await abandon(store.ring, LAST)
            lost = {key_of(node) for node, holder in holders.items() if holder == LAST}
            assert set(found.prefixes) - {"j"} == lost
            assert found.unfinished == unfinished
            if unfinished:
                await Mover(store.ring).resume()
            for node, holder in holders.items():
                expected = None if holder == LAST else Entry(f"{node}/a", node.encode(), 0)
                assert await store.get(f"{node}/a") == expected
            assert store.ring.state.before == ()
            assert set(store.ring.state.ring) == {"0", "1"}
            await store.close()

    run(scenario())


def test_more_names_than_one_request_may_hold_are_kept_all_the_same(tmp_path: Path) -> None:
    """1.5 MB of them and more, where a value is 64 KiB and a request 512 KiB at most."""

    async def scenario() -> None:
        async with embedded_shards(tmp_path, 3) as shards:
            state = RingState(1, tuple(map(member, range(3))), ("0", "1", "2"), 3)
            await shards[0].create(RING_PATH, msgspec.json.encode(state))
            index = PrefixIndex(shards[0])
            names = [name for number in range(1000) if source(state, name := f"{number:0>5000}") == LAST]
            for name in names:
                await index.note(name)
            await shards[0].create(f"{NAMES_PATH}/{LAST}/7", b"of an attempt that did not come to its end")
            store = await without_the_last(shards)
            assert (await abandon(store.ring, LAST)).prefixes == names
            assert len(names) > 300
            pieces = await shards[0].children(f"{NAMES_PATH}/{LAST}")
            entries = [await shards[0].get(f"{NAMES_PATH}/{LAST}/{piece}") for piece in pieces]
            found = [msgspec.json.decode(entry.value, type=list[str]) for entry in entries if entry is not None]
            assert sorted(name for some in found for name in some) == names
            await store.close()

    run(scenario())


def test_an_owner_makes_its_entry_again_however_often_the_ring_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopting, "RETRY_S", 0.01)

    async def scenario() -> None:
        async with embedded_shards(tmp_path, 3) as shards:
            state = RingState(1, tuple(map(member, range(3))), ("0", "1", "2"), 3)
            await shards[0].create(RING_PATH, msgspec.json.encode(state))
            mine = next(f"{node}/mine" for node in NODES if source(state, key_of(node)) == LAST)

            async def connect(wanted: str) -> Shard:
                return borrowed(shards[int(wanted[1:].partition(":")[0])])

            owner = await ShardedStore.open(
                [hosts(0)], home=borrowed(shards[0]), connect=connect, name="owner", timeout_s=60.0
            )
            await owner.create(mine, b"me", ephemeral=True)
            held, late = owner.ring.held, iter(range(2))

            async def sometimes(key: str) -> Held:
                if next(late, None) is not None:
                    raise StoreTimeout("no answer")
                return await held(key)

            monkeypatch.setattr(owner.ring, "held", sometimes)
            person = await without_the_last(shards)
            await abandon(person.ring, LAST)
            await until(lambda: _there(person, mine))
            assert await person.get(mine) == Entry(mine, b"me", 0)
            assert next(late, None) is None
            for store in (person, owner):
                await store.close()

    run(scenario())


def test_home_and_strangers_are_not_taken_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with embedded_shards(tmp_path, 1) as shards:
            store = await without_the_last(shards)
            with pytest.raises(StoreError, match="shard 0 is the home ensemble"):
                await abandon(store.ring, "0")
            with pytest.raises(StoreError, match="shard 7: not in the ring, which has 0"):
                await abandon(store.ring, "7")
            await store.close()

    run(scenario())
