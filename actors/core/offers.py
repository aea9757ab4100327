"""Actors that other nodes may start here: factories by name. No code travels, only a name and typed settings."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from actors.core.actor import Actor
from actors.core.ref import Ref
from actors.core.restarts import Restarts
from bus.codec import dumps, loads
from bus.message import DecodeError, NoSuchActor


class SpawnActor(msgspec.Struct, frozen=True):
    """To a node's actor: start what is offered there."""

    offer: str
    name: str
    restarts: Restarts
    bound: int
    type: str  # of the settings
    settings: bytes


class Spawned(msgspec.Struct, frozen=True):
    ref: Ref


class Offers:
    """One node's."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._offers: dict[str, tuple[Callable[..., Actor], type[msgspec.Struct] | None]] = {}

    def add(self, name: str, factory: Callable[..., Actor], settings: type[msgspec.Struct] | None) -> None:
        if name in self._offers:
            raise ValueError(f"node {self._node} offers {name!r} already")
        self._offers[name] = factory, settings

    def factory(self, message: SpawnActor) -> Callable[[], Actor]:
        """Raises ``NoSuchActor``, or ``DecodeError`` for settings of another type."""
        if message.offer not in self._offers:
            there = ", ".join(sorted(self._offers)) or "none"
            raise NoSuchActor(f"node {self._node} offers no {message.offer!r}; on offer: {there}")
        factory, type_ = self._offers[message.offer]
        expected = "no settings" if type_ is None else type_.__name__
        if message.type != expected:
            raise DecodeError(f"node {self._node} starts {message.offer!r} with {expected}, not with {message.type}")
        if type_ is None:
            return factory
        settings = loads(message.settings, type_)
        return lambda: factory(settings)


def order(offer: str, name: str, settings: msgspec.Struct | None, *, bound: int, restarts: Restarts) -> SpawnActor:
    """Raises ``TypeError`` for settings that cannot travel."""
    type_ = "no settings" if settings is None else type(settings).__name__
    return SpawnActor(offer, name, restarts, bound, type_, b"" if settings is None else dumps(settings))
