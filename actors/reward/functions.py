"""What a finished trajectory is worth.

Invariant: a reward is a finite float; whatever else a user's function does is a ``RewardFailed`` that names the
function and the trajectory.

A reward function takes the trajectory and returns a number::

    def shorter_is_better(trajectory: Trajectory) -> float:
        return trajectory.env_return - 0.01 * trajectory.turns

A job names it by import path: ``reward.function: my_env:shorter_is_better``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actors.env.failures import UserError, one_line, short_traceback
from actors.env.importing import ImportFailed, is_import_path, load_attribute
from actors.env.returned import WrongReturn, finite_number
from actors.settings import RewardSettings
from actors.trajectory import Trajectory

Reward = Callable[[Trajectory], float]

ENVIRONMENT = "environment"
"""The name of the reward function that takes the environment's own rewards: no user code, no worker needed."""


class RewardUnavailable(ValueError):
    """The job names a reward function that is not there; one line for the user."""


class RewardFailed(RuntimeError):
    """A user's reward function raised, or returned what is no reward. ``details`` is a short traceback."""

    def __init__(self, function: str, ticket: str, reason: str, details: str) -> None:
        super().__init__(f"reward function {function}, trajectory {ticket}: {reason}")
        self.function = function
        self.ticket = ticket
        self.reason = reason
        self.details = details


def environment_return(trajectory: Trajectory) -> float:
    """The undiscounted sum of the environment's own rewards."""
    return trajectory.env_return


def load_reward(settings: RewardSettings, base: Path) -> Reward:
    """The job's reward function; ``base`` is the job file's directory. Raises ``RewardUnavailable``; the function
    returned raises ``RewardFailed``."""
    if settings.function == ENVIRONMENT:
        return environment_return
    if not is_import_path(settings.function):
        raise RewardUnavailable(
            f"reward.function: expected {ENVIRONMENT!r} or an import path such as my_env:score, "
            f"found {settings.function!r}"
        )
    try:
        function = load_attribute(settings.function, base)
    except ImportFailed as error:
        raise RewardUnavailable(f"reward.function: {error}") from error
    if not callable(function):
        raise RewardUnavailable(
            f"reward.function: {settings.function} is a {type(function).__name__}; expected a function of a trajectory"
        )
    return _guarded(settings.function, function)


def _guarded(name: str, function: Callable[[Trajectory], object]) -> Reward:
    def reward(trajectory: Trajectory) -> float:
        try:
            value = function(trajectory)
        except UserError as error:
            raise RewardFailed(name, trajectory.ticket, one_line(error), short_traceback(error)) from error
        try:
            return finite_number("the reward", value)
        except WrongReturn as error:
            raise RewardFailed(name, trajectory.ticket, str(error), str(error)) from None

    return reward
