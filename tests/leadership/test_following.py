"""A role's side, in virtual time: whom it follows, what it says again, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from actors.core import Actor, Node, Ref, handler
from actors.core.leader import Leader
from actors.env.messages import Noted, Outcome
from bus.message import DeadlineExceeded, NodeAddress, PeerLost, Superseded
from bus.simulated import Link, SimulatedNetwork, SimulatedTransport
from bus.virtual_time import run
from coordinator.allegiance import Allegiance
from coordinator.messages import (
    Announce,
    Ending,
    Follow,
    Following,
    Join,
    Known,
    LetGo,
    Moved,
    RoleFailed,
    RunOver,
)

SILENCE_S = 4.0
TAKEOVER_S = 30.0


class Coordinator(Actor):
    """Notes what it is told; ``deaf``: takes it, and says nothing."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.deaf = deaf
        self.heard: list[object] = []

    @handler
    async def outcome(self, message: Outcome) -> Noted:
        self.heard.append(message)
        if self.deaf:
            await asyncio.sleep(3600.0)
        return Noted()

    @handler
    async def role_failed(self, message: RoleFailed) -> None:
        self.heard.append(message)


class World:
    """A role's node, and leaders under rising epochs."""

    def __init__(self) -> None:
        self.network = SimulatedNetwork(seed=1, link=Link(latency_s=0.01))
        self.ends: list[str] = []
        self.nodes: list[Node] = []
        self.role: Node
        self.allegiance: Allegiance

    async def leader(self, epoch: int, **how: bool) -> tuple[Node, SimulatedTransport, Coordinator, Ref]:
        transport = self.network.join("control", epoch=epoch)
        node = Node("control", transport=transport)
        self.nodes.append(node)
        actor = Coordinator(**how)
        return node, transport, actor, await node.spawn(lambda: actor, "coordinator")

    async def start(self, leader: Ref) -> Leader:
        self.role = Node("env-1", transport=self.network.join("env-1"))
        self.nodes.append(self.role)
        self.allegiance = Allegiance(lambda end: self.ends.append(str(end)))
        await self.role.spawn(lambda: self.allegiance, "member")
        join = Join(self.role.address, ["env"], 1, b"")
        return self.allegiance.joined(join, leader, silence_s=SILENCE_S, takeover_s=TAKEOVER_S)

    async def follow(self, node: Node, leader: Ref, *, begun: bool) -> Following:
        order = Follow(leader, begun=begun)
        return await node.ask(self.allegiance.ref, order, Following, timeout_s=5.0)


