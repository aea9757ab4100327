"""The reward actor: stateless scoring off the rollout's path.

"environment" is the return that the environment itself paid, and needs no process; a user's function runs in worker
processes of its own, one call at a time each, so that it may block, crash or print without touching anything else.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Protocol

from actors.core import Actor, Ref, handler
from actors.env.messages import ScoreDone, ScoreWith
from actors.reward.messages import Score, Scored
from actors.trajectory import Trajectory
from bus.message import DeadlineExceeded


class Workers(Protocol):
    """The processes that run reward functions; see ``actors.core.pool.WorkerPool``."""

    def pick(self) -> str: ...

    async def worker(self, name: str) -> Ref: ...

    def kill(self, name: str) -> None: ...


class RewardActor(Actor):
    """``pool`` is None where the environment's return is the reward."""

    def __init__(self, timeout_s: float, pool: Workers | None) -> None:
        self._timeout_s = timeout_s
        self._pool = pool
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @handler(concurrent=True, cancellable=False)
    async def score(self, message: Score) -> Scored:
        """Raises what the reward function raises; a function that hangs is killed with its worker."""
        if self._pool is None:
            return Scored(message.trajectory.env_return)
        name = self._pool.pick()
        about = f"trajectory {message.trajectory.ticket}"
        turn = self._turns[name]
        try:
            await asyncio.wait_for(turn.acquire(), self._timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"{about} waited {self._timeout_s:g} s for its turn at {name}") from None
        try:
            return await self._score(self._pool, name, message.trajectory, about)
        finally:
            turn.release()

    async def _score(self, pool: Workers, name: str, trajectory: Trajectory, about: str) -> Scored:
        worker = await pool.worker(name)
        try:
            done = await self.node.ask(worker, ScoreWith(trajectory), ScoreDone, timeout_s=self._timeout_s, about=about)
        except DeadlineExceeded:
            pool.kill(name)
            raise
        return Scored(done.reward)
