"""The process that runs environments and reward functions: ``python -m actors.env.worker SPEC``.

User code runs in one thread of its own, so that it may block without silencing the process: its pool enforces the
deadlines and kills a worker whose code hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from actors.core import Actor, handler
from actors.core.hosting import ChildContext, read_settings, run_child
from actors.core.pool import MemberReady, Welcome
from actors.env.agents.bench import AgentBench
from actors.env.messages import (
    AgentDone,
    CloseEnv,
    ResetDone,
    ResetEnv,
    RunAgent,
    ScoreDone,
    ScoreWith,
    StepDone,
    StepEnv,
)
from actors.env.workbench import Workbench
from actors.settings import EnvironmentSettings, RewardSettings

T = TypeVar("T")

READY_TIMEOUT_S = 30.0


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told."""

    environment: EnvironmentSettings
    reward: RewardSettings
    job_directory: str
    pool: str  # name of the pool's actor


class EnvWorker(Actor):
    """Messages around a ``Workbench``."""

    def __init__(self, bench: Workbench, thread: ThreadPoolExecutor) -> None:
        self._bench = bench
        self._thread = thread

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @handler(concurrent=True)
    async def reset(self, message: ResetEnv) -> ResetDone:
        observation = await self._run(lambda: self._bench.reset(message.instance, message.task))
        return ResetDone(observation, self._bench.system_prompt)

    @handler(concurrent=True)
    async def step(self, message: StepEnv) -> StepDone:
        def work() -> StepDone:
            step = self._bench.step(message.instance, message.action)
            standing = self._bench.standing(message.instance)
            return StepDone(step, standing.success, standing.env_return, standing.metrics)

        return await self._run(work)

    @handler(concurrent=True, cancellable=False)
    async def close(self, message: CloseEnv) -> None:
        await self._run(lambda: self._bench.close(message.instance))

    @handler(concurrent=True, cancellable=False)
    async def score(self, message: ScoreWith) -> ScoreDone:
        return ScoreDone(await self._run(lambda: self._bench.score(message.trajectory)))


class AgentWorker(Actor):
    """Messages around an ``AgentBench``."""

    def __init__(self, bench: AgentBench, thread: ThreadPoolExecutor) -> None:
        self._bench = bench
        self._thread = thread

    @handler(concurrent=True)
    async def run(self, message: RunAgent) -> AgentDone:
        return AgentDone(await self._bench.run(message.session))

    @handler(concurrent=True, cancellable=False)
    async def score(self, message: ScoreWith) -> ScoreDone:
        loop = asyncio.get_running_loop()
        return ScoreDone(await loop.run_in_executor(self._thread, self._bench.score, message.trajectory))


def _make(settings: WorkerSettings, thread: ThreadPoolExecutor) -> EnvWorker | AgentWorker:
    base = Path(settings.job_directory)
    if settings.environment.agent is not None:
        return AgentWorker(AgentBench(settings.environment, base, settings.reward), thread)
    return EnvWorker(Workbench(settings.environment, base, settings.reward), thread)


async def work(context: ChildContext) -> Callable[[], Awaitable[None]]:
    settings = read_settings(context.spec, WorkerSettings)
    thread = ThreadPoolExecutor(1, "environment")
    loop = asyncio.get_running_loop()
    worker = await loop.run_in_executor(thread, _make, settings, thread)
    ref = await context.node.spawn(lambda: worker, "worker")
    ready = MemberReady(context.spec.name, ref)
    pool = context.parent(settings.pool)
    await context.node.ask(pool, ready, Welcome, timeout_s=READY_TIMEOUT_S, retries=3)

    async def finish() -> None:
        thread.shutdown(wait=False, cancel_futures=True)

    return finish


if __name__ == "__main__":
    run_child(work)
