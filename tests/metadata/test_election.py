"""One leader at a time, on every store: embedded, ZooKeeper, an ensemble, shards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from coordinator.burial import bury
from coordinator.leadership import Candidate, Deposed, Standing, newest_reign, path_of, queue_of
from coordinator.metadata.protocol import MetadataStore
from coordinator.metadata.zookeeper import ZooKeeperStore
from coordinator.pulse import pulse
from tests.metadata.backends import Backend, run
from tests.metadata.link import link_to
from tests.support.zookeeper import Server

SESSION_S = 4.0


async def standing(store: MetadataStore, run: str, count: int) -> None:
    """Returns once that many stand."""
    async with aclosing(store.watch(queue_of(run))) as changes:
        while len(await store.children(queue_of(run))) < count:
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
        assert len(await store.children(queue_of(name))) == 1
        assert term.leads()
        await term.resign()

    backend.run(scenario)


def test_a_leader_whose_entry_is_taken_away_knows(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        name = run_of(backend)
        term = await Candidate(store, name, "first", session_timeout_s=1.0).lead()
        (entry,) = await store.children(queue_of(name))
        await store.delete(f"{queue_of(name)}/{entry}")
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


def connections() -> list[list[str]]:
    """The kernel's table."""
    return [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]


async def connected(place: str) -> None:
    """Returns once somebody holds a connection to it (state 01)."""
    there = f":{int(place.partition('@')[0].rpartition(':')[2]):04X}"
    while not any(fields[2].endswith(there) and fields[3] == "01" for fields in connections()):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)  # it is the kernel's first, and in this loop's hands a turn later


@asynccontextmanager
async def burying(store: MetadataStore, run: str, own: str) -> AsyncIterator[None]:
    task = asyncio.create_task(bury(store, run, own=own))
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_leaders_whose_processes_are_gone_are_succeeded_though_their_sessions_last(backend: Backend) -> None:
    """Also one that goes in the moment in which it has taken over. All share a session here, which does not end, so
    that nothing but the proof lets the next one lead."""

    async def scenario(store: MetadataStore) -> None:
        name = run_of(backend)
        async with AsyncExitStack() as stack:
            places, lives, leading = [], [], []
            for number in range(3):
                lives.append(await stack.enter_async_context(AsyncExitStack()))
                places.append(await lives[-1].enter_async_context(pulse("127.0.0.1")))
                one = Candidate(store, name, f"c{number}", session_timeout_s=60.0, pulse=places[-1])
                leading.append(asyncio.create_task(one.lead()))
                await standing(store, name, number + 1)
            await stack.enter_async_context(burying(store, name, places[2]))
            first = await leading[0]
            await connected(places[0])
            await connected(places[1])
            assert not leading[1].done()
            await lives[0].aclose()
            second = await leading[1]
            await lives[1].aclose()
            third = await leading[2]
            assert (first.epoch, second.epoch, third.epoch) == (1, 2, 3)
            for term in (first, second, third):
                await term.resign()

    backend.run(scenario)


def test_a_leader_and_a_standby_that_go_together_do_not_keep_the_next_one_waiting(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        name = run_of(backend)
        async with AsyncExitStack() as stack:
            own = await stack.enter_async_context(pulse("127.0.0.1"))
            life = await stack.enter_async_context(AsyncExitStack())
            places = [await life.enter_async_context(pulse("127.0.0.1")) for _ in range(2)]
            first = await Candidate(store, name, "first", session_timeout_s=60.0, pulse=places[0]).lead()
            value = msgspec.json.encode(Standing("second", pulse=places[1]))
            await store.create(f"{queue_of(name)}/c-", value, ephemeral=True, sequential=True)
            third = asyncio.create_task(Candidate(store, name, "third", session_timeout_s=60.0, pulse=own).lead())
            await standing(store, name, 3)
            await stack.enter_async_context(burying(store, name, own))
            await connected(places[0])
            await connected(places[1])
            await life.aclose()
            assert (await third).epoch == 2
            assert len(await store.children(queue_of(name))) == 1
            for term in (first, third.result()):
                await term.resign()

    backend.run(scenario)
