"""Names of actors in a metadata store, whichever it is."""

import asyncio
from pathlib import Path

import pytest

from actors.core import Named, Node, Ref
from actors.core.directory import DirectoryError
from bus.message import NodeAddress
from coordinator.metadata.directory import StoreDirectory
from coordinator.metadata.protocol import MetadataStore
from tests.actors.support import Add, Example, Total
from tests.metadata.backends import Backend


def ref(number: int) -> Ref:
    return Ref(NodeAddress("n", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", number), "actor")


def test_the_last_announcement_counts_and_a_late_withdrawal_takes_nothing_away(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        directory = StoreDirectory(store, f"{backend.job}/names")
        assert await directory.find("x") is None
        await directory.withdraw("x", ref(1))
        await directory.announce("x", ref(1))
        await directory.announce("x", ref(2))
        await directory.withdraw("x", ref(1))
        assert await directory.find("x") == ref(2)
        await directory.withdraw("x", ref(2))
        assert await directory.find("x") is None

    backend.run(scenario)


def test_any_name_will_do(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        directory = StoreDirectory(store, f"{backend.job}/names")
        for number, name in enumerate(["@node", "a/b", "é?%2F", ".", "two words"], start=1):
            await directory.announce(name, ref(number))
            assert await directory.find(name) == ref(number)

    backend.run(scenario)


def test_what_a_process_announced_goes_with_its_session_also_where_it_took_over_a_name(
    lone_server: list[str], tmp_path: Path
) -> None:
    backend = Backend(f"zk://{lone_server[0]}", tmp_path)

    async def scenario(store: MetadataStore) -> None:
        directory = StoreDirectory(store, f"{backend.job}/names")
        await directory.announce("x", ref(1))
        other = await backend.open()
        await StoreDirectory(other, f"{backend.job}/names").announce("x", ref(2))
        await other.close()
        assert await directory.find("x") is None

    backend.run(scenario)


def test_many_who_announce_one_name_at_once_leave_one(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        directory = StoreDirectory(store, f"{backend.job}/names")
        results = await asyncio.gather(
            *(directory.announce("x", ref(number)) for number in range(1, 4)), return_exceptions=True
        )
        assert all(result is None or isinstance(result, DirectoryError) for result in results)
        assert await directory.find("x") in [ref(1), ref(2), ref(3)]

    backend.run(scenario)


def test_an_entry_that_is_no_ref_is_named(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        path = f"{backend.job}/names/x"
        await store.create(path, b"[1]")
        with pytest.raises(DirectoryError, match=f"{path} holds no ref"):
            await StoreDirectory(store, f"{backend.job}/names").find("x")

    backend.run(scenario)


def test_nodes_find_each_other_and_their_actors_through_a_store(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        directory = StoreDirectory(store, f"{backend.job}/names")
        async with Node("host", directory=directory) as host, Node("asker", directory=directory) as asker:
            host.offer("example", Example)
            await host.announce("e", await asker.spawn_on("host", "example", "e", timeout_s=10))
            assert (await asker.ask(Named("e"), Add(2), Total, timeout_s=10)).value == 2
        assert await directory.find("@host") is None

    backend.run(scenario)
