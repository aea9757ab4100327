"""Engines' hosts by their messages alone: real engines behind the real host, and the simulated one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

import numpy as np

from actors.core import Actor, Node, Ref
from actors.proxy.engines.host import EngineHost
from actors.proxy.engines.protocol import Completion, Engine, EngineLimits, GenerateRequest
from actors.proxy.engines.simulated import SimulatedHost
from actors.proxy.engines.simulated_row import VOCABULARY as SIMULATED_VOCABULARY
from actors.proxy.engines.simulated_row import text_of
from actors.proxy.messages import Acknowledged, HostAdd, HostResume, HostSuspend, HostUpdate, Stage, Staged
from actors.telemetry import Spans
from actors.weightsync.manifest import Manifest, Receipt
from actors.weightsync.publisher import Snapshot, WeightPublisher
from hwprobe.cost import ModelSize, device_cost
from tests.engines.reference import MAX_MODEL_LEN, MAX_SEQUENCES, VOCABULARY, spelled
from tests.engines.rigs import Rig
from tests.proxy.hosted import Peer
from tests.support.loops import until

HostKind = Literal["torch", "vllm", "simulated"]
LOAD_EVERY_S = 0.05


class Lent:
    """An engine that outlives its host, and makes as many steps as the test lets it make."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps = 10**9
        self._changed = threading.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        """The next host has it."""

    def step(self) -> Sequence[Completion]:
        with self._changed:
            if not self._steps:
                time.sleep(0.001)
                return ()
            self._steps -= 1
        return self._engine.step()

    def let(self, steps: int) -> None:
        with self._changed:
            self._steps = steps

    @property
    def waits(self) -> bool:
        return not self._steps


class Hosted:
    """A host, and a peer that is its asker and its proxy."""

    def __init__(self, node: Node, peer: Peer, me: Ref, host: Ref) -> None:
        self.node = node
        self.peer = peer
        self.me = me
        self.host = host
        self.failures: list[BaseException] = []
        self.texts: Callable[[np.ndarray], str] = spelled
        self.vocabulary = VOCABULARY

    def add(self, *requests: GenerateRequest) -> None:
        self.node.tell(self.host, HostAdd(list(requests), [self.me] * len(requests)))

    async def ask(self, message: Any, reply: type[Any] = Acknowledged) -> Any:
        return await self.node.ask(self.host, message, reply, timeout_s=10)

    async def run(self, *requests: GenerateRequest) -> dict[str, Completion]:
        """Their answers, once the proxy has been told of them as well."""
        self.add(*requests)
        ids = {request.request_id for request in requests}
        await until(lambda: ids <= {*self.answers, *dict(self.peer.failed)} and ids <= set(self.peer.served))
        return self.answers

    @property
    def answers(self) -> dict[str, Completion]:
        """A second answer to one request fails."""
        found = {completion.request_id: completion for completion in self.peer.finished}
        assert len(found) == len(self.peer.finished)
        return found

    async def swap(self, version: int) -> Receipt:
        """SUSPEND, UPDATE, RESUME."""
        await self.ask(HostSuspend())
        receipt = await self.update(version)
        await self.ask(HostResume())
        return receipt

    async def update(self, version: int) -> Receipt:
        await self.stage(version)
        receipt: Receipt = await self.ask(HostUpdate(version), Receipt)
        return receipt

    async def stage(self, version: int) -> None:
        """A simulated host takes weights from nowhere."""

    async def sample_some(self, request: GenerateRequest) -> None:
        """Add a request, and suspend the host when some of its tokens are sampled."""
        raise NotImplementedError


class RealHosted(Hosted):
    rig: Rig
    engine: Lent
    publisher: Ref

    async def stage(self, version: int) -> None:
        snapshot = Snapshot(self.rig.reference.weights(version))
        canary = np.arange(2, 10, dtype=np.int32)
        manifest = Manifest(version, "float32", snapshot.facts, canary, self.rig.reference.score(version, canary))
        actor = self.node._cells[self.publisher.actor].actor
        assert isinstance(actor, WeightPublisher)
        actor.publish(manifest, snapshot)
        await self.ask(Stage(manifest, self.publisher), Staged)

    async def sample_some(self, request: GenerateRequest) -> None:
        self.engine.let(5)
        self.add(request)
        await until(lambda: self.engine.waits)
        await self.ask(HostSuspend())
        self.engine.let(10**9)


class SimulatedHosted(Hosted):
    async def sample_some(self, request: GenerateRequest) -> None:
        self.add(request)
        await asyncio.sleep(0.02)
        await self.ask(HostSuspend())


@asynccontextmanager
async def hosted(kind: HostKind, rig_of: Callable[[], Rig]) -> AsyncIterator[Hosted]:
    """A host without weights."""
    async with Node("n") as node:
        peer = Peer()
        me = await node.spawn(lambda: peer, "peer", restarts=0)
        if kind == "simulated":
            limits = EngineLimits(MAX_SEQUENCES, MAX_MODEL_LEN)
            cost = device_cost("H20", ModelSize())

            def simulated() -> Actor:
                return SimulatedHost("e0", me, cost, limits=limits, load_every_s=LOAD_EVERY_S)

            made: Hosted = SimulatedHosted(node, peer, me, await node.spawn(simulated, "engine", restarts=0))
            made.texts, made.vocabulary = text_of, SIMULATED_VOCABULARY
            yield made
            return
        rig = rig_of()
        engine = Lent(rig.engine)
        failures: list[BaseException] = []

        def real() -> Actor:
            spans = Spans("e0")
            return EngineHost("e0", cast("Engine", engine), me, spans, failures.append, load_every_s=LOAD_EVERY_S)

        one = RealHosted(node, peer, me, await node.spawn(real, "engine", restarts=0))
        one.rig, one.engine, one.failures = rig, engine, failures
        one.publisher = await node.spawn(WeightPublisher, "publisher", restarts=0)
        yield one
