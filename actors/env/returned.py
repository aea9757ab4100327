"""Checks what a user's environment returned, before it goes on its way.

Invariant: what passes holds plain Python values of the declared types (numpy's scalars and lists of actions are
converted), so that it can be encoded, compared and summed anywhere.
"""

from __future__ import annotations

import math
import numbers

import numpy as np

from actors.env.protocol import Observation, Step


class WrongReturn(TypeError):
    """A reset or step that returned something else; says what was expected and what was found."""


def checked_observation(value: object, *, may_be_last: bool) -> Observation:
    """The observation, normalised. Raises ``WrongReturn``. ``may_be_last``: nothing need follow it."""
    if not isinstance(value, Observation):
        raise WrongReturn(f"expected an Observation, found {_shown(value)}")
    if type(value.text) is not str:
        raise WrongReturn(f"expected Observation.text to be a str, found {_shown(value.text)}")
    actions = value.actions
    if type(actions) is tuple and all(type(action) is str for action in actions) and actions:
        return value
    if actions is None:
        return value
    if not isinstance(actions, list | tuple) or not all(isinstance(action, str) for action in actions):
        raise WrongReturn(f"expected Observation.actions to be a tuple of str or None, found {_shown(actions)}")
    if not actions and not may_be_last:
        raise WrongReturn("expected Observation.actions to list at least one action (or None: any text), found none")
    return Observation(value.text, tuple(str(action) for action in actions) or None)


def checked_step(value: object) -> Step:
    """The step, normalised. Raises ``WrongReturn``."""
    if not isinstance(value, Step):
        raise WrongReturn(f"expected a Step, found {_shown(value)}")
    terminated = _flag("terminated", value.terminated)
    truncated = _flag("truncated", value.truncated)
    return Step(
        observation=checked_observation(value.observation, may_be_last=terminated or truncated),
        reward=finite_number("Step.reward", value.reward),
        terminated=terminated,
        truncated=truncated,
        success=None if value.success is None else _flag("success", value.success),
        metrics=checked_metrics("Step.metrics", value.metrics),
    )


def checked_metrics(what: str, value: object) -> dict[str, float]:
    """Finite floats by name. Raises ``WrongReturn``."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise WrongReturn(f"expected {what} to be a dict of str to numbers, found {_shown(value)}")
    return {str(name): finite_number(f"{what}[{name!r}]", number) for name, number in value.items()}


def finite_number(what: str, value: object) -> float:
    """A finite float. Raises ``WrongReturn``."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise WrongReturn(f"expected {what} to be a finite number, found {_shown(value)}")
    return float(value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise WrongReturn(f"expected Step.{name} to be True or False, found {_shown(value)}")
    return bool(value)


def _shown(value: object) -> str:
    """A value and its type, briefly."""
    text = repr(value)
    return f"{text[:80]}{'...' if len(text) > 80 else ''} ({type(value).__name__})"
