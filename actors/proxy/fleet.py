"""The engine processes of one proxy: started, watched, restarted once each on their device, then removed.

An engine is dead when its process ended, when it gave no sign of life for ``silence_s``, when it was not ready within
``START_TIMEOUT_S`` or stands still before that, or when the proxy has given it up because it gets nowhere
(``actors.proxy.engines.progress``). A stopped or hung process is killed first, so that two of one name never run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from actors.core import Node
from actors.core.hosting import ChildSpec
from actors.core.process import Child, start_child
from actors.core.restarts import Budget, Restarts
from actors.proxy.engines.progress import Effort, Patience
from bus.message import NodeAddress

log = logging.getLogger(__name__)

SILENCE_S = 20.0
RESTARTS = Restarts(at_most=1)
START_TIMEOUT_S = 600.0


class Owner(Protocol):
    """Who is told of a death: the proxy."""

    def engine_died(self, name: str, reason: str, *, restarting: bool) -> None: ...


class Fleet(Protocol):
    """The engine processes, as the proxy sees them."""

    async def start(self) -> None: ...

    def ready(self, name: str, address: NodeAddress) -> None: ...

    def judge(self, name: str, effort: Effort, requests: int) -> bool: ...

    async def retire(self, name: str) -> None: ...

    async def stop(self) -> None: ...


class EngineFleet:
    """See the module docstring."""

    def __init__(
        self,
        node: Node,
        specs: Mapping[str, tuple[ChildSpec, Mapping[str, str]]],
        owner: Owner,
        *,
        silence_s: float = SILENCE_S,
        restarts: Restarts = RESTARTS,
        patience: Patience | None = None,
    ) -> None:
        """``specs``: each engine's command line and environment variables. ``restarts`` are each one's; ``patience`` is
        that with engines which get nowhere."""
        self._node = node
        self._specs = specs
        self._owner = owner
        self._silence_s = silence_s
        self._children: dict[str, Child] = {}
        self._budgets = {name: Budget(restarts) for name in specs}
        self._patience = patience or Patience()
        self._verdicts: dict[str, str] = {}  # why engines were killed that have not died yet
        self._starting: dict[str, asyncio.TimerHandle] = {}
        self._retired: set[str] = set()
        self._stopping = False

    async def start(self) -> None:
        for name in self._specs:
            await self._launch(name)

    async def _launch(self, name: str) -> None:
        spec, environment = self._specs[name]
        log_path = Path(spec.log_directory) / f"{name}.out"
        text = msgspec.json.encode(spec).decode()
        child = await start_child(
            name, "actors.proxy.engines.process", [text], log_path=log_path, environment=environment
        )
        self._children[name] = child
        if self._stopping or name in self._retired:  # meanwhile
            await child.stop()
            return
        self._await_ready(name, asyncio.get_running_loop().time() + START_TIMEOUT_S)
        self._node.background(child.watch(lambda reason: self._on_death(name, reason)))

    def _await_ready(self, name: str, until: float, *, stood_still: bool = False) -> None:
        """An engine that builds its model gives no sign of life; one that was stopped meanwhile never would."""
        loop = asyncio.get_running_loop()
        left_s, stands_still = until - loop.time(), self._children[name].stopped
        if left_s <= 0:
            self._kill(name, f"not ready within {START_TIMEOUT_S:g} s")
        elif stood_still and stands_still:
            self._kill(name, f"stopped while it started, for {self._silence_s:g} s")
        else:
            look = partial(self._await_ready, name, until, stood_still=stands_still)
            self._starting[name] = loop.call_later(min(left_s, self._silence_s), look)

    def ready(self, name: str, address: NodeAddress) -> None:
        """The engine has reported in: watch for its heartbeats from now on."""
        self._started(name)
        self._node.watch(address, silence_s=self._silence_s, on_lost=lambda why: self._kill(name, why))

    def _started(self, name: str) -> None:
        timer = self._starting.pop(name, None)
        if timer is not None:
            timer.cancel()

    def judge(self, name: str, effort: Effort, requests: int) -> bool:
        """End an engine with so many requests if it hangs, by what it says; returns whether that is so, and news."""
        why = self._patience.verdict(effort, requests)
        if not why or name in self._verdicts:
            return False
        self._kill(name, why)
        return True

    def _kill(self, name: str, why: str) -> None:
        """End an engine's process; its death is then reported as any other's, with this reason."""
        log.error("engine %s: %s; killing it", name, why)
        self._verdicts[name] = why
        self._children[name].kill()

    def _on_death(self, name: str, reason: str) -> None:
        if self._stopping or name in self._retired:
            return
        self._started(name)
        self._node.unwatch(name)
        verdict = self._verdicts.pop(name, "")
        reason = f"{verdict}; {reason}" if verdict else reason
        restarting = self._budgets[name].spend(asyncio.get_running_loop().time()) is not None
        log.error("engine %s died (%s); %s", name, reason, "restarting it" if restarting else "removed")
        self._owner.engine_died(name, reason, restarting=restarting)
        if restarting:
            self._node.background(self._relaunch(name))

    async def _relaunch(self, name: str) -> None:
        try:
            await self._launch(name)
        except OSError as error:
            self._owner.engine_died(name, f"could not be started again: {error}", restarting=False)

    async def retire(self, name: str) -> None:
        """Stop one engine for good; nobody is told."""
        self._retired.add(name)
        self._started(name)
        self._node.unwatch(name)
        await self._children[name].stop()

    async def stop(self) -> None:
        """Stop all engines."""
        self._stopping = True
        for name, child in self._children.items():
            self._started(name)
            self._node.unwatch(name)
            child.terminate()
        for child in self._children.values():
            await child.stop()
