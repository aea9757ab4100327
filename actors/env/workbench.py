"""What a worker process does: runs environments, and a user's reward function, for others.

Invariant: whatever a user's code does, a call returns well-formed structs or raises ``EnvironmentFailed`` or
``RewardFailed``, and one instance's failure leaves all others as they were. A closed instance's environment is kept
and reset for the next episode, one that failed is thrown away.

A workbench is synchronous and owns no thread, socket or clock; its host enforces deadlines.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path

import msgspec

from actors.env.catalogue import make_environment
from actors.env.failures import UserError, one_line, short_traceback
from actors.env.protocol import Environment, Observation, Step, succeeded, system_prompt
from actors.env.returned import WrongReturn, checked_observation, checked_step
from actors.reward.functions import Reward, load_reward
from actors.settings import EnvironmentSettings, RewardSettings
from actors.trajectory import Trajectory

_log = logging.getLogger(__name__)


class EnvironmentFailed(RuntimeError):
    """A user's environment raised, or returned what it should not. ``details`` is a short traceback."""

    def __init__(self, instance: str, task: int, during: str, reason: str, details: str) -> None:
        super().__init__(f"environment instance {instance}, task {task}, {during}: {reason}")
        self.instance = instance
        self.task = task
        self.during = during  # "constructor", "reset" or "step 7"
        self.reason = reason  # one line
        self.details = details


class UnknownInstance(LookupError):
    """A step for an instance that has no episode in progress here."""


class Standing(msgspec.Struct, frozen=True):
    """How an episode stands after its steps so far; final once it is over or cut off."""

    steps: int
    env_return: float  # undiscounted sum of the rewards
    success: bool  # see actors.env.protocol.succeeded
    metrics: dict[str, float] = {}  # summed


class WorkbenchCounts(msgspec.Struct, frozen=True):
    """What a workbench holds now and has done so far."""

    open: int  # instances with an episode in progress or just ended
    spare: int  # environments kept for the next episodes
    created: int
    failed: int
    episodes: int
    steps: int


class _Episode:
    __slots__ = ("env_return", "environment", "last", "metrics", "over", "steps", "task")

    def __init__(self, environment: Environment, task: int) -> None:
        self.environment = environment
        self.task = task
        self.steps = 0
        self.env_return = 0.0
        self.metrics: dict[str, float] = defaultdict(float)
        self.last: Step | None = None
        self.over = False


class Workbench:
    """See the module docstring."""

    def __init__(self, environment: EnvironmentSettings, base: Path, reward: RewardSettings | None = None) -> None:
        """``base``: the job file's directory. One environment is made at once, so that a job that cannot run is
        refused here: raises ``EnvironmentUnavailable`` or ``RewardUnavailable``. Without ``reward``, ``score`` takes
        the environment's return."""
        self._settings = environment
        self._base = base
        self._reward: Reward = load_reward(reward or RewardSettings(), base)
        self._episodes: dict[str, _Episode] = {}
        self._created = self._failed = self._resets = self._steps = 0
        self._spare: list[Environment] = [self._make()]
        self.system_prompt = system_prompt(self._spare[0])

    def reset(self, instance: str, task: int) -> Observation:
        """Begin the episode of ``task`` in this instance, which is made if it is new. Raises ``EnvironmentFailed``."""
        episode = self._episodes.pop(instance, None)
        environment = self._take(instance, task) if episode is None else episode.environment
        episode = _Episode(environment, task)
        try:
            observation = checked_observation(environment.reset(task), may_be_last=False)
        except UserError as error:
            raise self._failure(instance, episode, "reset", error) from error
        self._episodes[instance] = episode
        self._resets += 1
        return observation

    def step(self, instance: str, action: str) -> Step:
        """Play one action. Raises ``EnvironmentFailed``, or ``UnknownInstance`` where there is nothing to play."""
        episode = self._episodes.get(instance)
        if episode is None or episode.over:
            state = "is not here" if episode is None else f"has ended its episode of task {episode.task}"
            raise UnknownInstance(f"environment instance {instance} {state}: reset it first")
        episode.steps += 1
        try:
            step = checked_step(episode.environment.step(action))
        except UserError as error:
            del self._episodes[instance]
            raise self._failure(instance, episode, f"step {episode.steps}", error) from error
        self._steps += 1
        episode.last = step
        episode.env_return += step.reward
        for name, amount in step.metrics.items():
            episode.metrics[name] += amount
        episode.over = step.terminated or step.truncated
        return step

    def standing(self, instance: str) -> Standing:
        """Return and success so far. Raises ``UnknownInstance``."""
        episode = self._episodes.get(instance)
        if episode is None:
            raise UnknownInstance(f"environment instance {instance} is not here: reset it first")
        success = succeeded(episode.last, episode.env_return)
        return Standing(episode.steps, episode.env_return, success, dict(episode.metrics))

    def close(self, instance: str) -> None:
        """The instance is not needed any more, at whatever point it is; unknown ones are fine."""
        episode = self._episodes.pop(instance, None)
        if episode is not None:
            self._spare.append(episode.environment)

    def score(self, trajectory: Trajectory) -> float:
        """The job's reward for a finished trajectory. Raises ``RewardFailed``."""
        return self._reward(trajectory)

    def counts(self) -> WorkbenchCounts:
        """See ``WorkbenchCounts``."""
        return WorkbenchCounts(
            open=len(self._episodes),
            spare=len(self._spare),
            created=self._created,
            failed=self._failed,
            episodes=self._resets,
            steps=self._steps,
        )

    def shutdown(self) -> None:
        """Close every environment; idempotent."""
        environments = [*self._spare, *(episode.environment for episode in self._episodes.values())]
        self._spare.clear()
        self._episodes.clear()
        for environment in environments:
            self._discard(environment)

    def _make(self) -> Environment:
        environment = make_environment(self._settings, self._base)
        self._created += 1
        return environment

    def _take(self, instance: str, task: int) -> Environment:
        if self._spare:
            return self._spare.pop()
        try:
            return self._make()
        except ValueError as error:
            self._failed += 1
            raise EnvironmentFailed(instance, task, "constructor", str(error), short_traceback(error)) from error

    def _failure(self, instance: str, episode: _Episode, during: str, error: BaseException) -> EnvironmentFailed:
        self._failed += 1
        self._discard(episode.environment)
        if isinstance(error, WrongReturn):
            return EnvironmentFailed(instance, episode.task, during, str(error), str(error))
        return EnvironmentFailed(instance, episode.task, during, one_line(error), short_traceback(error))

    def _discard(self, environment: Environment) -> None:
        close = getattr(environment, "close", None)
        if not callable(close):
            return
        try:
            close()
        except UserError as error:
            _log.warning("closing an environment failed: %s", one_line(error))
