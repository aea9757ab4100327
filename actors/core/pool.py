"""A pool of worker processes that hold state: started, watched, restarted within bounds.

Invariant: there is one process per worker name at most; when it dies, every ask to it fails at once and its successor
is started, for which whoever asks for the worker meanwhile waits. After ``RESTARTS`` deaths in ``WINDOW_S`` seconds the
pool gives up and says so, with the worker's last words. Who held state in a dead worker has lost it and is told by the
failing ask.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from actors.core.actor import Actor, handler
from actors.core.hosting import ChildSpec
from actors.core.process import Child, start_child
from actors.core.ref import Ref
from bus.message import PeerLost

log = logging.getLogger(__name__)

SILENCE_S = 20.0
RESTARTS = 5
WINDOW_S = 60.0
START_TIMEOUT_S = 120.0


class MemberReady(msgspec.Struct, frozen=True):
    """From a worker to its pool: it can take orders."""

    worker: str
    ref: Ref


class Welcome(msgspec.Struct, frozen=True):
    """The pool knows the worker now."""


class PoolGaveUp(PeerLost):
    """A worker keeps dying; the message has its last words."""


class WorkerPool(Actor):
    """Spawn on the node that starts the workers; ``worker`` hands out their refs round robin."""

    def __init__(
        self,
        module: str,
        specs: Mapping[str, ChildSpec],
        environment: Mapping[str, str],
        gave_up: Callable[[PoolGaveUp], None],
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._module = module
        self._specs = specs
        self._environment = environment
        self._gave_up = gave_up
        self._silence_s = silence_s
        self._children: dict[str, Child] = {}
        self._refs: dict[str, asyncio.Future[Ref]] = {}
        self._deaths: dict[str, deque[float]] = {name: deque() for name in specs}
        self._stopping = False
        self._next = 0

    async def on_start(self) -> None:
        for name in self._specs:
            self._refs[name] = asyncio.get_running_loop().create_future()
            await self._launch(name)

    async def on_stop(self) -> None:
        self._stopping = True
        for name, child in self._children.items():
            self.node.unwatch(name)
            child.terminate()
        await asyncio.gather(*(child.stop() for child in self._children.values()))
        for name in self._refs:
            self._settle(name, PeerLost(f"worker {name}: its pool has stopped"))

    async def _launch(self, name: str) -> None:
        """Raises ``OSError`` where no process can be started."""
        spec = self._specs[name]
        text = msgspec.json.encode(spec).decode()
        log_path = Path(spec.log_directory) / f"{name}.out"
        child = await start_child(name, self._module, [text], log_path=log_path, environment=self._environment)
        self._children[name] = child
        if self._stopping:
            await child.stop()
            return
        self.node.background(child.watch(lambda reason: self._on_death(name, reason)))
        self.node.background(self._expect(name, child))

    async def _expect(self, name: str, child: Child) -> None:
        """A worker that neither dies nor becomes ready is killed."""
        await asyncio.wait([self._refs[name]], timeout=START_TIMEOUT_S)
        if not self._refs[name].done() and child.running:
            log.error("worker %s: not ready within %g s; killing it", name, START_TIMEOUT_S)
            child.kill()

    @handler
    async def ready(self, message: MemberReady) -> Welcome:
        name, node = message.worker, message.ref.node
        if name not in self._refs:
            raise ValueError(f"no worker {name!r} here; there are {', '.join(self._refs)}")
        self._settle(name, message.ref)
        self.node.watch(node, silence_s=self._silence_s, on_lost=lambda why: self._on_silence(name, why))
        return Welcome()

    def _settle(self, name: str, outcome: Ref | PeerLost) -> None:
        """Who waits for a worker, and who will, gets this."""
        if self._refs[name].done():
            self._refs[name] = asyncio.get_running_loop().create_future()
        future = self._refs[name]
        if isinstance(outcome, Ref):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)
            future.exception()  # seen: whoever waits gets it, and nobody has to

    def _on_silence(self, name: str, why: str) -> None:
        log.error("worker %s: %s; killing it", name, why)
        self.kill(name)

    def kill(self, name: str) -> None:
        """End a worker that hangs; a successor is started, and from now on waited for."""
        self._withdraw(name, "it hung and was killed")
        self._children[name].kill()

    def _withdraw(self, name: str, reason: str) -> None:
        """Fail what waits for a worker; nobody is handed it any more."""
        future = self._refs[name]
        if future.done() and future.exception() is None:
            self.node.unwatch(name)
            self.node.lose(future.result().node, reason)
            self._refs[name] = asyncio.get_running_loop().create_future()

    def _on_death(self, name: str, reason: str) -> None:
        if self._stopping:
            return
        now = asyncio.get_running_loop().time()
        deaths = self._deaths[name]
        deaths.append(now)
        while deaths and now - deaths[0] > WINDOW_S:
            deaths.popleft()
        log.error("%s", reason)
        self._withdraw(name, reason)
        if len(deaths) > RESTARTS:
            self._give_up(name, f"died {len(deaths)} times in {WINDOW_S:g} s; last: {reason}")
        else:
            self.node.background(self._relaunch(name))

    async def _relaunch(self, name: str) -> None:
        try:
            await self._launch(name)
        except OSError as error:
            self._give_up(name, f"cannot be started again: {error}")

    def _give_up(self, name: str, why: str) -> None:
        error = PoolGaveUp(f"worker {name} {why}")
        self._settle(name, error)
        self._gave_up(error)

    def pick(self) -> str:
        """The next worker's name, round robin."""
        names = list(self._specs)
        self._next += 1
        return names[self._next % len(names)]

    async def worker(self, name: str) -> Ref:
        """A worker's ref, once it is ready. Raises ``PeerLost`` if that takes too long, ``PoolGaveUp`` if it never
        will be."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await asyncio.shield(self._refs[name])
        except TimeoutError:
            raise PeerLost(f"worker {name} was not ready within {START_TIMEOUT_S:g} s") from None
