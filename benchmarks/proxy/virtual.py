"""The real proxy before simulated engines, on virtual time, and trajectories that only ask for tokens.

Invariant: nothing but messages goes between them, and the same seed gives the same history.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np

from actors.core import Actor, Node, Ref, handler
from actors.proxy.engines.protocol import Completion, EngineLimits, GenerateRequest
from actors.proxy.engines.simulated import SimulatedHost
from actors.proxy.messages import (
    Accepted,
    Acknowledged,
    Add,
    EngineReady,
    Finished,
    Progress,
    RequestFailed,
    Resume,
    TrajectoryEnded,
    Update,
)
from actors.proxy.proxy import LLMProxy
from benchmarks.proxy.workloads import EFFICIENCY, H20_GIB, OVERHEAD_S, Turn
from bus.message import NodeAddress
from bus.simulated import Link, SimulatedNetwork
from hwprobe.cost import RESERVE, DeviceCost, ModelSize, device_cost
from hwprobe.costmodel import CostModel, CostState
from hwprobe.fitting import ClassFit

MODEL = ModelSize()
CEILINGS = {"H800": 256, "H20": 128}
"""Of the running batch: the brief's."""
MAX_MODEL_LEN = 1 << 20
ASK_TIMEOUT_S = 30.0
LINK = Link(latency_s=0.001)


def cost_of(hardware_class: str) -> DeviceCost:
    """Of one device."""
    memory_gib = H20_GIB if hardware_class == "H20" else None
    return device_cost(hardware_class, MODEL, memory_gib, EFFICIENCY[hardware_class])


def known_costs() -> CostModel:
    """What the proxy is told of the classes before it measures anything: what they are."""
    fits = {name: ClassFit(prior=cost_of(name), efficiency=EFFICIENCY[name], peaks=True) for name in CEILINGS}
    return CostModel(CostState(model=MODEL, classes=fits))


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine on one device."""

    hardware_class: str
    cache_share: float = 1 - RESERVE
    ceiling: int | None = None  # default: the class's


class TurnFailed(RuntimeError):
    """A request that was not answered with what was asked for; the message names it."""


class Players(Actor):
    """Plays trajectories."""

    def __init__(self, proxy: Ref) -> None:
        self._proxy = proxy
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self.latencies: list[float] = []  # seconds from each request to its answer

    @handler
    async def finished(self, message: Finished) -> None:
        for completion in message.completions:
            future = self._waiting.pop(completion.request_id, None)
            if future is not None:
                future.set_result(completion)

    @handler
    async def failed(self, message: RequestFailed) -> None:
        future = self._waiting.pop(message.request_id, None)
        if future is not None:
            future.set_exception(TurnFailed(f"{message.request_id}: {message.reason}"))

    async def play(self, name: str, domain: str, turns: Sequence[Turn], seed: int) -> None:
        length = 0
        for number, turn in enumerate(turns):
            length += turn.observation
            prompt = np.zeros(length, np.int32)
            request = GenerateRequest(f"{name}/{number}", name, prompt, turn.response, seed=seed + number)
            await self._ask(Add(request, self.ref, domain))
            length += turn.response
            if number < len(turns) - 1:
                await asyncio.sleep(turn.wait_s)
        self.node.tell(self._proxy, TrajectoryEnded(name))

    async def _ask(self, add: Add) -> None:
        loop, request = asyncio.get_running_loop(), add.request
        future = self._waiting[request.request_id] = loop.create_future()
        start = loop.time()
        await self.node.ask(self._proxy, add, Accepted, timeout_s=ASK_TIMEOUT_S, retries=5)
        completion = await future
        if len(completion.tokens) != request.max_tokens:
            found = f"{len(completion.tokens)} of {request.max_tokens} tokens"
            raise TurnFailed(f"{request.request_id}: {found}, {completion.finish_reason}")
        self.latencies.append(loop.time() - start)


class Fleet:
    """Nodes in place of processes."""

    async def start(self) -> None:
        """``running`` starts engines."""

    def ready(self, name: str, address: NodeAddress) -> None:
        """Nothing is watched: no engine dies here."""

    def judge(self, name: str, effort: Any, in_flight: int) -> bool:
        return False

    async def retire(self, name: str) -> None:
        """Nothing runs."""

    async def stop(self) -> None:
        """Nothing runs."""


class Pools:
    """What ``running`` gives."""

    def __init__(self, proxy: LLMProxy, players: Players, hosts: list[SimulatedHost]) -> None:
        self.proxy = proxy
        self.players = players
        self.hosts = hosts


@asynccontextmanager
async def running(engines: Sequence[EngineSpec], affinity: Mapping[str, str], seed: int) -> AsyncIterator[Pools]:
    """Engines that serve version 0."""
    network = SimulatedNetwork(seed=seed, link=LINK)
    failures: list[BaseException] = []
    number = itertools.count()
    names = {f"{spec.hardware_class}-{next(number)}": spec for spec in engines}
    async with Node("control", transport=network.join("control")) as node:
        proxy = LLMProxy(
            {name: spec.hardware_class for name, spec in names.items()},
            dict(affinity),
            failed=failures.append,
            costs=known_costs(),
        )
        proxy.fleet = Fleet()
        await node.spawn(lambda: proxy, "proxy", restarts=0)
        nodes: list[Node] = []
        try:
            hosts = []
            for name, spec in names.items():
                nodes.append(await Node(name, transport=network.join(name)).__aenter__())
                hosts.append(await _serve(node, nodes[-1], proxy.ref, name, spec))
            nodes.append(await Node("env", transport=network.join("env")).__aenter__())
            players = Players(proxy.ref)
            await nodes[-1].spawn(lambda: players, "players", restarts=0)
            yield Pools(proxy, players, hosts)
        finally:
            for each in nodes:
                await each.close()
        if failures:
            raise failures[0]


async def _serve(control: Node, node: Node, proxy: Ref, name: str, spec: EngineSpec) -> SimulatedHost:
    cost = cost_of(spec.hardware_class)
    limits = EngineLimits(spec.ceiling or CEILINGS[spec.hardware_class], MAX_MODEL_LEN)
    host = SimulatedHost(
        name,
        proxy,
        cost,
        limits=limits,
        cache_tokens=cost.cache_tokens(MODEL, share=spec.cache_share),
        overhead_s=OVERHEAD_S,
    )
    ref = await node.spawn(lambda: host, "engine", restarts=0)
    ready = EngineReady(name, ref, limits, 0.1)
    await control.ask(proxy, ready, Acknowledged, timeout_s=ASK_TIMEOUT_S, retries=5)
    for order in (Update(name, 0), Resume(name, 0)):
        progress: Any = Progress
        async for _ in control.stream(proxy, order, progress, timeout_s=ASK_TIMEOUT_S):
            continue
    return host
