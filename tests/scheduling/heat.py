"""The real proxy and the real watch for hot spots on virtual time, over simulated engines by the roofline, with
trajectories that only ask for tokens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np

from actors.core import Actor, Node, Ref, handler
from actors.proxy.engines.progress import Effort, Patience
from actors.proxy.engines.protocol import Completion, EngineLimits, GenerateRequest
from actors.proxy.engines.simulated import SimulatedHost
from actors.proxy.engines.simulated_row import token_at
from actors.proxy.messages import (
    Accepted,
    Acknowledged,
    Add,
    DescribeProxy,
    EngineReady,
    Finished,
    Progress,
    ProxyState,
    RequestFailed,
    Resume,
    Suspend,
    TrajectoryEnded,
    Update,
)
from actors.proxy.proxy import LLMProxy
from bus.message import NodeAddress
from bus.simulated import Link, SimulatedNetwork, SimulatedTransport
from coordinator.engines import Engines
from coordinator.scheduling.hotwatch import HotWatch
from hwprobe.cost import ModelSize, device_cost

PLACES = 64
CACHE_TOKENS = 1 << 30
"""No trajectory's prefix is evicted: what is tested is where they are played."""


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """What trajectories are like."""

    turns: int = 60
    observation: int = 1200  # tokens
    opening: int = 0  # tokens of the first prompt; 0: as later ones
    response: int = 1
    environment_s: float = 4.0  # mean; uniform from half to one and a half
    domain: str = "default"


class Players(Actor):
    """Plays trajectories, and notes what is answered to which request."""

    def __init__(self, proxy: Ref, seed: int) -> None:
        self._proxy = proxy
        self._chance = random.Random(seed)
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []
        self.wrong: list[str] = []
        self.engines: dict[str, list[tuple[float, str]]] = {}  # trajectory -> when which engine answered a turn
        self.ended = 0

    @handler
    async def finished(self, message: Finished) -> None:
        for completion in message.completions:
            self.answers[completion.request_id] += 1
            turns = self.engines.setdefault(completion.request_id.partition("/")[0], [])
            turns.append((asyncio.get_running_loop().time(), message.engine))
            future = self._waiting.pop(completion.request_id, None)
            if future is not None:
                future.set_result(completion)

    @handler
    async def failed(self, message: RequestFailed) -> None:
        self.failures.append(f"{message.request_id}: {message.reason}")

    def waiting(self) -> set[str]:
        """Requests without an answer."""
        return set(self._waiting)

    def begin(self, name: str, play: Play) -> asyncio.Task[None]:
        return self.node.background(self._play(name, play, self._chance.randrange(2**31)))

    async def _play(self, name: str, play: Play, seed: int) -> None:
        length = play.opening or play.observation
        for turn in range(play.turns):
            completion = await self._turn(f"{name}/{turn}", name, length, play, seed + turn)
            self._check(completion, seed + turn, play.response)
            length += len(completion.tokens) + play.observation
            await asyncio.sleep(self._chance.uniform(0.5, 1.5) * play.environment_s)
        self.node.tell(self._proxy, TrajectoryEnded(name))
        self.ended += 1

    async def _turn(self, id_: str, trajectory: str, length: int, play: Play, seed: int) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[id_] = future
        request = GenerateRequest(id_, trajectory, np.zeros(length, np.int32), play.response, seed=seed)
        await self.node.ask(self._proxy, Add(request, self.ref, play.domain), Accepted, timeout_s=30.0, retries=5)
        return await future

    def _check(self, completion: Completion, seed: int, count: int) -> None:
        expected = [token_at(seed, place) for place in range(count)]
        versions = completion.versions.tolist()
        if completion.tokens.tolist() != expected or versions != sorted(versions) or len(versions) != count:
            self.wrong.append(f"{completion.request_id}: {completion.tokens} of versions {versions}, not {expected}")


class Fleet:
    """Nodes in place of processes."""

    def __init__(self) -> None:
        self.watched: list[str] = []
        self.killed: list[tuple[float, str, str]] = []  # when, which engine, why

    async def start(self) -> None:
        """The test starts engines."""

    def ready(self, name: str, address: NodeAddress) -> None:
        self.watched.append(name)

    def judge(self, name: str, effort: Effort, requests: int) -> bool:
        why = Patience().verdict(effort, requests)
        if why:
            self.killed.append((asyncio.get_running_loop().time(), name, why))
        return bool(why)

    async def retire(self, name: str) -> None:
        """Nothing runs."""

    async def stop(self) -> None:
        """Nothing runs."""


