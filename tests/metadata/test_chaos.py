"""Real ensembles under faults: every entry's history is linearizable, no acknowledged write is lost, watches are
complete. The home is an ensemble of three; the other shards are servers of their own.

A short form here; long ones, with every kind of fault over and over, are deep.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import pytest

from coordinator.metadata import open_sharded
from coordinator.metadata.moving import Moved, Mover
from coordinator.metadata.protocol import SessionLost, StoreError, StoreTimeout
from coordinator.metadata.ringwriter import RingBusy
from tests.metadata.chaos import Client, Follower, Histories, contents
from tests.metadata.link import Link, link_to
from tests.support.zookeeper import Server, running_ensemble, running_servers

PATIENCE_S = 240.0  # of a scenario; no assertion is about time
TIMEOUT_S = 5.0  # of a call: a quorum that is lost makes it unknown
PREFIX = "/jobs/j/nodes"
PATHS = [f"{PREFIX}/n{number}" for number in range(10)] + [f"{PREFIX}/x{number}/a" for number in range(4)]


class Cluster:
    """What faults can be done to."""

    def __init__(self, home: list[Server], others: list[Server], link: Link) -> None:
        self.home = home
        self.others = others  # the last one is in no ring at first
        self.link = link
        self.spec = "zk://" + ",".join(server.address for server in home)
        self.faults: dict[str, list[float]] = {}
        self.moved: list[Moved] = []

    def leader(self) -> Server:
        return next(server for server in self.home if server.mode() == "leader")

    def followers(self) -> list[Server]:
        return [server for server in self.home if server.mode() == "follower"]

    async def serving(self) -> None:
        """All of home."""
        while True:
            modes = await asyncio.gather(*(asyncio.to_thread(server.mode) for server in self.home))
            if all(modes):
                return
            await asyncio.sleep(0.1)

    def note(self, fault: str) -> None:
        self.faults.setdefault(fault, []).append(asyncio.get_running_loop().time())


async def leader_killed(cluster: Cluster) -> None:
    leader = await asyncio.to_thread(cluster.leader)
    cluster.note("leader killed")
    leader.kill()
    await asyncio.sleep(2)
    leader.start()
    await cluster.serving()


async def server_stopped(cluster: Cluster) -> None:
    server = random.Random(len(cluster.faults)).choice(cluster.home)
    cluster.note("server stopped")
    server.pause()
    await asyncio.sleep(2)
    server.resume()
    await cluster.serving()


async def leader_stopped(cluster: Cluster) -> None:
    leader = await asyncio.to_thread(cluster.leader)
    cluster.note("leader stopped")
    leader.pause()
    await asyncio.sleep(8)
    leader.resume()
    await cluster.serving()


async def quorum_lost(cluster: Cluster) -> None:
    killed = [await asyncio.to_thread(cluster.leader), (await asyncio.to_thread(cluster.followers))[0]]
    for server in killed:
        server.kill()
    await asyncio.sleep(3)
    cluster.note("quorum regained")
    for server in killed:
        server.start()
    await cluster.serving()


async def session_expired(cluster: Cluster) -> None:
    """Of the client behind the link: sessions are of 4 s."""
    cluster.link.cut()
    await asyncio.sleep(7)
    cluster.link.mend()


async def shard_stopped(cluster: Cluster) -> None:
    cluster.note("shard stopped")
    cluster.others[0].pause()
    await asyncio.sleep(2)
    cluster.others[0].resume()


async def shard_added(cluster: Cluster) -> None:
    await patiently(cluster, lambda mover, _: mover.add(cluster.others[-1].address))


async def shard_removed(cluster: Cluster) -> None:
    """The one that was added last."""
    await patiently(cluster, lambda mover, ring: mover.remove(ring[-1]))


Order = Callable[[Mover, tuple[str, ...]], Awaitable[Moved]]


async def patiently(cluster: Cluster, order: Order) -> None:
    """What an operator does whose command failed under faults: look, and give it again, or resume."""
    before: tuple[str, ...] = ()
    while True:
        try:
            operator = await open_sharded(cluster.spec, timeout_s=20.0)
        except StoreTimeout:
            continue
        try:
            state = operator.ring.state
            before = before or state.ring
            mover = Mover(operator.ring, told=lambda _: None)
            if state.before:
                cluster.moved.append(await mover.resume())
            elif state.ring == before:
                cluster.moved.append(await order(mover, before))
            return  # or it was done, and the answer was lost
        except (StoreTimeout, RingBusy, SessionLost):
            await asyncio.sleep(0.5)
        finally:
            with suppress(StoreError):
                await operator.close()


Fault = Callable[[Cluster], Awaitable[None]]


async def under_faults(cluster: Cluster, faults: list[Fault], *, pause_s: float, clients: int) -> Histories:
    histories = Histories()
    spec = cluster.spec
    working = [Client(spec, histories, seed, TIMEOUT_S) for seed in range(clients)]
    working.append(Client(f"zk://{cluster.link.address}", histories, clients, TIMEOUT_S))
    followers = [Follower(spec, PREFIX, TIMEOUT_S), Follower(spec, f"{PREFIX}/x1", TIMEOUT_S)]
    stop = asyncio.Event()
    following = [asyncio.create_task(follower.follow()) for follower in followers]
    tasks = [asyncio.create_task(client.work(PATHS, stop, pause_s)) for client in working]
    for fault in faults:
        await fault(cluster)
        await asyncio.sleep(1)
    stop.set()
    await asyncio.gather(*tasks)
    await cluster.serving()
    last = Client(spec, histories, 0, 60.0)
    for path in PATHS:
        await last.one(path, "get")
    store = await last.store()
    for prefix, follower in zip((PREFIX, f"{PREFIX}/x1"), followers, strict=True):
        await agreed(follower, await contents(store, prefix))
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)
    await asyncio.gather(*(client.close() for client in (*working, last)))
    await asyncio.gather(*(follower.close() for follower in followers))
    return histories


async def agreed(follower: Follower, there: dict[str, bytes]) -> None:
    """Within the scenario's patience."""
    while True:
        if follower.seen == there:
            return
        await asyncio.sleep(0.1)


