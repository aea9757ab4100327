"""Episodes on held-out tasks: greedy, under exactly the version that every engine serves.

Invariant: no two evaluations of a run share a ticket's name, whoever led it when they began.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from actors.env.messages import Outcome, Ticket
from actors.env.protocol import evaluation_task
from actors.telemetry import Spans
from coordinator.coordinator import Coordinator
from coordinator.job import Job
from coordinator.resources.resolve import number


class Evaluation:
    """See the module docstring. ``epoch``: the leader's."""

    def __init__(self, job: Job, coordinator: Coordinator, spans: Spans, *, epoch: int) -> None:
        self._job = job
        self._coordinator = coordinator
        self._spans = spans
        self._epoch = epoch

    def due(self, *, always: bool) -> bool:
        """Whether the job asks for any, in its course or (``always``) at its end."""
        settings = self._job.evaluation
        return settings.episodes > 0 and (settings.every > 0 or always)

    async def of(self, version: int) -> list[Outcome]:
        """Raises ``TimeoutError`` naming how many are missing."""
        start = time.time()
        outcomes = await self._coordinator.evaluate(self._tickets(version), self._timeout_s())
        self._spans.add("evaluate", start, time.time(), version=version)
        return outcomes

    async def play(self, tickets: list[Ticket], told: Callable[[Outcome], None] | None = None) -> list[Outcome]:
        """Run these to their outcomes, each ``told``. Raises ``TimeoutError`` naming how many are missing."""
        waves = -(-len(tickets) // max(1, number(self._job.environment.concurrent)))
        return await self._coordinator.evaluate(tickets, waves * self._timeout_s(), told)

    def _tickets(self, version: int) -> list[Ticket]:
        """Of names that no earlier leader has given, whose own may be under way or answered already."""
        name = f"e{version}" if self._epoch == 1 else f"e{version}.{self._epoch}"
        return [
            Ticket(f"{name}-{index}", -1, evaluation_task(index), "evaluate", 0.0, self._job.seed + index)
            for index in range(self._job.evaluation.episodes)
        ]

    def _timeout_s(self) -> float:
        environment, rollout = self._job.environment, self._job.rollout
        if environment.agent is not None:
            return environment.agent.timeout_s + rollout.turn_timeout_s
        return (environment.max_turns + 1) * (environment.step_timeout_s + rollout.turn_timeout_s)