def simulated(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        try:
            await scenario(world)
        finally:
            for node in reversed(world.nodes):
                await node.close()

    run(main())


def test_what_an_old_leader_did_not_answer_is_said_to_the_next_one() -> None:
    async def scenario(world: World) -> None:
        _, transport, first, ref = await world.leader(1, deaf=True)
        leader = await world.start(ref)
        outcome = Outcome("t1", "stored")
        asking = asyncio.create_task(leader.ask(world.role, outcome, Noted, timeout_s=60.0, retries=5))
        await asyncio.sleep(1.0)
        assert first.heard == [outcome]
        transport.crash()
        node, _, second, again = await world.leader(2)
        await world.follow(node, again, begun=False)
        await asyncio.sleep(1.0)
        assert second.heard == []  # it is kept back until the new one has begun
        await world.follow(node, again, begun=True)
        assert await asking == Noted()
        assert second.heard == [outcome]

    simulated(scenario)


def test_a_node_that_follows_says_what_it_had_said_before_and_tells_failures_again() -> None:
    async def scenario(world: World) -> None:
        _, transport, first, ref = await world.leader(1)
        await world.start(ref)
        announce = Announce("env", Ref(world.role.address, "env"))
        world.allegiance.announces(announce)
        failure = RoleFailed("env", "env-1", "no worker is left")
        world.allegiance.fails(failure)
        await asyncio.sleep(1.0)
        assert first.heard == [failure]
        transport.crash()
        node, _, second, again = await world.leader(2)
        following = await world.follow(node, again, begun=True)
        assert following.join.node == world.role.address
        assert following.announced == [announce]
        await asyncio.sleep(1.0)
        assert second.heard == [failure]

    simulated(scenario)


def test_whoever_has_heard_of_a_later_leader_refuses_the_earlier_one() -> None:
    async def scenario(world: World) -> None:
        old, _, _, ref = await world.leader(1)
        await world.start(ref)
        node, _, _, again = await world.leader(2)
        await world.follow(node, again, begun=True)
        with pytest.raises(Superseded, match="a later one is known, 2"):
            await world.follow(old, ref, begun=True)
        old.tell(world.allegiance.ref, RunOver("the old leader says so"))
        await asyncio.sleep(1.0)
        assert world.ends == []
        assert world.allegiance.leader.ref == again

    simulated(scenario)


def test_a_node_without_a_leader_waits_for_another_and_then_ends_by_name() -> None:
    async def scenario(world: World) -> None:
        _, transport, _, ref = await world.leader(1)
        await world.start(ref)
        await asyncio.sleep(1.0)
        transport.crash()
        await asyncio.sleep(SILENCE_S + TAKEOVER_S - 2.0)
        assert world.ends == []
        await asyncio.sleep(5.0)
        (end,) = world.ends
        assert end.startswith("lost the coordinator: no sign of life for 4.0 s")
        assert "no other one led within 30 s" in end

    simulated(scenario)


def test_a_leader_that_comes_in_time_keeps_a_node_from_ending() -> None:
    async def scenario(world: World) -> None:
        _, transport, _, ref = await world.leader(1)
        await world.start(ref)
        transport.crash()
        await asyncio.sleep(SILENCE_S + TAKEOVER_S / 2)
        node, _, _, again = await world.leader(2)
        await world.follow(node, again, begun=True)
        await asyncio.sleep(10 * TAKEOVER_S)
        assert world.ends == []

    simulated(scenario)


def test_a_node_is_told_who_has_a_role_by_now_and_so_is_whoever_asks_later() -> None:
    async def scenario(world: World) -> None:
        node, _, _, ref = await world.leader(1)
        await world.start(ref)
        told: list[Ref] = []
        world.allegiance.on_moved("proxy", told.append)
        first, second = (Ref(NodeAddress(f"proxy-{n}", "tcp://p:1", "tcp://p:2", n), "proxy") for n in (1, 2))
        for proxy in (first, second):
            await node.ask(world.allegiance.ref, Moved("proxy", proxy), Known, timeout_s=5.0)
        await node.ask(world.allegiance.ref, Moved("reward", first), Known, timeout_s=5.0)
        assert told == [first, second]
        world.allegiance.on_moved("proxy", told.append)
        assert told == [first, second, second]

    simulated(scenario)


def test_a_node_that_is_let_go_ends_though_the_run_goes_on() -> None:
    async def scenario(world: World) -> None:
        node, _, _, ref = await world.leader(1)
        await world.start(ref)
        await node.ask(world.allegiance.ref, LetGo("another takes its place"), Ending, timeout_s=5.0)
        await asyncio.sleep(1.0)
        assert world.ends == ["another takes its place"]

    simulated(scenario)


def test_a_node_that_has_not_joined_follows_nobody() -> None:
    async def scenario(world: World) -> None:
        node, _, _, ref = await world.leader(1)
        world.role = Node("env-1", transport=world.network.join("env-1"))
        world.nodes.append(world.role)
        world.allegiance = Allegiance(lambda end: world.ends.append(str(end)))
        await world.role.spawn(lambda: world.allegiance, "member")
        with pytest.raises(Exception, match="node env-1 has not joined yet"):
            await world.follow(node, ref, begun=True)

    simulated(scenario)


def test_without_patience_the_loss_of_a_leader_is_told_at_once() -> None:
    async def scenario(world: World) -> None:
        nobody = Ref(NodeAddress("control", "tcp://control:1", "tcp://control:2", 1), "coordinator")
        node = Node("env-1", transport=world.network.join("env-1"))
        world.nodes.append(node)
        node.lose(nobody.node, "it crashed")
        with pytest.raises(PeerLost):
            await Leader(nobody).ask(node, Outcome("t1", "stored"), Noted, timeout_s=60.0)
        assert asyncio.get_running_loop().time() == 0.0

    simulated(scenario)


def test_with_patience_it_is_told_once_that_is_over() -> None:
    async def scenario(world: World) -> None:
        nobody = Ref(NodeAddress("control", "tcp://control:1", "tcp://control:2", 1), "coordinator")
        node = Node("env-1", transport=world.network.join("env-1"))
        world.nodes.append(node)
        with pytest.raises(DeadlineExceeded):
            await Leader(nobody, patience_s=20.0).ask(node, Outcome("t1", "stored"), Noted, timeout_s=10.0)
        assert asyncio.get_running_loop().time() == pytest.approx(30.0)

    simulated(scenario)