def chaos(faults: list[Fault], *, patience_s: float = PATIENCE_S, pause_s: float = 0.1, clients: int = 3) -> Cluster:
    """Raises ``AssertionError`` where a history cannot have happened; prints what was seen."""

    async def scenario(home: list[Server], others: list[Server]) -> tuple[Cluster, Histories]:
        async with asyncio.timeout(patience_s), AsyncExitStack() as stack:
            link = await stack.enter_async_context(link_to(home[0].address))
            cluster = Cluster(home, others, link)
            store = await open_sharded(f"{cluster.spec};{others[0].address}", timeout_s=60.0)
            for path in PATHS[10:]:
                await store.create(path.rpartition("/")[0], b"")
            await store.close()
            return cluster, await under_faults(cluster, faults, pause_s=pause_s, clients=clients)

    with running_ensemble(3) as home, running_servers(2) as others:
        cluster, histories = asyncio.run(scenario(home, others))
    calls = sum(map(len, histories.calls.values()))
    print(f"{calls} calls, {histories.unknown()} of unknown effect, {histories.sessions_lost} sessions lost")
    for fault, times in cluster.faults.items():
        print(
            f"{fault}: a write acknowledged after {', '.join(f'{histories.first_after(time):.2f} s' for time in times)}"
        )
    for moved in cluster.moved:
        print(f"ring of {moved.shards}: {moved.prefixes} of {moved.of} prefixes moved")
    assert histories.not_linearizable() == []
    assert calls > 100
    return cluster


def test_a_shard_added_and_a_leader_killed_cost_no_acknowledged_write(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = chaos([leader_killed, shard_added, server_stopped, shard_removed])
    assert [moved.shards for moved in cluster.moved] == [3, 3]


@pytest.mark.deep
def test_every_fault_over_and_over_costs_no_acknowledged_write() -> None:
    faults: list[Fault] = [
        leader_killed,
        shard_added,
        session_expired,
        quorum_lost,
        shard_removed,
        leader_stopped,
        shard_stopped,
        server_stopped,
    ]
    chaos(faults * 3, patience_s=1800.0)


@pytest.mark.deep
def test_shards_that_come_and_go_while_servers_fail_cost_no_acknowledged_write() -> None:
    def together(first: Fault, second: Fault) -> Fault:
        async def both(cluster: Cluster) -> None:
            await asyncio.gather(first(cluster), second(cluster))

        return both

    pairs = [(leader_killed, shard_added), (server_stopped, shard_removed), (quorum_lost, shard_added)]
    pairs += [(shard_stopped, shard_removed), (session_expired, shard_added), (leader_stopped, shard_removed)]
    chaos([together(*pair) for pair in pairs] * 2, patience_s=1800.0)
