"""From the name of an environment to an environment.

Invariant: what ``make_environment`` returns has the methods of ``actors.env.protocol.Environment``, and whatever is
wrong with a job's ``environment.name`` or ``environment.options`` is one line that names the key. Environments are
imported only when they are made.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from actors.env.failures import UserError, one_line
from actors.env.importing import ImportFailed, is_import_path, load_attribute
from actors.env.protocol import Environment, system_prompt
from actors.settings import EnvironmentSettings

CATALOGUE = {
    "frozenlake": "actors.env.frozenlake:FrozenLake",
    "reasoning-gym": "actors.env.reasoning:Question",
    "reasoning-gym-calculator": "actors.env.reasoning:WithCalculator",
}
"""The environments that ship with this package, by the name that a job uses."""


class EnvironmentUnavailable(ValueError):
    """The environment cannot be made as the job says; one line for the user."""


def make_environment(settings: EnvironmentSettings, base: Path) -> Environment:
    """A fresh instance; ``base`` is the job file's directory. Raises ``EnvironmentUnavailable``."""
    factory = load_factory(settings.name, base)
    options = checked_options(settings.name, factory, settings.options)
    try:
        environment: object = factory(**options)
    except UserError as error:
        raise EnvironmentUnavailable(f"environment.options: {settings.name} refused them: {one_line(error)}") from error
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise EnvironmentUnavailable(
                f"environment.name: {settings.name} makes a {type(environment).__name__}, "
                f"which has no method {method}() (see actors.env.protocol)"
            )
    made = cast(Environment, environment)
    try:
        system_prompt(made)
    except TypeError as error:
        raise EnvironmentUnavailable(f"environment.name: {error}") from None
    return made


def load_factory(name: str, base: Path) -> Callable[..., object]:
    """What a job names, without calling it. Raises ``EnvironmentUnavailable``."""
    path = name if is_import_path(name) else CATALOGUE.get(name)
    if path is None:
        raise EnvironmentUnavailable(
            f"environment.name: expected one of {', '.join(sorted(CATALOGUE))} or an import path such as "
            f"my_env:MyEnvironment, found {name!r}"
        )
    try:
        factory = load_attribute(path, base)
    except ImportFailed as error:
        raise EnvironmentUnavailable(f"environment.name: {error}") from error
    if not callable(factory):
        raise EnvironmentUnavailable(
            f"environment.name: {path} is a {type(factory).__name__}; expected a class, or a function that makes one"
        )
    return cast(Callable[..., object], factory)


def checked_options(
    name: str, factory: Callable[..., object], options: dict[str, Any], before: tuple[Any, ...] = ()
) -> dict[str, Any]:
    """The options, converted to the types that the constructor's annotations ask for; ``before`` goes before them.
    Raises ``EnvironmentUnavailable``."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # a few C classes tell nothing about themselves
        return options
    try:
        signature.bind(*before, **options)
    except TypeError as error:
        takes = ", ".join(list(signature.parameters)[len(before) :]) or "none"
        raise EnvironmentUnavailable(f"environment.options: {name}: {error} (it takes: {takes})") from None
    hints = _annotations(factory)
    return {key: _converted(key, value, hints.get(key, Any)) for key, value in options.items()}


def _annotations(factory: Callable[..., object]) -> dict[str, Any]:
    function = factory.__init__ if inspect.isclass(factory) else factory
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # annotations that only a type checker can resolve
        return {}


def _converted(key: str, value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint, dec_hook=_decoded)
    except msgspec.ValidationError as error:
        text = str(error)
        raise EnvironmentUnavailable(f"environment.options.{key}: {text[0].lower()}{text[1:]}") from None
    except (TypeError, NotImplementedError):  # a type that msgspec does not know: the constructor sees to it itself
        return value


def _decoded(hint: type, value: Any) -> Any:
    if hint is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError
