"""Whoever an env host asks may be replaced: what was under way is asked of the successor, and nothing is lost."""

from __future__ import annotations

import asyncio

from actors.core import Node, Ref
from actors.core.leader import Leader
from actors.env.messages import Stop
from actors.env.proxies import Proxies
from actors.proxy.messages import ProxySet, ServingProxy
from bus import virtual_time
from bus.simulated import Link, SimulatedNetwork
from tests.env_manager.support import (
    Faults,
    ScriptedProxy,
    ScriptedReward,
    ScriptedStore,
    World,
    simulated_world,
    world,
)
from tests.support.loops import run, until


def only(ref: Ref) -> ProxySet:
    """This one alone."""
    return ProxySet([ServingProxy(ref)])


async def ended(made: World, count: int) -> list[tuple[str, str, str]]:
    await until(lambda: len(made.outcomes) == count)
    return sorted((each.ticket, each.state, each.reason) for each in made.outcomes)


def test_what_a_proxy_was_asked_its_successor_is_asked_too() -> None:
    async def test() -> None:
        async with world() as made:
            made.proxy.holds = lambda request: True
            made.start("t1", "t2")
            await until(lambda: len(made.proxy.held) == 2)
            successor = ScriptedProxy(Faults())
            made.peers.proxies.follow(only(await made.worker_node.spawn(lambda: successor, "proxy")))
            assert await ended(made, 2) == [("t1", "stored", ""), ("t2", "stored", "")]
            first = {request.request_id: list(request.prompt) for request in made.proxy.requests}
            again = {request.request_id: list(request.prompt) for request in successor.requests}
            assert {id_: again[id_] for id_ in first} == first == {"t1/0": first["t1/0"], "t2/0": first["t2/0"]}
            assert sorted(successor.ended) == ["t1", "t2"]
            made.proxy.answer("t1/0")  # the one before it was not quite gone
            await until(lambda: made.store.kept["t1"].turns == 3)
            counters = (await made.describe()).counters
            assert (counters["requests_of_an_earlier_proxy"], counters["stored"]) == (2, 2)

    run(test())


def test_what_a_successor_was_asked_has_its_whole_time_there() -> None:
    async def test() -> None:
        async with simulated_world(turn_timeout_s=5.0) as made:
            made.proxy.holds = lambda request: True
            made.start("t1", "t2")
            await until(lambda: len(made.proxy.held) == 2)
            await asyncio.sleep(4.0)
            successor = ScriptedProxy(Faults())
            successor.holds = lambda request: True
            made.peers.proxies.follow(only(await made.worker_node.spawn(lambda: successor, "proxy")))
            await until(lambda: len(successor.held) == 2)
            await asyncio.sleep(4.0)  # 8 s after they were asked first
            assert made.outcomes == []
            successor.holds = lambda request: False
            successor.answer("t1/0")
            assert await ended(made, 2) == [("t1", "stored", ""), ("t2", "lost", "generation_timeout")]

    virtual_time.run(test())


def test_a_turn_waits_for_a_successors_engines_to_start_and_to_get_their_version() -> None:
    async def test() -> None:
        async with simulated_world(turn_timeout_s=5.0) as made:
            made.start("t1")
            await ended(made, 1)  # the engines of before had their version long ago
            made.proxy.holds = lambda request: True
            made.start("t2")
            await until(lambda: len(made.proxy.held) == 1)
            successor = ScriptedProxy(Faults())
            successor.holds = lambda request: True
            made.peers.proxies.follow(only(await made.worker_node.spawn(lambda: successor, "proxy")))
            made.start("t3")
            await until(lambda: len(successor.held) == 2)
            await asyncio.sleep(300.0)
            assert len(made.outcomes) == 1
            successor.holds = lambda request: False
            successor.answer("t2/0")
            successor.answer("t3/0")
            assert await ended(made, 3) == [("t1", "stored", ""), ("t2", "stored", ""), ("t3", "stored", "")]

    virtual_time.run(test())


def test_a_turn_waits_for_a_proxy_as_long_as_its_successor_may_take() -> None:
    async def test() -> None:
        network = SimulatedNetwork(seed=1, link=Link(latency_s=0.005))
        async with world(network=network, turn_timeout_s=5.0) as made:
            first, successor = ScriptedProxy(Faults()), ScriptedProxy(Faults())
            first.holds = lambda request: True
            async with Node("proxy-1", transport=network.join("proxy-1")) as node:
                ref = await node.spawn(lambda: first, "proxy")
                made.peers.proxies = Proxies(only(ref), patience_s=60.0)
                made.start("t1", "t2")
                await until(lambda: len(first.held) == 2)
            await asyncio.sleep(30.0)  # it was let go, and nobody is there yet
            assert made.outcomes == []
            made.peers.proxies.follow(only(await made.worker_node.spawn(lambda: successor, "proxy")))
            assert await ended(made, 2) == [("t1", "stored", ""), ("t2", "stored", "")]
            assert {request.request_id for request in first.requests} == {"t1/0", "t2/0"}

    virtual_time.run(test())


