"""What only real servers can do to a client: differ, hang, die, lose the session."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest

from coordinator.metadata import open_store
from coordinator.metadata.protocol import Create, Delete, Entry, MetadataStore, SessionLost, StoreError, StoreTimeout
from coordinator.metadata.zookeeper import ZooKeeperStore
from tests.metadata.backends import Backend, run, take
from tests.metadata.link import link_to
from tests.support.zookeeper import Server, running_ensemble, zookeeper_servers

SHORT_S = 3.0  # of a store whose calls are to time out: enough to open it on a busy machine


@pytest.fixture
def job(tmp_path: Path) -> str:
    return Backend("embedded", tmp_path).job


async def opened(stack: AsyncExitStack, hosts: str, timeout_s: float = 30.0, session_s: float = 10.0) -> ZooKeeperStore:
    store = await ZooKeeperStore.open(hosts, timeout_s=timeout_s, session_timeout_s=session_s)
    stack.push_async_callback(store.close)
    return store


def test_what_one_client_was_told_another_finds_on_its_own_server(ensemble: list[str], job: str) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            writer, *readers = [await opened(stack, address) for address in ensemble]
            await writer.create(f"{job}/a", b"")
            for number in range(1, 31):
                await writer.write(f"{job}/a", str(number).encode())
                await writer.create(f"{job}/n{number}", b"")
                for reader in readers:
                    assert await reader.get(f"{job}/a") == Entry(f"{job}/a", str(number).encode(), number)
                    assert f"n{number}" in await reader.children(job)

    run(scenario())


def test_a_watch_reports_what_other_clients_do(ensemble: list[str], job: str) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            watcher, other = await opened(stack, ensemble[0]), await opened(stack, ensemble[2])
            watch = watcher.watch(job)
            assert await watcher.children(job) == []
            await other.create(f"{job}/a", b"", ephemeral=True)
            assert await take(watch, 1) == [("created", f"{job}/a")]
            await other.write(f"{job}/a", b"1")
            assert await take(watch, 1) == [("written", f"{job}/a")]
            await other.close()
            assert await take(watch, 1) == [("deleted", f"{job}/a")]

    run(scenario())


def test_clients_that_make_the_same_parents_at_once_both_succeed(ensemble: list[str], job: str) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            clients = [await opened(stack, address) for address in ensemble]
            for number in range(10):
                await asyncio.gather(
                    *(
                        client.multi([Create(f"{job}/r{number}/p/q/c{which}", b"")])
                        for which, client in enumerate(clients)
                    )
                )
                assert await clients[0].children(f"{job}/r{number}/p/q") == ["c0", "c1", "c2"]

    run(scenario())


def test_no_server_at_the_address_is_a_timeout_that_names_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{unused.getsockname()[1]}"
            with pytest.raises(StoreTimeout, match=address):
                await open_store(f"zk://{address}", directory=tmp_path, timeout_s=0.5)

    run(scenario())


async def assert_every_method_times_out(store: MetadataStore, job: str) -> None:
    calls = (
        store.get(f"{job}/a"),
        store.children(job),
        store.create(f"{job}/b", b""),
        store.write(f"{job}/a", b""),
        store.delete(f"{job}/a"),
        store.multi([Create(f"{job}/c/d", b"")]),
        store.multi([Delete(f"{job}/a")]),
    )
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, StoreTimeout)
        assert "zk://" in str(result)


def test_a_server_that_dies_is_a_timeout_in_every_method(victim: Server, job: str) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            store = await opened(stack, victim.address, timeout_s=SHORT_S)
            await store.create(f"{job}/a", b"")
            victim.kill()
            await assert_every_method_times_out(store, job)
            await assert_every_method_times_out(store, job)

    run(scenario())


def test_a_server_that_hangs_is_a_timeout_and_one_that_wakes_goes_on(victim: Server, job: str) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            store = await opened(stack, victim.address, timeout_s=SHORT_S, session_s=20.0)
            await store.create(f"{job}/alive", b"", ephemeral=True)
            victim.pause()
            with pytest.raises(StoreTimeout, match=f"get {job}/a"):
                await store.get(f"{job}/a")
            victim.resume()
            patient = await opened(stack, victim.address)
            assert await patient.get(f"{job}/alive") is not None
            assert await store.get(f"{job}/alive") is not None

    run(scenario())


def test_closing_does_not_wait_for_a_dead_server(victim: Server) -> None:
    async def scenario() -> None:
        store = await ZooKeeperStore.open(victim.address, timeout_s=SHORT_S)
        victim.kill()
        await store.close()

    run(scenario())


def test_a_watch_catches_up_after_a_lost_connection(servers: list[str], job: str) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            link = await stack.enter_async_context(link_to(servers[0]))
            far = await opened(stack, link.address, timeout_s=SHORT_S, session_s=20.0)
            near = await opened(stack, servers[0])
            for name in ("kept", "written", "deleted", "remade"):
                await near.create(f"{job}/{name}", b"")
            watch = far.watch(job)
            assert await far.children(job) == ["deleted", "kept", "remade", "written"]
            link.cut()
            for _ in range(2):
                with pytest.raises(StoreTimeout, match="may have taken effect or not"):
                    await far.write(f"{job}/kept", b"never")
            await near.delete(f"{job}/deleted")
            await near.delete(f"{job}/remade")
            await near.create(f"{job}/made", b"")
            await near.write(f"{job}/written", b"1")
            await near.create(f"{job}/remade", b"")
            link.mend()
            changes = await take(watch, 5)  # and none of "kept": what timed out is not done late
            assert sorted(changes[:2]) == [("deleted", f"{job}/deleted"), ("deleted", f"{job}/remade")]
            assert changes[2:] == [
                ("created", f"{job}/made"),
                ("written", f"{job}/written"),
                ("created", f"{job}/remade"),
            ]
            assert await far.get(f"{job}/kept") == Entry(f"{job}/kept", b"", 0)
            await near.write(f"{job}/kept", b"live again")
            assert await take(watch, 1) == [("written", f"{job}/kept")]

    run(scenario())


def test_a_read_survives_a_lost_connection(servers: list[str], job: str) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            link = await stack.enter_async_context(link_to(servers[0]))
            store = await opened(stack, link.address, session_s=20.0)
            await store.create(f"{job}/a", b"x")
            link.cut()
            reading = asyncio.create_task(store.get(f"{job}/a"))
            await asyncio.sleep(0)
            link.mend()
            assert await reading == Entry(f"{job}/a", b"x", 0)

    run(scenario())


def test_a_lost_session_is_said_by_calls_and_watches(servers: list[str], job: str) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            link = await stack.enter_async_context(link_to(servers[0]))
            far = await opened(stack, link.address, session_s=1.0)
            near = await opened(stack, servers[0])
            await far.create(f"{job}/alive", b"", ephemeral=True)
            far_watch, near_watch = far.watch(job), near.watch(job)
            assert await near.children(job) == await far.children(job) == ["alive"]
            link.cut()
            assert await take(near_watch, 1) == [("deleted", f"{job}/alive")]
            link.mend()
            with pytest.raises(SessionLost, match=link.address):
                await anext(far_watch)
            with pytest.raises(StopAsyncIteration):
                await anext(far_watch)
            for call in (far.get(job), far.children(job), far.create(f"{job}/alive", b"", ephemeral=True)):
                with pytest.raises(SessionLost, match="ephemeral entries are gone"):
                    await call
            with pytest.raises(SessionLost):
                far.watch(job)
            await far.close()
            assert await near.children(job) == []

    run(scenario())


def test_a_dead_leader_costs_no_entry_and_no_session(job: str) -> None:
    async def scenario(servers: list[Server]) -> None:
        async with AsyncExitStack() as stack:
            hosts = ",".join(server.address for server in servers)
            store = await opened(stack, hosts, timeout_s=20.0)
            await store.create(f"{job}/alive", b"", ephemeral=True)
            watch = store.watch(job)
            (leader,) = [server for server in servers if server.mode() == "leader"]
            leader.kill()
            assert await store.get(f"{job}/alive") == Entry(f"{job}/alive", b"", 0)
            await written(store, f"{job}/after", b"")
            assert await take(watch, 1) == [("created", f"{job}/after")]
            other = next(server for server in servers if server is not leader)
            other.kill()
            short = await asyncio.gather(ZooKeeperStore.open(hosts, timeout_s=0.5), return_exceptions=True)
            assert isinstance(short[0], StoreTimeout)
            assert "majority" in str(short[0])

    with running_ensemble(3) as servers:
        run(scenario(servers))


async def written(store: MetadataStore, path: str, value: bytes) -> None:
    """What a caller does about a timeout: look, and do it again where it had no effect."""
    try:
        await store.create(path, value)
    except StoreTimeout:
        if await store.get(path) is None:
            await written(store, path, value)


def test_a_closed_client_leaves_no_thread(servers: list[str], job: str) -> None:
    async def scenario() -> None:
        store = await ZooKeeperStore.open(servers[0], timeout_s=30.0)
        store.watch(job)
        await store.create(f"{job}/a", b"")
        assert threading.active_count() > before
        await store.close()

    before = threading.active_count()
    run(scenario())
    for thread in [thread for thread in threading.enumerate() if thread.name == "metadata-close"]:
        thread.join(10)
    assert threading.active_count() == before


def test_two_jobs_that_list_the_servers_differently_are_not_let_in(tmp_path: Path) -> None:
    async def scenario(servers: list[str]) -> None:
        store = await open_store(f"zk://{servers[0]};{servers[1]}", directory=tmp_path, timeout_s=30.0)
        await store.close()
        with pytest.raises(StoreError, match=r"/ring on .*expected the home ensemble.*found shard 1 .*same order"):
            await open_store(f"zk://{servers[1]};{servers[0]}", directory=tmp_path, timeout_s=30.0)
        again = await open_store(f"zk://{servers[0]};{servers[1]}", directory=tmp_path, timeout_s=30.0)
        await again.close()

    with zookeeper_servers(2) as servers:
        run(scenario(servers))


def test_a_watch_that_is_closed_stops_looking(servers: list[str], job: str) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            store = await opened(stack, servers[0])
            before = len(asyncio.all_tasks())
            async with aclosing(store.watch(job)):
                await store.create(f"{job}/a", b"")
                assert len(asyncio.all_tasks()) > before
            await store.write(f"{job}/a", b"")
            assert len(asyncio.all_tasks()) == before

    run(scenario())