class Town:
    """What a test gets to see."""

    def __init__(
        self,
        network: SimulatedNetwork,
        node: Node,
        proxy: LLMProxy,
        classes: Mapping[str, str],
        tokens_every_s: float | None,
    ) -> None:
        self._tokens_every_s = tokens_every_s
        self.network = network
        self.node = node
        self.proxy = proxy
        self.classes = classes
        self.players: Players
        self.fleet: Fleet
        self.hosts: dict[str, SimulatedHost] = {}
        self.said: list[tuple[float, str]] = []
        self.history: list[tuple[float, dict[str, float | None]]] = []
        self.moves: list[tuple[float, list[str], str]] = []  # by order: when, which trajectories, from where
        self._nodes: dict[str, Node] = {}
        self._note_moves()
        self._transports: dict[str, SimulatedTransport] = {}

    def _note_moves(self) -> None:
        moves = self.proxy._mover._moves
        note = moves.note

        def noted(trajectories: Collection[str], source: str, target: str, emptied: int, now: float) -> None:
            self.moves.append((now, list(trajectories), source))
            note(trajectories, source, target, emptied, now)

        moves.note = noted  # type: ignore[method-assign]

    async def serve(self, name: str, version: int = 0) -> SimulatedHost:
        """An engine comes up and gets weights."""
        life = sum(known.partition("#")[0] == name for known in self._nodes)
        key = f"{name}#{life}"
        transport = self._transports[key] = self.network.join(key)
        node = self._nodes[key] = Node(key, transport=transport)
        await node.__aenter__()
        cost = device_cost(self.classes[name], ModelSize())
        limits = EngineLimits(PLACES, 1 << 20)
        host = SimulatedHost(
            name,
            self.proxy.ref,
            cost,
            limits=limits,
            tokens_every_s=self._tokens_every_s,
            cache_tokens=CACHE_TOKENS,
        )
        ref = await node.spawn(lambda: host, "engine", restarts=0)
        self.hosts[name] = host
        await node.ask(self.proxy.ref, EngineReady(name, ref, limits, 0.1), Acknowledged, timeout_s=30.0, retries=5)
        await self.swap(name, version, suspend=False)
        return host

    async def swap(self, name: str, version: int, *, suspend: bool = True) -> None:
        orders: list[Suspend | Update | Resume] = [Suspend(name)] if suspend else []
        for order in (*orders, Update(name, version), Resume(name, version)):
            progress: Any = Progress
            async for _ in self.node.stream(self.proxy.ref, order, progress, timeout_s=30.0):
                continue

    async def kill(self, name: str, *, restarting: bool = True) -> None:
        """Its process ends; the fleet notices."""
        key = [known for known in self._nodes if known.partition("#")[0] == name][-1]
        self._transports[key].crash()
        self.proxy.engine_died(name, "process ended", restarting=restarting)
        await self._nodes[key].close()

    def watch(self) -> asyncio.Task[None]:
        loop = asyncio.get_running_loop()
        told = self.said
        engines = Engines(self.node, lambda: [self.proxy.ref])
        watch = HotWatch(self.node, engines, apart=False, say=lambda text: told.append((loop.time(), text)))
        return self.node.background(watch.run())

    async def go_on(self, seconds: int) -> None:
        """And note every second how busy each engine says it is."""
        loop = asyncio.get_running_loop()
        for _ in range(seconds):
            await asyncio.sleep(1.0)
            loads = {e.name: None if e.load is None else e.load.load for e in (await self.describe()).engines}
            self.history.append((loop.time(), loads))

    async def describe(self) -> ProxyState:
        return await self.node.ask(self.proxy.ref, DescribeProxy(), ProxyState, timeout_s=30.0)

    def told(self, name: str, at: float) -> bool:
        """Whether it had said anything of its load in the ten seconds before."""
        return any(each[name] is not None for when, each in self.history if at - 9.5 <= when <= at)

    def mean(self, name: str, start: float, end: float) -> float:
        """Of an engine's load in that time."""
        loads = [each[name] for at, each in self.history if start <= at < end]
        known = [load for load in loads if load is not None]
        return sum(known) / len(known)

    async def close(self) -> None:
        for node in self._nodes.values():
            await node.close()


@asynccontextmanager
async def town(
    classes: Mapping[str, str], *, seed: int = 0, link: Link | None = None, tokens_every_s: float | None = None
) -> AsyncIterator[Town]:
    """``classes``: engines with their hardware classes; none is up yet."""
    network = SimulatedNetwork(seed=seed, link=link or Link(latency_s=0.001))
    control, env = network.join("control"), network.join("env")
    async with Node("control", transport=control) as node, Node("env", transport=env) as elsewhere:
        failures: list[BaseException] = []
        proxy = LLMProxy(dict(classes), {}, failed=failures.append)
        proxy.fleet = fleet = Fleet()
        await node.spawn(lambda: proxy, "proxy", restarts=0)
        made = Town(network, node, proxy, classes, tokens_every_s)
        made.fleet = fleet
        made.players = Players(proxy.ref, seed)
        await elsewhere.spawn(lambda: made.players, "players", restarts=0)
        try:
            yield made
            assert failures == []
        finally:
            await made.close()