def test_who_is_asked_for_nothing_is_not_asked_again() -> None:
    async def test() -> None:
        async with world() as made:
            made.start("t1")
            await ended(made, 1)
            successor = ScriptedProxy(Faults())
            made.peers.proxies.follow(only(await made.worker_node.spawn(lambda: successor, "proxy")))
            made.start("t2")
            assert await ended(made, 2) == [("t1", "stored", ""), ("t2", "stored", "")]
            assert [request.request_id for request in successor.requests] == ["t2/0", "t2/1", "t2/2"]

    run(test())


def test_what_is_scored_waits_for_a_successor() -> None:
    async def test() -> None:
        async with world() as made:
            gone = await made.worker_node.spawn(lambda: ScriptedReward(Faults()), "reward")
            made.peers.reward = Leader(gone, patience_s=60.0, late_is_gone=False)
            await made.worker_node.stop(gone)
            made.start("t1")
            await until(lambda: made.worker.closed == ["t1"])
            assert await made.states() == {"t1": "reward"}
            successor = ScriptedReward(Faults())
            made.peers.reward.follow(await made.worker_node.spawn(lambda: successor, "reward-2"))
            assert await ended(made, 1) == [("t1", "stored", "")]
            assert successor.scoring == ["t1"]

    run(test())


def test_what_is_stored_waits_for_a_successor_which_may_hear_it_twice() -> None:
    async def test() -> None:
        async with world() as made:
            first = ScriptedStore(Faults())
            first.gate.clear()  # it has it, and never says so
            gone = await made.worker_node.spawn(lambda: first, "store")
            made.peers.store = Leader(gone, patience_s=60.0, late_is_gone=False)
            made.start("t1")
            await until(lambda: first.storing == ["t1"])
            await made.worker_node.stop(gone)
            successor = ScriptedStore(Faults())
            made.peers.store.follow(await made.worker_node.spawn(lambda: successor, "store-2"))
            assert await ended(made, 1) == [("t1", "stored", "")]
            assert list(successor.kept) == ["t1"]

    run(test())


def test_who_is_late_is_not_gone() -> None:
    async def test() -> None:
        async with world(reward_timeout_s=0.2) as made:
            slow = ScriptedReward(Faults())
            slow.gate.clear()
            there = await made.worker_node.spawn(lambda: slow, "reward")
            made.peers.reward = Leader(there, patience_s=60.0, late_is_gone=False)
            made.start("t1")
            assert await ended(made, 1) == [("t1", "lost", "reward_timeout")]
            slow.gate.set()

    run(test())


# ---- several proxies -------------------------------------------------------------------------------------------------


async def beside(made: World, other: ScriptedProxy) -> Ref:
    """Another proxy."""
    return await made.worker_node.spawn(lambda: other, "proxy")


async def both(made: World, other: ScriptedProxy, *, here: int, there: int) -> ProxySet:
    """The one of the world and another one, with so many places."""
    (ref,) = made.peers.proxies.refs
    return ProxySet([ServingProxy(ref, {"CPU": here}), ServingProxy(await beside(made, other), {"CPU": there})])


def test_a_proxy_that_serves_nothing_hears_that_its_trajectory_is_stopped_and_has_ended() -> None:
    async def test() -> None:
        async with simulated_world(turn_timeout_s=1_000.0) as made:
            made.proxy.holds = lambda request: True
            made.start("t1", "t2", "t3")
            await until(lambda: len(made.proxy.held) == 3)
            other = ScriptedProxy(Faults())
            made.peers.proxies.follow(await both(made, other, here=0, there=8))
            made.node.tell(made.host, Stop(["t1", "t2", "t3"], "straggler"))
            assert await ended(made, 3) == [(id_, "lost", "straggler") for id_ in ("t1", "t2", "t3")]
            assert sorted(made.proxy.aborted) == ["t1/0", "t2/0", "t3/0"]
            assert sorted(made.proxy.ended) == ["t1", "t2", "t3"]
            assert (other.aborted, other.ended) == ([], [])

    virtual_time.run(test())


def test_what_is_stopped_while_it_is_asked_of_another_proxy_is_aborted_once_that_has_it() -> None:
    async def test() -> None:
        async with simulated_world(turn_timeout_s=1_000.0) as made:
            made.proxy.holds = lambda request: True
            made.start("t1")
            await until(lambda: made.proxy.held)
            other = ScriptedProxy(Faults())
            other.holds = lambda request: True
            other.accepts.clear()
            made.peers.proxies.follow(only(await beside(made, other)))
            await until(lambda: other.requests)
            made.node.tell(made.host, Stop(["t1"], "straggler"))
            await until(lambda: other.aborted)
            other.accepts.set()
            assert await ended(made, 1) == [("t1", "lost", "straggler")]
            assert other.aborted == ["t1/0", "t1/0"]

    virtual_time.run(test())
