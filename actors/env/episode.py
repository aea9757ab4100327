"""The state of one trajectory while it runs, and the rules that can end it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Literal

import msgspec
import numpy as np

from actors.env.messages import Followed, LearnerVersion, Outcome, RunningTrajectory, Ticket
from actors.env.recorder import TrajectoryRecorder
from actors.trajectory import Trajectory

FOLLOWED_AT_LEAST_EVERY_S = 5.0
"""Who follows a trajectory hears of it this often though nothing happens."""


class Lost(Exception):
    """A trajectory that ends without being trained on. ``reason`` is what it is counted under."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Episode:
    """See the module docstring."""

    def __init__(self, ticket: Ticket, now: float) -> None:
        temperature = ticket.temperature or 1.0  # greedy evaluation records log-probabilities at temperature 1
        self.ticket = ticket
        self.recorder = TrajectoryRecorder(ticket.id, ticket.group, ticket.task, temperature)
        self._state = "place"
        self.env_return = 0.0
        self.success = False
        self.metrics: dict[str, float] = {}
        self.last_token = -1
        self.sampled_tokens = 0
        self.stop_reason: str | None = None
        self.interrupt: Callable[[], object] | None = None  # ends what it waits for now
        self._started = now
        self._ended: Outcome | None = None
        self._followers: set[asyncio.Event] = set()

    @property
    def state(self) -> str:
        """What it waits for."""
        return self._state

    @state.setter
    def state(self, state: str) -> None:
        self._state = state
        self._tell_followers()

    def end(self, outcome: Outcome) -> None:
        """Nothing more will happen."""
        self._ended = outcome
        self._tell_followers()

    def _tell_followers(self) -> None:
        for news in self._followers:
            news.set()

    async def follow(self) -> AsyncGenerator[Followed, None]:
        """What it does, from now to its end; who reads slowly is told several things at once."""
        news, told = asyncio.Event(), 0
        self._followers.add(news)
        try:
            while True:
                news.clear()
                said = self.recorder.transcript[told:]
                told += len(said)
                yield Followed(self.describe(), said, self._ended)
                if self._ended is not None:
                    return
                await _within(news, FOLLOWED_AT_LEAST_EVERY_S)
        finally:
            self._followers.discard(news)

    def took(self, tokens: np.ndarray) -> None:
        """Note what an engine sampled."""
        self.sampled_tokens += len(tokens)
        self.last_token = int(tokens[-1])

    def stop(self, reason: str) -> None:
        """End at once if it waits for a place or an engine, else before the next thing that it would do."""
        self.stop_reason = self.stop_reason or reason
        if self.interrupt is not None:
            self.interrupt()

    def check(self, learner: LearnerVersion) -> None:
        """Raise ``Lost`` if it was told to stop, or can no longer be trained on. Step n+1 may train on initiating
        version n - alpha and newer, where n is the learner's version."""
        if self.stop_reason is not None:
            raise Lost(self.stop_reason)
        initiating = self.recorder.initiating_version
        if self.ticket.purpose == "train" and initiating is not None and initiating < learner.version - learner.alpha:
            raise Lost(
                "stale",
                f"trajectory {self.ticket.id}, turn {self.recorder.turns}: it began under version {initiating}, and "
                f"the learner at version {learner.version} trains on {learner.version - learner.alpha} and newer",
            )

    def finish(self, reward: float = 0.0) -> Trajectory:
        """What was recorded."""
        recorded = self.recorder.finish(env_return=self.env_return, reward=reward, success=self.success)
        return msgspec.structs.replace(recorded, stream=self.ticket.stream)

    def outcome(self, state: Literal["stored", "evaluated"], reward: float) -> Outcome:
        recorder = self.recorder
        version = recorder.initiating_version
        return Outcome(
            ticket=self.ticket.id,
            state=state,
            initiating_version=-1 if version is None else version,
            reward=reward,
            env_return=self.env_return,
            success=self.success,
            turns=recorder.turns,
            sampled_tokens=self.sampled_tokens,
            transcript=recorder.transcript,
            metrics=self.metrics,
        )

    def lost(self, loss: Lost) -> Outcome:
        version = self.recorder.initiating_version
        return Outcome(
            self.ticket.id,
            "lost",
            loss.reason,
            loss.detail,
            -1 if version is None else version,
            turns=self.recorder.turns,
            sampled_tokens=self.sampled_tokens,
        )

    def describe(self) -> RunningTrajectory:
        return RunningTrajectory(
            self.ticket.id,
            self.ticket.task,
            self.ticket.purpose,
            self.recorder.turns,
            self.recorder.initiating_version,
            self.state,
            time.monotonic() - self._started,
        )


async def _within(news: asyncio.Event, limit_s: float) -> None:
    """Wait for news, but no longer than that."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(news.wait(), limit_s)
