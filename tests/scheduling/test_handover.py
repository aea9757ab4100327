"""Nodes of a run that are replaced one after the other, in virtual time: the coordinator's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from actors.core import Actor, Node, Ref
from actors.proxy.messages import ProxySet
from bus.message import DeadlineExceeded
from bus.virtual_time import run
from coordinator.allegiance import Allegiance
from coordinator.handover import Handover
from coordinator.messages import MEMBER, Announce, Announced, Join, Role, Welcome
from tests.scheduling.cluster import Cluster, cluster
from tests.scheduling.support import rules

START_S = 300.0


class Loop:
    """A training loop that is between two steps whenever it is asked."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.stands = False

    @asynccontextmanager
    async def between_steps(self) -> AsyncIterator[None]:
        await asyncio.sleep(7.0)  # the step under way
        self.stands = True
        yield
        self.stands = False

    async def checkpoint(self) -> Path:
        assert self.stands
        self.said.append("checkpoint")
        return Path("/run/checkpoints/v00003")

    async def succeeded(self, role: Role, ref: Ref) -> None:
        assert self.stands
        self.said.append(f"{role} at {ref.node.name}")


class Part:
    """A node with one role, which ends when it is let go."""

    def __init__(self, made: Cluster, name: str, role: Role) -> None:
        self._made = made
        self.role = role
        self.name = name
        self.moved: list[str] = []
        self.ended = ""
        self.node: Node
        self.ref: Ref

    async def join(self) -> Welcome:
        self.node = Node(self.name, transport=self._made.network.join(self.name))
        self._made.nodes[self.name] = self.node
        self._allegiance = Allegiance(self._end)
        self.proxies: list[str] = []
        self._allegiance.proxies.on_change(self._others)
        for role in ("reward", "trainer", "weightsync"):
            self._allegiance.on_moved(role, lambda ref: self.moved.append(f"{ref.actor}@{ref.node.name}"))
        await self.node.spawn(lambda: self._allegiance, MEMBER, restarts=0)
        join = Join(self.node.address, [self.role], 1, b"{}")
        welcome = await self.node.ask(self._made.ref, join, Welcome, timeout_s=30.0)
        self._allegiance.joined(join, self._made.ref, silence_s=20.0, takeover_s=30.0)
        return welcome

    def _others(self, found: ProxySet) -> None:
        self.proxies = [member.ref.node.name for member in found.members]

    async def announce(self) -> None:
        self.ref = await self.node.spawn(Actor, self.role)
        await self.node.ask(self._made.ref, Announce(self.role, self.ref), Announced, timeout_s=30.0)

    async def serves(self, places: int) -> None:
        """Of a proxy."""
        announce = Announce("proxy", self.ref, serving={"CPU": places})
        await self.node.ask(self._made.ref, announce, Announced, timeout_s=30.0)

    def _end(self, why: object) -> None:
        self.ended = str(why)
        asyncio.get_running_loop().call_later(1.0, lambda: asyncio.ensure_future(self.node.close()))


class Town:
    """A coordinator, a node for each role, and a loop."""

    def __init__(self, made: Cluster) -> None:
        self.made = made
        self.loop = Loop()
        self.failed: list[BaseException] = []
        self.said: list[str] = []
        self.parts: dict[str, Part] = {}
        self.handover = Handover(
            made.node, made.coordinator, start_timeout_s=START_S, failed=self.failed.append, say=self.said.append
        )
        self.handover.pipeline = self.loop

    async def add(self, name: str, role: Role) -> Part:
        part = self.parts[name] = Part(self.made, name, role)
        await part.join()
        await part.announce()
        return part


def town(scenario: Callable[[Town], Awaitable[None]]) -> None:
    async def main() -> None:
        async with cluster(rules()) as made:
            built = Town(made)
            for role in ("trainer", "weightsync", "reward", "proxy"):
                await built.add(f"{role}-1", role)
            await scenario(built)
            assert made.failures == []

    run(main())


