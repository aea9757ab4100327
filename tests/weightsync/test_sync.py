"""The weight-sync actor over a real proxy and scripted engine hosts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from actors.core import Ref
from actors.proxy.messages import ProxySet, ServingProxy, Suspend
from actors.telemetry import Spans
from actors.weightsync import sync as sync_module
from actors.weightsync.manifest import Manifest, TensorFact
from actors.weightsync.messages import DescribeWeights, Publish, Published
from actors.weightsync.sync import WeightSync
from tests.proxy.support import World, world
from tests.support.loops import run, settle, until


@pytest.fixture(autouse=True)
def _no_pause_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_module, "RETRY_AFTER_S", 0.0)


def manifest(version: int) -> Manifest:
    facts = {"a": TensorFact("float32", (3,), f"a{version}"), "b": TensorFact("bfloat16", (2, 2), f"b{version}")}
    return Manifest(version, "float32", facts, np.array([1, 2], np.int32), np.array([-1.0], np.float32))


class SyncWorld:
    def __init__(self, made: World, actor: WeightSync, weightsync: Ref) -> None:
        self.made = made
        self.actor = actor
        self.weightsync = weightsync

    async def publish(self, version: int) -> Published:
        order = Publish(manifest(version), self.made.asker.ref)  # the source is the hosts' business
        return await self.made.node.ask(self.weightsync, order, Published, timeout_s=10)

    async def states(self) -> dict[str, tuple[str, int | None]]:
        return {engine.name: (engine.state, engine.version) for engine in (await self.made.describe()).engines}

    async def serves(self, name: str, version: int) -> None:
        """Wait until an engine serves a version."""
        await until(lambda: self._serving(name) == version)

    def _serving(self, name: str) -> int | None:
        engine = self.made.proxy._engines[name]
        return engine.version if engine.state == "serving" else None

    def die(self, name: str, *, restarting: bool = True) -> None:
        self.made.proxy.engine_died(name, "killed by SIGKILL", restarting=restarting)


@asynccontextmanager
async def sync_world(*engines: str) -> AsyncIterator[SyncWorld]:
    async with world(list(engines)) as made:
        actor = WeightSync(Spans("weightsync"))
        weightsync = await made.node.spawn(lambda: actor, "weightsync")
        made.proxy.introduce(weightsync)
        for name in engines:
            await made.start(name)
        await settle()
        yield SyncWorld(made, actor, weightsync)


def test_every_engine_is_brought_to_the_version_and_then_serves() -> None:
    async def test() -> None:
        async with sync_world("e0", "e1") as world_:
            published = await world_.publish(5)
            assert (published.version, sorted(published.engines), published.refused) == (5, ["e0", "e1"], {})
            assert published.bytes == 2 * (3 * 4 + 4 * 2)
            assert await world_.states() == {"e0": ("serving", 5), "e1": ("serving", 5)}
            for host in world_.made.hosts.values():
                assert host.log == ["stage 5", "suspend", "update 5", "resume"]

    run(test())


def test_it_tells_what_every_engine_has_proven_and_who_was_refused() -> None:
    async def test() -> None:
        async with sync_world("e0", "e1") as world_:
            before = await world_.made.node.ask(world_.weightsync, DescribeWeights(), timeout_s=5)
            assert (before.ordered, before.proven, before.refusals) == (None, [], [])
            world_.made.hosts["e1"].wrong_receipts = 2
            await world_.publish(5)
            state = await world_.made.node.ask(world_.weightsync, DescribeWeights(), timeout_s=5)
            (proven,) = state.proven
            assert (state.ordered, proven.engine, proven.version) == (5, "e0", 5)
            assert (proven.tensors, proven.bytes, proven.canary_nats) == (2, 3 * 4 + 4 * 2, 0.0)
            (refusal,) = state.refusals
            assert (refusal.engine, refusal.version) == ("e1", 5)
            assert "engine e1, version 5" in refusal.reason

    run(test())


def test_a_version_is_staged_while_the_engine_serves() -> None:
    async def test() -> None:
        async with sync_world("e0") as world_:
            await world_.publish(0)
            host = world_.made.hosts["e0"]
            host.stages_at_once.clear()
            publishing = asyncio.create_task(world_.publish(1))
            await until(lambda: "stage 1" in host.log)
            assert await world_.states() == {"e0": ("serving", 0)}
            host.stages_at_once.set()
            await publishing
            assert await world_.states() == {"e0": ("serving", 1)}

    run(test())


def test_a_refused_receipt_is_followed_by_all_of_the_version_again() -> None:
    async def test() -> None:
        async with sync_world("e0") as world_:
            host = world_.made.hosts["e0"]
            host.wrong_receipts = 1
            published = await world_.publish(1)
            assert published.engines == ["e0"]
            assert host.log == ["stage 1", "suspend", "update 1", "stage 1", "suspend", "update 1", "resume"]

    run(test())


def test_a_second_refusal_takes_the_engine_out_of_routing() -> None:
    async def test() -> None:
        async with sync_world("e0", "e1") as world_:
            bad = world_.made.hosts["e0"]
            bad.wrong_receipts = 2
            published = await world_.publish(1)
            assert published.engines == ["e1"]
            reason = "engine e0, version 1: 2 tensors differ from what was published, first a"
            assert published.refused == {"e0": reason}
            assert published.bytes == 20
            assert await world_.states() == {"e0": ("removed", None), "e1": ("serving", 1)}
            assert "resume" not in bad.log
            assert world_.made.fleet.retired == ["e0"]
            assert (await world_.publish(2)).engines == ["e1"]  # nobody asks it any more

    run(test())


@pytest.mark.parametrize("fault", ["stage", "update"])
def test_an_engine_that_a_version_does_not_reach_does_not_go_on_with_the_old_one(fault: str) -> None:
    async def test() -> None:
        async with sync_world("e0", "e1") as world_:
            await world_.publish(0)
            host = world_.made.hosts["e0"]
            setattr(host, f"fails_{fault}", ["connection reset"] * 2)
            published = await world_.publish(1)
            assert host.log.count("stage 1") == 2
            assert published.engines == ["e1"]
            assert "connection reset" in published.refused["e0"]
            assert await world_.states() == {"e0": ("removed", None), "e1": ("serving", 1)}

    run(test())


def test_a_passing_fault_costs_one_more_attempt() -> None:
    async def test() -> None:
        async with sync_world("e0") as world_:
            host = world_.made.hosts["e0"]
            host.fails_stage = ["connection reset"]
            assert (await world_.publish(1)).engines == ["e0"]
            assert host.log == ["stage 1", "stage 1", "suspend", "update 1", "resume"]

    run(test())


def test_an_engine_that_comes_later_is_brought_to_the_current_version() -> None:
    async def test() -> None:
        async with sync_world("e0", "e1") as world_:
            await world_.publish(0)
            await world_.publish(1)
            world_.die("e1")
            assert (await world_.publish(2)).engines == ["e0"]
            host = await world_.made.start("e1")
            await world_.serves("e1", 2)
            assert host.log == ["stage 2", "suspend", "update 2", "resume"]
            assert await world_.states() == {"e0": ("serving", 2), "e1": ("serving", 2)}
            assert sorted((await world_.publish(3)).engines) == ["e0", "e1"]

    run(test())


def test_an_engine_that_dies_in_the_middle_of_staging_holds_nobody_up() -> None:
    async def test() -> None:
        async with sync_world("e0", "e1") as world_:
            await world_.publish(0)
            world_.made.hosts["e0"].stages_at_once.clear()
            publishing = asyncio.create_task(world_.publish(1))
            await until(lambda: "stage 1" in world_.made.hosts["e0"].log)
            world_.die("e0")
            published = await publishing
            assert published.engines == ["e1"]
            assert "killed by SIGKILL" in published.refused["e0"]
            assert world_.made.fleet.retired == []  # its successor is welcome
            await world_.made.start("e0")
            await world_.serves("e0", 1)

    run(test())


def test_an_engine_that_dies_and_returns_during_a_publication_is_not_forgotten() -> None:
    async def test() -> None:
        async with sync_world("e0") as world_:
            await world_.publish(0)
            world_.made.hosts["e0"].stages_at_once.clear()
            publishing = asyncio.create_task(world_.publish(1))
            await until(lambda: "stage 1" in world_.made.hosts["e0"].log)
            world_.die("e0")
            await world_.made.start("e0")  # before anybody has noticed that the other one has gone
            await publishing
            await world_.serves("e0", 1)
            assert (await world_.publish(2)).engines == ["e0"]

    run(test())


def test_a_version_that_is_overtaken_is_left_out_where_the_newer_one_comes_at_once() -> None:
    async def test() -> None:
        async with sync_world("e0") as world_:
            await world_.publish(0)
            host = world_.made.hosts["e0"]
            host.log.clear()
            host.stages_at_once.clear()
            publications = []
            for version in (1, 2, 3):
                publications.append(asyncio.create_task(world_.publish(version)))
                await settle()
            host.stages_at_once.set()
            first, second, third = await asyncio.gather(*publications)
            assert [first.engines, second.engines, third.engines] == [["e0"], [], ["e0"]]
            assert second.refused == {}
            assert [line for line in host.log if line.startswith("update")] == ["update 1", "update 3"]
            assert await world_.states() == {"e0": ("serving", 3)}

    run(test())


def test_with_no_engine_a_publication_ends_at_once_and_waits_for_whoever_comes() -> None:
    async def test() -> None:
        async with sync_world() as world_:
            assert (await world_.publish(4)).engines == []

    run(test())


def test_a_suspended_engine_is_updated_too() -> None:
    async def test() -> None:
        async with sync_world("e0") as world_:
            await world_.publish(0)
            await world_.made.command(Suspend("e0"))
            await world_.publish(1)
            assert await world_.states() == {"e0": ("serving", 1)}

    run(test())


def test_the_engines_of_a_proxy_that_has_a_successor_are_gone_until_that_one_says_otherwise() -> None:
    async def test() -> None:
        async with sync_world("e0") as world_:
            await world_.publish(1)
            proxy = world_.made.proxy.ref
            world_.actor.follow(ProxySet([ServingProxy(proxy)]))
            assert list(await world_.states()) == ["e0"]
            world_.actor.follow(ProxySet([ServingProxy(Ref(proxy.node, "another"))]))
            state = await world_.made.node.ask(world_.weightsync, DescribeWeights(), timeout_s=10)
            assert (state.ordered, state.proven) == (1, [])
            assert (await world_.publish(2)).engines == []
            world_.made.proxy.introduce(world_.weightsync)
            await world_.serves("e0", 2)

    run(test())
