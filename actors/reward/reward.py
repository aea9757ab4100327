"""The reward actor: stateless scoring off the rollout's path.

"environment" is the return that the environment itself paid, and needs no process; a user's function runs in worker
processes of its own, so that it may block, crash or print without touching anything else.
"""

from __future__ import annotations

from actors.core import Actor, handler
from actors.core.pool import WorkerPool
from actors.env.messages import ScoreDone, ScoreWith
from actors.reward.messages import Score, Scored
from bus.message import DeadlineExceeded


class RewardActor(Actor):
    """``pool`` is None where the environment's return is the reward."""

    def __init__(self, timeout_s: float, pool: WorkerPool | None) -> None:
        self._timeout_s = timeout_s
        self._pool = pool

    @handler(concurrent=True)
    async def score(self, message: Score) -> Scored:
        """Raises what the reward function raises; a function that hangs is killed with its worker."""
        if self._pool is None:
            return Scored(message.trajectory.env_return)
        name = self._pool.pick()
        worker = await self._pool.worker(name)
        about = f"trajectory {message.trajectory.ticket}"
        try:
            done = await self.node.ask(
                worker, ScoreWith(message.trajectory), ScoreDone, timeout_s=self._timeout_s, about=about
            )
        except DeadlineExceeded:
            self._pool.kill(name)
            raise
        return Scored(done.reward)
