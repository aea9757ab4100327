"""A proxy on one node, scripted engine hosts each on a node of its own, and somebody who asks for generations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from actors.core import Actor, Node, Ref, handler
from actors.proxy.engines.progress import Effort, Patience
from actors.proxy.engines.protocol import Begun, Completion, EngineLimits, FinishReason, GenerateRequest
from actors.proxy.kept import unpack
from actors.proxy.messages import (
    Abort,
    Accepted,
    Acknowledged,
    Add,
    DescribeProxy,
    Done,
    EngineReady,
    EngineState,
    Finished,
    HostAbort,
    HostAdd,
    HostForget,
    HostRelease,
    HostResume,
    HostSuspend,
    HostUpdate,
    KeptSoFar,
    Progress,
    ProxyState,
    Released,
    RequestFailed,
    Resume,
    Served,
    Stage,
    Staged,
    Suspend,
    Unfinished,
    Update,
)
from actors.proxy.proxy import LLMProxy
from actors.settings import SplitSettings
from actors.weightsync.manifest import Manifest, Receipt
from bus.message import NodeAddress
from tests.support.loops import until

LIMITS = EngineLimits(max_sequences=4, max_model_len=64)
CRASH = "process ended: killed by SIGKILL"


def request(id_: str, trajectory: str = "") -> GenerateRequest:
    return GenerateRequest(id_, trajectory or id_.partition("/")[0], np.array([1, 2], np.int32), max_tokens=8)


def completion(id_: str, reason: FinishReason = "length", token: int = 7) -> Completion:
    count = 0 if reason == "aborted" else 1
    return Completion(
        id_,
        np.full(count, token, np.int32),
        np.full(count, -0.5, np.float32),
        np.zeros(count, np.int32),
        reason,
    )


class ScriptedHost(Actor):
    """An engine's host that answers when the test says so."""

    def __init__(self, name: str, proxy: Ref) -> None:
        self.name = name
        self.proxy = proxy
        self.held: dict[str, Ref] = {}
        self.log: list[str] = []
        self.batches: list[int] = []  # requests of each message
        self.fails_update: list[str] = []  # one entry, one failure
        self.fails_stage: list[str] = []
        self.stages_at_once = asyncio.Event()  # closed: a version does not arrive
        self.stages_at_once.set()
        self.suspends_at_once = asyncio.Event()
        self.suspends_at_once.set()
        self.manifest: Manifest | None = None
        self.requests: dict[str, GenerateRequest] = {}  # as they came last
        self.prefill_at: dict[str, Ref | None] = {}  # likewise, whose engine is to compute the prompt
        self.sampled: dict[str, Begun] = {}  # of those that it holds; nothing of the others
        self.releases_at_once = asyncio.Event()
        self.releases_at_once.set()
        self.answers_releases = True
        self.wrong_receipts = 0  # how many of the next ones are for a tensor that differs

    @handler
    async def add(self, message: HostAdd) -> None:
        self.batches.append(len(message.requests))
        for one, reply_to in zip(message.requests, message.reply_to, strict=True):
            self.log.append(f"add {one.request_id}")
            self.held[one.request_id] = reply_to
            self.requests[one.request_id] = one
        places = message.prefill_at or [None] * len(message.requests)
        self.prefill_at |= {one.request_id: at for one, at in zip(message.requests, places, strict=True)}
        self.log += [f"forget {trajectory}" for trajectory in message.ended]

    @handler
    async def abort(self, message: HostAbort) -> None:
        self.log.append(f"abort {message.request_id}")
        if message.request_id in self.held:
            self.answer(message.request_id, "aborted")

    @handler(concurrent=True)
    async def release(self, message: HostRelease) -> Released:
        await self.releases_at_once.wait()
        here = [id_ for id_ in message.request_ids if self.held.pop(id_, None) is not None]
        self.log += [f"release {id_}" for id_ in here]
        if not self.answers_releases:
            await asyncio.Event().wait()
        return Released([Unfinished(id_, self.sampled.get(id_)) for id_ in here])

    @handler
    async def forget(self, message: HostForget) -> None:
        self.log += [f"forget {trajectory}" for trajectory in message.trajectories]

    @handler
    async def suspend(self, message: HostSuspend) -> Acknowledged:
        self.log.append("suspend")
        await self.suspends_at_once.wait()
        return Acknowledged()

    @handler(concurrent=True)
    async def stage(self, message: Stage) -> Staged:
        self.log.append(f"stage {message.manifest.version}")
        await self.stages_at_once.wait()
        if self.fails_stage:
            raise RuntimeError(self.fails_stage.pop())
        self.manifest = message.manifest
        return Staged(message.manifest.version, 0, 0.0)

    @handler
    async def update(self, message: HostUpdate) -> Receipt:
        self.log.append(f"update {message.version}")
        if self.fails_update:
            raise RuntimeError(self.fails_update.pop())
        digests = {} if self.manifest is None else {n: fact.digest for n, fact in self.manifest.tensors.items()}
        if self.wrong_receipts:
            self.wrong_receipts -= 1
            digests = dict.fromkeys(digests, "stale")
        canary = np.zeros(1, np.float32) if self.manifest is None else self.manifest.canary_logprobs
        return Receipt(message.version, self.name, digests, canary)

    @handler
    async def resume(self, message: HostResume) -> Acknowledged:
        self.log.append("resume")
        return Acknowledged()

    def answer(self, id_: str, reason: FinishReason = "length") -> None:
        self.node.tell(self.held.pop(id_), Finished(self.name, [completion(id_, reason)]))
        self.node.tell(self.proxy, Served(self.name, [id_], 0 if reason == "aborted" else 1))


