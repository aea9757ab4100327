"""Spares and who holds which role, at the real coordinator, in virtual time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from actors.core import Node, Ref
from bus.message import NodeAddress
from bus.virtual_time import run
from coordinator import roster
from coordinator.allegiance import Allegiance, Spare
from coordinator.hostbook import HostBook
from coordinator.job import CoordinatorSettings, Job
from coordinator.losses import NodeLost
from coordinator.messages import (
    BeginAgain,
    Changed,
    GetHosts,
    HostList,
    Join,
    Obeyed,
    ReleaseHost,
    Role,
    RoleFailed,
    Take,
    Welcome,
)
from coordinator.roster import Patience, Roster
from coordinator.standbys import next_standby
from hwprobe import AffinityMap, encode
from tests.scheduling.cluster import Cluster, cluster
from tests.scheduling.support import rules

HARDWARE = encode(AffinityMap(hosts=(), devices=(), pools=(), reference_ridge=0.0))

OVER_ZOOKEEPER = msgspec.json.encode(Job(coordinator=CoordinatorSettings(store="zk://somewhere:2181")))


class Joined(Spare):
    """A node of the run and what it was told."""

    def __init__(self, made: Cluster, name: str) -> None:
        self.transport = made.network.join(name)
        self.node = Node(name, transport=self.transport)
        self.orders: list[object] = []
        self.taken: list[Sequence[Role]] = []
        self.standing_by: list[str] = []
        self.pid: int | None = None
        self.blind = False
        self.allegiance = Allegiance(self.orders.append, self)

    def take(self, roles: list[Role]) -> None:
        self.taken.append(roles)

    def stand_by(self, run_directory: str) -> None:
        if self.blind:
            raise ValueError("the run directory is not visible")
        self.standing_by.append(run_directory)

    def standby_pid(self) -> int | None:
        return self.pid

    async def join(self, made: Cluster, roles: list[Role], standby: int | None = None) -> Welcome:
        await self.node.spawn(lambda: self.allegiance, "member", restarts=0)
        join = Join(self.node.address, roles, 1, HARDWARE, standby=standby)
        welcome = await made.node.ask(made.ref, join, Welcome, timeout_s=5.0)
        self.allegiance.joined(join, made.ref, silence_s=20.0, takeover_s=30.0)
        return welcome

    async def close(self) -> None:
        await self.node.close()


async def state_of(made: Cluster) -> dict[str, str]:
    """Host -> its state."""
    answer = await made.admin.ask(made.ref, GetHosts(), HostList, timeout_s=5.0)
    return {one.host: one.state for one in answer.hosts}


def test_a_spare_plays_in_place_of_an_env_host_that_is_lost_while_the_run_goes_on() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            await made.add_host("env-1", 2)
            spare = Joined(made, "spare")
            assert (await spare.join(made, [])).roles == []
            made.begin()
            await asyncio.sleep(1.0)
            await made.kill_host("env-1")
            await asyncio.sleep(30.0)
            assert spare.taken == [["env"]]
            assert made.failures == []
            assert made.scheduler.ledger.balance().lost == {"env_host_lost": 2}
            assert made.scheduler.ledger.balance().in_flight == 2  # they wait for it
            await spare.close()

    run(scenario())


def test_without_a_spare_the_last_env_host_is_missed_by_name() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            await made.add_host("env-1", 2)
            await made.kill_host("env-1")
            await asyncio.sleep(30.0)
            (failure,) = made.failures
            assert str(failure) == "node env-1 (env) is lost: no sign of life for 20.0 s"

    run(scenario())


def test_a_role_has_one_holder_and_whoever_asks_for_it_then_is_a_spare() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            first, second = Joined(made, "reward-1"), Joined(made, "reward-2")
            assert (await first.join(made, ["reward", "proxy"])).roles == ["reward", "proxy"]
            assert (await second.join(made, ["reward", "proxy", "env"])).roles == ["proxy", "env"]
            await first.close()
            await second.close()

    run(scenario())


def test_a_host_whose_role_fails_three_times_is_left_out_until_a_person_lets_it_back() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            flaky = Joined(made, "proxy-1")
            await flaky.join(made, ["proxy"])
            (host,) = [host for host in await state_of(made) if host != ""] or [""]
            now = [0.0]
            made.coordinator.roster.casting.book = HostBook(clock=lambda: now[0])
            for _ in range(3):
                flaky.node.tell(made.ref, RoleFailed("proxy", "proxy-1", "no engine is left"))
                await asyncio.sleep(1.0)
                now[0] += 60.0
            assert (await state_of(made))[host] == "quarantined"
            again = Join(flaky.node.address, ["proxy"], 1, HARDWARE)
            assert (await made.node.ask(made.ref, again, Welcome, timeout_s=5.0)).roles == []
            changed = await made.admin.ask(made.ref, ReleaseHost(host), Changed, timeout_s=5.0)
            assert changed.message == f"{host} may be given roles again"
            assert (await made.node.ask(made.ref, again, Welcome, timeout_s=5.0)).roles == ["proxy"]
            await flaky.close()

    run(scenario())


def test_a_node_that_is_told_to_begin_again_does_and_takes_what_it_is_told_once() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            spare = Joined(made, "spare")
            await spare.join(made, [])
            for _ in range(2):
                await made.node.ask(spare.allegiance.ref, Take(["env"]), Obeyed, timeout_s=5.0)
            assert spare.taken == [["env"]]
            order = BeginAgain(Ref(made.node.address, "coordinator"), ["trainer"])
            await made.node.ask(spare.allegiance.ref, order, Obeyed, timeout_s=5.0)
            await asyncio.sleep(1.0)
            assert spare.orders == [order]
            await spare.close()

    run(scenario())


def test_one_spare_has_a_standby_coordinator_and_the_next_one_once_that_is_lost() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1), job=OVER_ZOOKEEPER) as made:
            first, second, third = Joined(made, "s1"), Joined(made, "s2"), Joined(made, "s3")
            await first.join(made, [], standby=0)
            await second.join(made, [], standby=0)
            await third.join(made, [])  # cannot
            await asyncio.sleep(1.0)
            assert (first.standing_by, second.standing_by) == ([""], [])
            first.transport.crash()
            await asyncio.sleep(30.0)
            assert second.standing_by == [""]
            assert made.failures == []
            for each in (second, third):
                await each.close()

    run(scenario())


def test_where_a_standby_cannot_be_the_next_spare_has_it() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1), job=OVER_ZOOKEEPER) as made:
            first, second = Joined(made, "s1"), Joined(made, "s2")
            first.blind = True
            await first.join(made, [], standby=0)
            await asyncio.sleep(1.0)
            (join,) = made.coordinator.roster.joins
            assert (join.standby, join.came_as_spare) == (0, True)  # it is a spare as before
            (warning,) = made.warnings
            assert warning.startswith("no standby coordinator beside s1: it cannot be there: ")
            assert warning.endswith("the run directory is not visible; no other spare can have one")
            await second.join(made, [], standby=0)
            await asyncio.sleep(1.0)
            assert (first.standing_by, second.standing_by) == ([], [""])
            for each in (first, second):
                await each.close()

    run(scenario())


def test_a_standby_that_is_gone_for_good_is_told_with_the_reason_and_the_next_spare_has_it() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1), job=OVER_ZOOKEEPER) as made:
            first, second, third = Joined(made, "s1"), Joined(made, "s2"), Joined(made, "s3")
            await first.join(made, [], standby=0)
            await second.join(made, [], standby=0)
            await asyncio.sleep(1.0)
            assert (first.standing_by, second.standing_by) == ([""], [])
            first.allegiance.lost_standby("it ended 4 times in a row, the last time with status 1")
            await asyncio.sleep(1.0)
            assert second.standing_by == [""]
            second.allegiance.lost_standby("it cannot be started: no such file")
            await asyncio.sleep(1.0)
            assert made.warnings == [
                "no standby coordinator beside s1: it ended 4 times in a row, the last time with status 1; "
                "s2 is to have one",
                "no standby coordinator beside s2: it cannot be started: no such file; no other spare can have one",
            ]
            hosts = (await made.admin.ask(made.ref, GetHosts(), HostList, timeout_s=5.0)).hosts
            assert not any(host.standby for host in hosts)
            assert {host.nodes[0]: host.no_standby for host in hosts} == {
                "s1": "it ended 4 times in a row, the last time with status 1",
                "s2": "it cannot be started: no such file",
            }
            assert all(join.came_as_spare for join in made.coordinator.roster.joins)
            await third.join(made, [], standby=0)
            await asyncio.sleep(1.0)
            assert third.standing_by == [""]
            for each in (first, second, third):
                await each.close()

    run(scenario())


def test_a_spare_whose_standby_leads_by_now_leaves_standing_by_to_another() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1), job=OVER_ZOOKEEPER) as made:
            here = Join(made.node.address, [], 1, HARDWARE, standby=os.getpid())
            elsewhere = Join(NodeAddress("s2", "tcp://10.0.0.9:1", "tcp://10.0.0.9:2", 1), [], 1, HARDWARE, standby=0)
            assert next_standby([here, elsewhere], here.node, []) == elsewhere
            assert next_standby([here], here.node, []) is None
            other = msgspec.structs.replace(here, standby=os.getpid() + 1)
            assert next_standby([other, elsewhere], here.node, []) is None

    run(scenario())


def test_a_spare_that_is_wanted_before_it_knows_that_it_takes_part_takes_the_role_then() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            spare = Joined(made, "spare")
            await spare.node.spawn(lambda: spare.allegiance, "member", restarts=0)
            await made.node.ask(spare.allegiance.ref, Take(["env"]), Obeyed, timeout_s=5.0)
            assert spare.taken == []
            join = Join(spare.node.address, [], 1, HARDWARE)
            spare.allegiance.joined(join, made.ref, silence_s=20.0, takeover_s=30.0)
            await asyncio.sleep(1.0)
            assert spare.taken == [["env"]]
            await spare.close()

    run(scenario())


def elsewhere(name: str, *roles: Role) -> Join:
    """A node at a host of its own."""
    address = NodeAddress(name, f"tcp://{name}:1", f"tcp://{name}:2", 1)
    return Join(address, list(roles), 1, HARDWARE)


def test_whoever_was_told_its_roles_has_them_and_nobody_else_before_it_comes() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            casting, reward = made.coordinator.roster.casting, elsewhere("reward-1", "reward")
            now = [0.0]
            casting.book = HostBook(clock=lambda: now[0])
            for now[0] in (20.0, 40.0, 60.0):
                casting.book.fell("failed", "reward-1", "reward-1", ["reward"], "no worker is left")
            assert list(casting.book.barred()) == ["reward-1"]
            casting.expect([reward])
            assert casting.roles_for(elsewhere("reward-2", "reward", "env"), []) == ["env"]
            assert casting.roles_for(reward, []) == ["reward"]
            assert casting.roles_for(reward, []) == []  # it comes once more, by itself

    run(scenario())


def test_a_node_that_was_told_to_begin_again_and_does_not_join_is_lost() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            comes = Joined(made, "reward-1")
            there = Join(comes.node.address, ["reward"], 1, HARDWARE)
            made.coordinator.roster.casting.expect([there, elsewhere("proxy-1", "proxy"), elsewhere("spare")])
            made.node.background(made.coordinator.roster.miss_who_does_not_join())
            assert (await comes.join(made, ["reward"])).roles == ["reward"]
            await asyncio.sleep(59.0)
            assert made.failures == []
            await asyncio.sleep(2.0)
            (failure,) = made.failures
            assert isinstance(failure, NodeLost)
            assert (failure.role, failure.node) == ("proxy", "proxy-1")
            assert str(failure) == (
                "node proxy-1 (proxy) is lost: it was told to begin again and has not joined within 60 s"
            )
            await comes.close()

    run(scenario())


class Hands:
    """Of a coordinator; notes whom it no longer watches, and whom it gives up."""

    def __init__(self) -> None:
        self.node: Any = self
        self.address = NodeAddress("control", "tcp://control:1", "tcp://control:2", 1)
        self.unwatched: list[str] = []
        self.lost: list[NodeAddress] = []
        self._tasks: list[asyncio.Task[None]] = []

    def background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))

    def watch(self, peer: NodeAddress, **patience: Any) -> None:
        """It is never silent."""

    def unwatch(self, name: str) -> None:
        self.unwatched.append(name)

    def lose(self, peer: NodeAddress, reason: str) -> None:
        self.lost.append(peer)


def unheard(what: object) -> None:
    """Nobody asks for the news."""


def test_the_end_of_an_earlier_process_leaves_the_watch_over_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        ends = {"first": asyncio.Event(), "second": asyncio.Event()}

        async def until_the_end(pulse: str) -> None:
            await ends[pulse].wait()

        monkeypatch.setattr(roster, "until_gone", until_the_end)
        hands: Any = Hands()
        news = roster.News(unheard, unheard, unheard, unheard)
        there = Roster(hands, Welcome("run", b"{}", "", "", "", 0), HostBook(), news, Patience(20.0))
        before = msgspec.structs.replace(elsewhere("spare-1"), pulse="first")
        now = msgspec.structs.replace(before, node=msgspec.structs.replace(before.node, epoch=2), pulse="second")
        there.join(before)
        there.join(now)
        ends["first"].set()
        await asyncio.sleep(1.0)
        assert (hands.unwatched, hands.lost, there.joins) == ([], [before.node], [now])
        ends["second"].set()
        await asyncio.sleep(1.0)
        assert (hands.unwatched, hands.lost, there.joins) == (["spare-1"], [before.node, now.node], [])

    run(scenario())