@pytest.mark.parametrize("role", ["reward", "proxy", "weightsync"])
def test_a_role_goes_from_one_node_to_another_between_two_steps_and_all_are_told(role: Role) -> None:
    async def scenario(built: Town) -> None:
        old = built.parts[f"{role}-1"]
        changed = await built.handover.let_go(old.name)
        assert (
            changed.message
            == f"{old.name} ends after the step under way; the run then waits for another node for " + role
        )
        await asyncio.sleep(5.0)
        assert old.ended == ""
        await asyncio.sleep(5.0)
        assert (old.ended, built.loop.stands) == ("let go: another node takes its place", True)
        assert built.made.coordinator.roster.has(role) is None
        await asyncio.sleep(100.0)  # as long as it takes to start another
        new = await built.add(f"{role}-2", role)
        await asyncio.sleep(1.0)
        assert (built.loop.said, built.loop.stands) == ([f"{role} at {role}-2"], False)
        found = built.made.coordinator.roster.has(role)
        assert found is not None
        assert found.node == new.node.address
        others = [part for part in built.parts.values() if part not in (old, new)]
        assert [part.moved for part in others] == [[] if role == "proxy" else [f"{role}@{role}-2"]] * 3
        assert [part.proxies for part in others] == [["proxy-2" if role == "proxy" else "proxy-1"]] * 3
        assert built.failed == []

    town(scenario)


def test_a_trainers_successor_begins_at_the_checkpoint_and_keeps_the_store() -> None:
    async def scenario(built: Town) -> None:
        await built.handover.let_go("trainer-1")
        await asyncio.sleep(20.0)
        part = Part(built.made, "trainer-2", "trainer")
        welcome = await part.join()
        assert (welcome.resume, welcome.keeps_store) == ("/run/checkpoints/v00003", True)
        await part.announce()
        await asyncio.sleep(1.0)
        assert built.loop.said == ["checkpoint", "trainer at trainer-2"]

    town(scenario)


def test_a_role_that_somebody_has_is_given_to_nobody_else() -> None:
    async def scenario(built: Town) -> None:
        assert (await Part(built.made, "reward-2", "reward").join()).roles == []

    town(scenario)


def test_a_run_whose_node_has_no_successor_in_time_fails_by_name() -> None:
    async def scenario(built: Town) -> None:
        await built.handover.let_go("proxy-1")
        await asyncio.sleep(START_S + 20.0)
        (error,) = built.failed
        assert str(error) == "nobody took the role 'proxy' within 300 s"
        assert built.handover.under_way == ""

    town(scenario)


def test_one_node_is_replaced_after_the_other() -> None:
    async def scenario(built: Town) -> None:
        await built.handover.let_go("proxy-1")
        with pytest.raises(ValueError, match="proxy-1 is being replaced: one node after the other"):
            await built.handover.let_go("reward-1")
        with pytest.raises(
            ValueError, match="no node 'proxy-9' has joined; there are trainer-1, weightsync-1, reward-1, proxy-1"
        ):
            await built.handover.let_go("proxy-9")

    town(scenario)


def test_an_env_host_is_let_go_once_it_is_empty_though_it_is_the_last_one() -> None:
    async def scenario(built: Town) -> None:
        made, ends, closing = built.made, list[str](), list[asyncio.Future[None]]()
        await made.add_host("env-1", places=10)  # a trajectory takes ten seconds there
        node = made.nodes["env-1"]

        def end(why: object) -> None:
            ends.append(str(why))
            closing.append(asyncio.ensure_future(node.close()))

        await node.spawn(lambda: Allegiance(end), MEMBER, restarts=0)
        made.begin()
        await asyncio.sleep(1.0)
        with pytest.raises(ValueError, match="8 trajectories are still on env-1, which is given no new ones now"):
            await built.handover.let_go("env-1")
        await asyncio.sleep(20.0)
        made.train()  # which makes room for more
        await built.handover.let_go("env-1")
        assert ends == ["let go: another node takes its place"]
        assert made.coordinator.env_hosts == []
        await asyncio.sleep(60.0)
        await made.add_host("env-2", places=10)
        await asyncio.sleep(20.0)
        balance = made.scheduler.ledger.balance()
        assert (balance.admitted, balance.trained, balance.buffered, balance.lost) == (12, 4, 8, {})

    town(scenario)


def test_an_env_host_that_does_not_hear_that_it_is_let_go_is_given_nothing_any_more() -> None:
    async def scenario(built: Town) -> None:
        made = built.made
        await made.add_host("env-1", places=10)
        made.network.partition({"env-1"}, {"control"}, cut=True)
        with pytest.raises(DeadlineExceeded):
            await built.handover.let_go("env-1")
        assert made.coordinator.env_hosts == []
        assert "env-1" not in [join.node.name for join in made.coordinator.roster.joins]

    town(scenario)
