"""What a worker process does for agents: each session runs in a thread of its own, so that it may block.

Invariant: whatever an agent does, ``run`` returns a well-formed ``Result`` or raises ``AgentFailed``. A thread cannot
be ended from outside: one whose session is over is left behind until it returns, which it soon does where it asks the
endpoint again; ``MOST_LEFT_BEHIND`` that do not are told by ``Clogged``, for which the process is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

from actors.env.agents.protocol import Agent, Result, Session
from actors.env.catalogue import EnvironmentUnavailable, checked_options, load_factory
from actors.env.failures import UserError, one_line
from actors.env.returned import WrongReturn, checked_metrics, finite_number
from actors.reward.functions import Reward, load_reward
from actors.settings import EnvironmentSettings, RewardSettings
from actors.trajectory import Trajectory

MOST_LEFT_BEHIND = 32


class AgentFailed(RuntimeError):
    """A user's agent raised, or returned what it should not; one line."""


class Clogged(RuntimeError):
    """Too many threads of sessions that are over have not come back."""


class AgentBench:
    """See the module docstring."""

    def __init__(self, environment: EnvironmentSettings, base: Path, reward: RewardSettings | None = None) -> None:
        """Raises ``EnvironmentUnavailable`` or ``RewardUnavailable``."""
        self._reward: Reward = load_reward(reward or RewardSettings(), base)
        self._agent = make_agent(environment, base)
        self._left_behind = 0

    async def run(self, session: Session) -> Result:
        """Raises ``AgentFailed``, ``Clogged``."""
        if self._left_behind >= MOST_LEFT_BEHIND:
            raise Clogged(f"{self._left_behind} agents whose sessions are over have not returned")
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        waits = True

        def work() -> None:
            outcome = self._outcome(session)
            with contextlib.suppress(RuntimeError):  # the process ends, and its loop is closed
                loop.call_soon_threadsafe(settle, outcome)

        def settle(outcome: Result | AgentFailed) -> None:
            if not waits:
                self._left_behind -= 1
            elif isinstance(outcome, AgentFailed):
                result.set_exception(outcome)
            else:
                result.set_result(outcome)

        threading.Thread(target=work, name="agent", daemon=True).start()
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            waits = False
            self._left_behind += not result.done()  # else its thread has come back already
            raise

    def _outcome(self, session: Session) -> Result | AgentFailed:
        try:
            return checked_result(self._agent(session))
        except WrongReturn as error:
            return AgentFailed(str(error))
        except UserError as error:
            return AgentFailed(one_line(error))

    def score(self, trajectory: Trajectory) -> float:
        """The job's reward for a finished trajectory. Raises ``RewardFailed``."""
        return self._reward(trajectory)


def make_agent(settings: EnvironmentSettings, base: Path) -> Agent:
    """Raises ``EnvironmentUnavailable``."""
    factory = load_factory(settings.name, base)
    if not inspect.isclass(factory):
        options = checked_options(settings.name, factory, settings.options, before=(None,))
        return cast(Agent, functools.partial(factory, **options))
    options = checked_options(settings.name, factory, settings.options)
    try:
        made: object = factory(**options)
    except UserError as error:
        raise EnvironmentUnavailable(f"environment.options: {settings.name} refused them: {one_line(error)}") from error
    run: Callable[..., object] | None = getattr(made, "run", None)
    if not callable(run):
        raise EnvironmentUnavailable(
            f"environment.name: {settings.name} is a class without a method run() (see actors.env.agents.protocol)"
        )
    return cast(Agent, run)


def checked_result(value: object) -> Result:
    """The result, normalised. Raises ``WrongReturn``."""
    if not isinstance(value, Result):
        return Result(finite_number("an agent's result", value))
    if value.success is not None and not isinstance(value.success, bool):
        raise WrongReturn(f"expected Result.success to be True, False or None, found {value.success!r}")
    metrics = checked_metrics("Result.metrics", value.metrics)
    return Result(finite_number("Result.reward", value.reward), value.success, metrics)
