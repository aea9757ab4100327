"""The admin shell's side of the coordinator: what a person may see of a run, and change in it."""

from __future__ import annotations

import asyncio
import time

import msgspec

from coordinator.engines import Engines
from coordinator.messages import Changed, Status
from coordinator.scheduling.rolling import RollingScheduler

DESCRIBE_TIMEOUT_S = 5.0


class RunState:
    """What the pipeline tells of itself while it runs."""

    def __init__(self, run: str, steps: int) -> None:
        self.run = run
        self.steps = steps
        self.phase = "starting"
        self.step = 0
        self.reward: float | None = None
        self.success: float | None = None
        self.evaluation: float | None = None
        self.fluctuation: float | None = None  # of the last evaluations
        self.steadiness = ""  # what the monitor of alpha said last
        self.started = time.monotonic()
        self.pauses = 0
        self.going = asyncio.Event()
        self.going.set()


class AdminDesk:
    """Answers and orders; the coordinator actor carries the messages."""

    def __init__(self, state: RunState, scheduler: RollingScheduler) -> None:
        self._state = state
        self._scheduler = scheduler

    async def status(self, engines: Engines) -> Status:
        states = (await engines.describe(DESCRIBE_TIMEOUT_S)).engines if engines.proxies else []
        in_flight, buffered = self._scheduler.counts()
        run = self._state
        return Status(
            run=run.run,
            state=run.phase if run.going.is_set() else "paused",
            step=run.step,
            steps=run.steps,
            version=self._scheduler.version,
            alpha=self._scheduler.rules.alpha,
            balance=str(self._scheduler.ledger.balance()),
            in_flight=in_flight,
            buffered=buffered,
            groups_complete=self._scheduler.complete_groups,
            groups_needed=self._scheduler.rules.groups_per_step,
            reward=run.reward,
            success=run.success,
            evaluation=run.evaluation,
            engines=states,
            elapsed_s=time.monotonic() - run.started,
            steadiness=run.steadiness,
        )

    def pause(self) -> Changed:
        self._state.going.clear()
        self._state.pauses += 1
        self._scheduler.set_paused(True)
        return Changed("paused: nothing is admitted or trained until 'resume'; what runs goes on to its end")

    def unpause(self) -> Changed:
        if self._state.going.is_set():
            return Changed("it was not paused")
        self._state.going.set()
        self._scheduler.set_paused(False)
        return Changed("going on")

    def set_alpha(self, alpha: int) -> Changed:
        if alpha < 0:
            raise ValueError(f"alpha: expected 0 or more, found {alpha}")
        before = self._scheduler.rules.alpha
        self._scheduler.set_rules(msgspec.structs.replace(self._scheduler.rules, alpha=alpha))
        return Changed(f"alpha was {before} and is now {alpha}; at most {self._scheduler.rules.capacity} groups run")