class Asker(Actor):
    """Notes every answer, in order."""

    def __init__(self) -> None:
        self.finished: list[tuple[str, str]] = []  # request, engine
        self.aborted: list[str] = []
        self.tokens: dict[str, list[int]] = {}  # of the last answer to a request
        self.reasons: dict[str, FinishReason] = {}
        self.failed: list[tuple[str, str]] = []  # request, reason
        self.kept: dict[str, list[tuple[int, list[int]]]] = {}  # what it was told of requests that go on

    @handler
    async def take(self, message: Finished) -> None:
        for one in message.completions:
            self.tokens[one.request_id] = one.tokens.tolist()
            self.reasons[one.request_id] = one.finish_reason
            if one.finish_reason == "aborted":
                self.aborted.append(one.request_id)
            else:
                self.finished.append((one.request_id, message.engine))

    @handler
    async def keep(self, message: KeptSoFar) -> None:
        for id_, since, part in unpack(message.report):
            self.kept.setdefault(id_, []).append((since, part.tokens.tolist()))

    @handler
    async def fail(self, message: RequestFailed) -> None:
        self.failed.append((message.request_id, message.reason))


class ScriptedFleet:
    """Stands for the engine processes."""

    def __init__(self) -> None:
        self.retired: list[str] = []
        self.judged: list[tuple[str, Effort, int]] = []
        self.watched: list[str] = []

    async def start(self) -> None:
        """The test starts engines."""

    def ready(self, name: str, address: NodeAddress) -> None:
        self.watched.append(name)

    def judge(self, name: str, effort: Effort, requests: int) -> bool:
        self.judged.append((name, effort, requests))
        return Patience().verdict(effort, requests) != ""

    async def retire(self, name: str) -> None:
        self.retired.append(name)

    async def stop(self) -> None:
        """Nothing runs."""


class World:
    """What a test gets to see."""

    def __init__(self, node: Node, proxy: LLMProxy, fleet: ScriptedFleet, failures: list[BaseException]) -> None:
        self.node = node
        self.proxy = proxy
        self.fleet = fleet
        self.failures = failures
        self.asker = Asker()
        self.hosts: dict[str, ScriptedHost] = {}
        self.nodes: list[Node] = []

    async def start(self, name: str) -> ScriptedHost:
        """An engine comes up (again), cold."""
        node = Node(name)
        self.nodes.append(node)
        host = self.hosts[name] = ScriptedHost(name, self.proxy.ref)
        ref = await node.spawn(lambda: host, "engine")
        ready = EngineReady(name, ref, LIMITS, 0.1)
        await node.ask(self.proxy.ref, ready, Acknowledged, timeout_s=5)
        return host

    async def serve(self, name: str, version: int = 0) -> ScriptedHost:
        """An engine comes up and gets weights."""
        host = await self.start(name)
        await self.command(Update(name, version))
        await self.command(Resume(name, version))
        host.log.clear()
        return host

    async def add(self, id_: str, trajectory: str = "", domain: str = "default") -> str:
        message = Add(request(id_, trajectory), self.asker.ref, domain)
        return (await self.node.ask(self.proxy.ref, message, Accepted, timeout_s=5)).engine

    async def command(self, message: Suspend | Update | Resume) -> Done:
        answers = await self.answers(message)
        assert [type(answer) for answer in answers] == [Accepted, Done]
        done = answers[-1]
        assert isinstance(done, Done)
        return done

    async def answers(self, message: Suspend | Update | Resume) -> list[Accepted | Done]:
        progress: Any = Progress
        return [answer async for answer in self.node.stream(self.proxy.ref, message, progress, timeout_s=5)]

    async def describe(self) -> ProxyState:
        return await self.node.ask(self.proxy.ref, DescribeProxy(), ProxyState, timeout_s=5)

    async def engine(self, name: str) -> EngineState:
        return next(engine for engine in (await self.describe()).engines if engine.name == name)


@asynccontextmanager
async def world(
    engines: Mapping[str, str] | list[str],
    affinity: Mapping[str, str] | None = None,
    *,
    split: SplitSettings | None = None,
) -> AsyncIterator[World]:
    """``engines``: names, with their hardware classes where they matter."""
    classes = dict(engines) if isinstance(engines, Mapping) else dict.fromkeys(engines, "CPU")
    async with Node("control") as node:
        failures: list[BaseException] = []
        fleet = ScriptedFleet()
        proxy = LLMProxy(classes, dict(affinity or {}), failed=failures.append, split=split)
        proxy.fleet = fleet
        await node.spawn(lambda: proxy, "proxy", restarts=0)
        made = World(node, proxy, fleet, failures)
        await node.spawn(lambda: made.asker, "asker", restarts=0)
        try:
            yield made
        finally:
            for one in made.nodes:
                await one.close()


def die(made: World, name: str, *, restarting: bool) -> None:
    made.proxy.engine_died(name, CRASH, restarting=restarting)


async def abort(made: World, id_: str) -> None:
    await made.node.ask(made.proxy.ref, Abort(id_), Acknowledged, timeout_s=5)


async def played(made: World, trajectory: str, turn: int = 0) -> str:
    """One turn of a trajectory is answered; returns by which engine, which holds its prefix from now on."""
    id_ = f"{trajectory}/{turn}"
    engine = await made.add(id_, trajectory)
    await until(lambda: id_ in made.hosts[engine].held)
    made.hosts[engine].answer(id_)
    await until(lambda: id_ not in made.proxy._engines[engine].in_flight)
    return engine
