"""What engines are told to do as a whole: stop, take other weights, go on.

Invariant: an engine is "serving" only with weights that were proven; from the moment in which it is told to take others
it has none until it goes on with those. Nothing here waits for longer than its deadline, nor for another engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, TypeVar

import msgspec

from actors.core import Node
from actors.proxy.entry import EngineEntry
from actors.proxy.messages import Acknowledged, HostResume, HostSuspend, HostUpdate
from actors.proxy.pool import by_name
from actors.weightsync.manifest import Receipt
from bus.message import PeerLost

T = TypeVar("T")

SUSPEND_TIMEOUT_S = 120.0
UPDATE_TIMEOUT_S = 300.0


class Hands(Protocol):
    """What commands need of the proxy."""

    node: Node


class Commands:
    """See the module docstring. The table is the proxy's. All raise ``ValueError`` for an engine that is none."""

    def __init__(self, engines: Mapping[str, EngineEntry], hands: Hands) -> None:
        self._engines = engines
        self._hands = hands

    async def suspend(self, name: str | None) -> None:
        await asyncio.gather(*(self._suspend(engine) for engine in self._meant(name)))

    async def _suspend(self, engine: EngineEntry) -> None:
        if engine.state == "serving":
            engine.state = "suspended"
        await self.ask_host(engine, HostSuspend(), Acknowledged, SUSPEND_TIMEOUT_S)

    async def update(self, name: str, version: int) -> Receipt:
        engine = by_name(self._engines, name)
        engine.version = None  # what it held is gone, whatever comes
        return await self.ask_host(engine, HostUpdate(version), Receipt, UPDATE_TIMEOUT_S)

    async def resume(self, name: str | None, version: int | None) -> None:
        """``version``: whose receipt was accepted. Without one, an engine goes on with what it has proven before."""
        await asyncio.gather(*(self._resume(engine, version) for engine in self._meant(name)))

    async def _resume(self, engine: EngineEntry, version: int | None) -> None:
        proven = engine.version if version is None else version
        if proven is None:
            raise ValueError(f"engine {engine.name} has no accepted receipt: it cannot serve")
        await self.ask_host(engine, HostResume(), Acknowledged, SUSPEND_TIMEOUT_S)
        engine.version = proven
        engine.state = "serving"

    async def ask_host(
        self, engine: EngineEntry, message: msgspec.Struct, reply: type[T], timeout_s: float, *, retries: int = 0
    ) -> T:
        """Ask an engine's host. Raises ``PeerLost`` where the engine is gone, be it after it has answered."""
        about = f"engine {engine.name}"
        host = engine.host
        if host is None:
            raise PeerLost(f"{about} is {engine.state}: it cannot take {type(message).__name__}")
        answer = await self._hands.node.ask(host, message, reply, timeout_s=timeout_s, retries=retries, about=about)
        if engine.host is not host:
            raise PeerLost(f"{about} died after {type(message).__name__}")
        return answer

    def _meant(self, name: str | None) -> list[EngineEntry]:
        """One engine, or all that have something to suspend or resume."""
        if name is not None:
            return [by_name(self._engines, name)]
        engines = [engine for engine in self._engines.values() if engine.state in ("serving", "suspended")]
        return [engine for engine in engines if engine.version is not None]
