"""Pools of worker processes: replaced when they die or hang, given up when they keep dying."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import actors.core.liveness
import actors.core.pool
from actors.core import Node, Ref
from actors.core.hosting import ChildSpec
from actors.core.pool import PoolGaveUp, WorkerPool
from bus.message import PeerLost
from tests.actors.children import Die, Hang, Pid, WhichPid
from tests.actors.support import alive, until
from tests.actors.test_processes import MODULE


class Pool:
    """A pool under test, and whether it gave up."""

    def __init__(self, node: Node, pool: WorkerPool, gave_up: list[PoolGaveUp]) -> None:
        self.node = node
        self.pool = pool
        self.gave_up = gave_up

    async def pid(self, name: str) -> int:
        ref = await self.pool.worker(name)
        return (await self.node.ask(ref, WhichPid(), Pid, timeout_s=10)).value


@asynccontextmanager
async def running(tmp_path: Path, *names: str, how: str = "serve", silence_s: float = 20.0) -> AsyncIterator[Pool]:
    gave_up: list[PoolGaveUp] = []
    async with Node("parent") as node:
        settings = {"how": how, "pool": "pool"}
        specs = {name: ChildSpec(name, "test", node.address, str(tmp_path), settings) for name in names}
        pool = WorkerPool(MODULE, specs, {}, gave_up.append, silence_s=silence_s)
        await node.spawn(lambda: pool, "pool", restarts=0)
        yield Pool(node, pool, gave_up)


async def test_workers_are_handed_out_round_robin_and_end_with_their_pool(tmp_path: Path) -> None:
    async with running(tmp_path, "w0", "w1") as on:
        picked = [on.pool.pick() for _ in range(4)]
        assert picked[:2] == picked[2:]
        assert set(picked) == {"w0", "w1"}
        pids = [await on.pid(name) for name in ("w0", "w1")]
        assert len(set(pids)) == 2
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


async def test_a_dead_worker_fails_its_asks_with_its_last_words_and_is_replaced(tmp_path: Path) -> None:
    async with running(tmp_path, "w0") as on:
        ref = await on.pool.worker("w0")
        first = await on.pid("w0")
        with pytest.raises(
            PeerLost, match=r"Die to worker@w0: node w0 is lost: .*exit status 7; last line .*: farewell"
        ):
            await on.node.ask(ref, Die("farewell"), Pid, timeout_s=20)
        second = await on.pid("w0")
        assert second != first
        assert on.gave_up == []


async def test_a_hung_worker_is_killed_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.core.liveness, "PING_EVERY_S", 0.1)
    async with running(tmp_path, "w0", silence_s=2.0) as on:
        ref = await on.pool.worker("w0")
        first = await on.pid("w0")
        with pytest.raises(PeerLost, match="no sign of life for 2"):
            await on.node.ask(ref, Hang(), Pid, timeout_s=20)
        assert await on.pid("w0") != first
        assert not alive(first)


async def test_a_worker_is_killed_on_demand_and_replaced(tmp_path: Path) -> None:
    async with running(tmp_path, "w0") as on:
        first = await on.pid("w0")
        on.pool.kill("w0")
        assert await on.pid("w0") != first
        assert not alive(first)


async def test_a_worker_that_keeps_dying_is_given_up_and_who_waits_for_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.core.pool, "RESTARTS", 1)
    async with running(tmp_path, "w0", how="fail to start") as on:
        with pytest.raises(PoolGaveUp, match=r"worker w0 died 2 times in 60 s; last: .*ValueError: no such thing"):
            await on.pool.worker("w0")
        assert len(on.gave_up) == 1
        with pytest.raises(PoolGaveUp):
            await on.pool.worker("w0")


async def test_a_worker_that_never_becomes_ready_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.core.pool, "RESTARTS", 0)
    monkeypatch.setattr(actors.core.pool, "START_TIMEOUT_S", 0.5)
    file = tmp_path / "started"
    gave_up: list[PoolGaveUp] = []
    async with Node("parent") as node:
        settings = {"how": "start for ever", "pool": "pool", "file": str(file)}
        specs = {"w0": ChildSpec("w0", "test", node.address, str(tmp_path), settings)}
        await node.spawn(lambda: WorkerPool(MODULE, specs, {}, gave_up.append), "pool", restarts=0)
        await until(lambda: bool(gave_up))
    assert "killed by SIGKILL" in str(gave_up[0])


async def test_a_worker_that_cannot_be_started_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def exhausted(*args: object, **options: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    async with running(tmp_path, "w0") as on:
        await on.pid("w0")
        monkeypatch.setattr(actors.core.pool, "start_child", exhausted)
        on.pool.kill("w0")
        await until(lambda: bool(on.gave_up))
        assert "worker w0 cannot be started again: Resource temporarily unavailable" in str(on.gave_up[0])


async def test_who_waits_for_a_worker_when_its_pool_stops_is_told(tmp_path: Path) -> None:
    async with running(tmp_path, "w0", how="serve") as on:
        waiting = asyncio.create_task(on.pool.worker("w0"))
        await asyncio.sleep(0)
        await on.node.stop(Ref(on.node.address, "pool"))
        with pytest.raises(PeerLost, match="worker w0: its pool has stopped"):
            await waiting
