"""The reward actor: one call at a time per worker, each with the whole deadline to itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from actors.core import Actor, Node, Ref, handler
from actors.env.messages import ScoreDone, ScoreWith
from actors.reward.messages import Score, Scored
from actors.reward.reward import RewardActor
from bus.message import DeadlineExceeded, RemoteError
from tests.support.loops import run, settle, until
from tests.trainer_actor.support import trajectory


class ScriptedWorker(Actor):
    """Scores once the test lets it; tells of calls that overlap."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.begun: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    @handler(concurrent=True)
    async def score(self, message: ScoreWith) -> ScoreDone:
        self.begun.append(message.trajectory.ticket)
        self.running += 1
        self.most = max(self.most, self.running)
        await self.gate.wait()
        self.running -= 1
        if message.trajectory.ticket == "bad":
            raise ZeroDivisionError("no reward")
        return ScoreDone(message.trajectory.env_return + 1)


class ScriptedPool:
    def __init__(self, ref: Ref) -> None:
        self._ref = ref
        self.killed: list[str] = []

    def pick(self) -> str:
        return "w0"

    async def worker(self, name: str) -> Ref:
        return self._ref

    def kill(self, name: str) -> None:
        self.killed.append(name)


class World:
    def __init__(self, node: Node, worker: ScriptedWorker, pool: ScriptedPool) -> None:
        self.node = node
        self.worker = worker
        self.pool = pool
        self.reward: Ref

    async def score(self, ticket: str, timeout_s: float = 10.0) -> float:
        message = Score(trajectory(ticket, reward=2.0))
        return (await self.node.ask(self.reward, message, Scored, timeout_s=timeout_s)).reward


@asynccontextmanager
async def world(timeout_s: float = 10.0) -> AsyncIterator[World]:
    async with Node("w0") as worker_node, Node("control") as node:
        worker = ScriptedWorker()
        pool = ScriptedPool(await worker_node.spawn(lambda: worker, "worker"))
        made = World(node, worker, pool)
        made.reward = await node.spawn(lambda: RewardActor(timeout_s, pool), "reward")
        yield made


def test_without_workers_the_reward_is_the_return_of_the_environment() -> None:
    async def test() -> float:
        async with Node("control") as node:
            reward = await node.spawn(lambda: RewardActor(1.0, None), "reward")
            return (await node.ask(reward, Score(trajectory("t", reward=2.5)), Scored, timeout_s=5)).reward

    assert run(test()) == 2.5


def test_a_worker_scores_one_trajectory_at_a_time() -> None:
    async def test() -> None:
        async with world() as made:
            assert await asyncio.gather(*(made.score(f"t{index}") for index in range(5))) == [3.0] * 5
            assert made.worker.most == 1

    run(test())


def test_a_function_that_raises_is_the_askers_error_and_the_next_one_gets_its_turn() -> None:
    async def test() -> None:
        async with world() as made:
            with pytest.raises(RemoteError, match="no reward"):
                await made.score("bad")
            assert await made.score("good") == 3.0

    run(test())


def test_a_function_that_hangs_costs_its_worker_and_frees_the_turn() -> None:
    async def test() -> None:
        async with world(timeout_s=0.2) as made:
            made.worker.gate.clear()
            with pytest.raises(DeadlineExceeded, match="trajectory t"):
                await made.score("t")
            assert made.pool.killed == ["w0"]
            made.worker.gate.set()
            assert await made.score("u") == 3.0

    run(test())


def test_whoever_waits_for_its_turn_too_long_fails_without_killing_anybody() -> None:
    async def test() -> None:
        async with world() as made:
            made.worker.gate.clear()
            first = asyncio.create_task(made.score("t1"))
            await until(lambda: made.worker.begun)
            second = asyncio.create_task(made.score("t2", timeout_s=0.05))
            with pytest.raises(DeadlineExceeded):
                await second
            assert made.pool.killed == []
            made.worker.gate.set()
            assert await first == 3.0
            await settle()

    run(test())
