"""One leader at a time, on every store: embedded, ZooKeeper, an ensemble, shards."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing

import pytest

from coordinator.leadership import Candidate, Deposed, bury, newest_reign, path_of
from coordinator.metadata.protocol import MetadataStore
from coordinator.metadata.zookeeper import ZooKeeperStore
from coordinator.pulse import pulse
from tests.metadata.backends import Backend, run
from tests.metadata.link import link_to
from tests.support.zookeeper import Server

SESSION_S = 4.0


async def standing(store: MetadataStore, run: str, count: int) -> None:
    """Returns once that many stand."""
    async with aclosing(store.watch(f"{path_of(run)}/candidates")) as changes:
        while len(await store.children(f"{path_of(run)}/candidates")) < count:
            await anext(changes)


def run_of(backend: Backend) -> str:
    return backend.job.rpartition("/")[2] + "-led"


def test_the_first_who_stands_leads_and_the_others_follow_in_order(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        name = run_of(backend)
        first = await Candidate(store, name, "first", session_timeout_s=SESSION_S).lead()
        waiting = []
        for other in ("second", "third"):
            waiting.append(asyncio.create_task(Candidate(store, name, other, session_timeout_s=SESSION_S).lead()))
            await standing(store, name, 1 + len(waiting))
        assert first.leads()
        assert first.epoch == 1
        await first.resign()
        assert not first.leads()
        second = await waiting[0]
        assert second.epoch == 2
        assert not waiting[1].done()
        reign = await newest_reign(store, name)
        assert reign is not None
        assert (reign.epoch, reign.name) == (2, "second")
        await second.resign()
        third = await waiting[1]
        assert third.epoch == 3
        await third.resign()

    backend.run(scenario)


def test_the_leader_says_where_it_listens_unless_another_has_begun(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        name = run_of(backend)
        term = await Candidate(store, name, "first", session_timeout_s=SESSION_S).lead()
        await term.listens_at("tcp://127.0.0.1:7001")
        reign = await newest_reign(store, name)
        assert reign is not None
        assert reign.address == "tcp://127.0.0.1:7001"
        path = f"{path_of(name)}/epoch"
        await store.write(path, b'{"epoch":2,"name":"second","entry":"elsewhere"}')
        with pytest.raises(Deposed, match="somebody else leads"):
            await term.listens_at("tcp://127.0.0.1:7002")
        assert not term.leads()
        await term.resign()

    backend.run(scenario)


def test_a_candidate_that_gives_up_leaves_its_place(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        name = run_of(backend)
        term = await Candidate(store, name, "first", session_timeout_s=SESSION_S).lead()
        waiting = asyncio.create_task(Candidate(store, name, "second", session_timeout_s=SESSION_S).lead())
        await standing(store, name, 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert len(await store.children(f"{path_of(name)}/candidates")) == 1
        assert term.leads()
        await term.resign()

    backend.run(scenario)


def test_a_leader_whose_entry_is_taken_away_knows(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        name = run_of(backend)
        term = await Candidate(store, name, "first", session_timeout_s=1.0).lead()
        (entry,) = await store.children(f"{path_of(name)}/candidates")
        await store.delete(f"{path_of(name)}/candidates/{entry}")
        assert "gone" in await asyncio.wait_for(term.over, 10.0)
        assert not term.leads()
        with pytest.raises(Deposed):
            await term.certain()
        await term.resign()

    backend.run(scenario)


def test_a_leader_that_is_cut_off_knows_before_the_next_one_leads(lone_server: list[str]) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            link = await stack.enter_async_context(link_to(lone_server[0]))
            stores = []
            for address in (link.address, lone_server[0]):
                stores.append(await ZooKeeperStore.open(address, timeout_s=10.0, session_timeout_s=SESSION_S))
                stack.push_async_callback(stores[-1].close)
            first = await Candidate(stores[0], "cut", "first", session_timeout_s=SESSION_S).lead()
            waiting = asyncio.create_task(Candidate(stores[1], "cut", "second", session_timeout_s=SESSION_S).lead())
            await standing(stores[1], "cut", 2)
            assert first.leads()
            link.cut()
            second = await waiting
            assert not first.leads()
            assert second.leads()
            assert second.epoch == first.epoch + 1
            link.mend()
            assert "session was lost" in await first.over
            await second.resign()

    run(scenario())


def test_no_answer_from_the_servers_for_a_while_is_not_the_end(victim: Server) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            stores = []
            for _ in range(2):
                stores.append(await ZooKeeperStore.open(victim.address, timeout_s=2.0, session_timeout_s=3.0))
                stack.push_async_callback(stores[-1].close)
            first = await Candidate(stores[0], "paused", "first", session_timeout_s=3.0).lead()
            waiting = asyncio.create_task(Candidate(stores[1], "paused", "second", session_timeout_s=3.0).lead())
            await asyncio.sleep(0.5)
            victim.pause()
            await asyncio.sleep(2.5)
            assert not first.leads()
            victim.resume()
            # It is confirmed again, unless the server's clock has ended its session: then the next one leads.
            try:
                await asyncio.wait_for(first.certain(), 20.0)
                assert first.epoch == 1
                assert not waiting.done()
            except Deposed:
                assert (await asyncio.wait_for(waiting, 20.0)).epoch == 2
            waiting.cancel()
            for done in await asyncio.gather(waiting, return_exceptions=True):
                if not isinstance(done, BaseException):
                    await done.resign()
            await first.resign()

    run(scenario())


def test_a_leader_whose_process_is_gone_is_succeeded_though_its_session_lasts(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        name = run_of(backend)
        first = await Candidate(store, name, "first", session_timeout_s=60.0).lead()
        burying = asyncio.create_task(bury(store, name))
        waiting = asyncio.create_task(Candidate(store, name, "second", session_timeout_s=60.0).lead())
        async with pulse("127.0.0.1") as place:
            await first.listens_at("tcp://127.0.0.1:7001", place)
            await asyncio.sleep(1.0)
            assert not waiting.done()
        second = await waiting  # far within the session's timeout
        assert second.epoch == 2
        burying.cancel()
        await first.resign()
        await second.resign()

    backend.run(scenario)
