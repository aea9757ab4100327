"""An engine's host over a scripted engine, and a peer that is its asker, its proxy and its publisher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import numpy as np

from actors.core import Actor, Node, Ref, handler
from actors.proxy.engines.host import LOAD_EVERY_S, TOKENS_EVERY_S, EngineHost, Gpus
from actors.proxy.engines.load import EngineLoad
from actors.proxy.engines.progress import Effort
from actors.proxy.engines.protocol import Completion, GenerateRequest
from actors.proxy.kept import unpack
from actors.proxy.messages import (
    Acknowledged,
    Finished,
    HostAdd,
    HostResume,
    HostUpdate,
    RequestFailed,
    SampledSoFar,
    Served,
    Stage,
    Staged,
)
from actors.telemetry import Spans
from actors.weightsync.manifest import Manifest, Receipt, TensorFact
from actors.weightsync.messages import Block, Blocks, Fetch
from bus.message import PeerLost
from tests.proxy.scripted_engine import ScriptedEngine


def manifest(version: int) -> Manifest:
    facts = {"w": TensorFact("float32", (2,), "digest of w")}
    return Manifest(version, "float32", facts, np.zeros(4, np.int32), np.zeros(3, np.float32))


class Peer(Actor):
    """Whoever asks, the proxy and the publisher in one: notes what it is told."""

    def __init__(self) -> None:
        self.finished: list[Completion] = []
        self.messages = 0
        self.failed: list[tuple[str, str]] = []
        self.served: list[str] = []
        self.sampled: list[int] = []
        self.tokens = 0
        self.loads: list[EngineLoad] = []
        self.efforts: list[Effort] = []
        self.gates: dict[int, asyncio.Event] = {}  # version -> may be sent
        self.told: dict[str, list[int]] = {}  # request -> its tokens, as far as was told
        self.refuses_reports = 0  # how many of the next ones

    @handler
    async def on_finished(self, message: Finished) -> None:
        self.messages += 1
        self.finished += message.completions

    @handler
    async def on_failed(self, message: RequestFailed) -> None:
        self.failed.append((message.request_id, message.reason))

    @handler
    async def on_served(self, message: Served) -> None:
        self.served += message.request_ids
        self.sampled += message.sampled
        self.tokens += message.tokens
        if message.load is not None:
            self.loads.append(message.load)
            self.efforts.append(message.effort)

    @handler
    async def on_tokens(self, message: SampledSoFar) -> Acknowledged:
        if self.refuses_reports:
            self.refuses_reports -= 1
            raise PeerLost("not today")
        for id_, since, part in unpack(message):
            tokens = self.told.setdefault(id_, [])
            assert since == len(tokens)
            tokens += part.tokens.tolist()
        return Acknowledged()

    @handler
    async def fetch(self, message: Fetch) -> AsyncIterator[Blocks]:
        if message.version in self.gates:
            await self.gates[message.version].wait()
        yield Blocks([Block("w", 0, np.zeros(8, np.uint8))])


class World:
    def __init__(self, node: Node, engine: ScriptedEngine, peer: Peer, me: Ref) -> None:
        self.node = node
        self.engine = engine
        self.peer = peer
        self.me = me
        self.failures: list[BaseException] = []
        self.host: Ref = me

    async def ask(self, message: Any, reply: type[Any] = Acknowledged) -> Any:
        return await self.node.ask(self.host, message, reply, timeout_s=10)

    def add(self, id_: str, *, tokens: int = 1, prompt: int = 2, from_version: int = 0) -> None:
        request = GenerateRequest(id_, id_, np.zeros(prompt, np.int32), max_tokens=tokens, from_version=from_version)
        self.node.tell(self.host, HostAdd([request], [self.me]))

    async def load(self, version: int) -> Receipt:
        await self.ask(Stage(manifest(version), self.me), Staged)
        receipt: Receipt = await self.ask(HostUpdate(version), Receipt)
        return receipt

    async def begin(self) -> None:
        """Weights of version 0, and serving."""
        await self.load(0)
        await self.ask(HostResume())
        self.engine.log.clear()


@asynccontextmanager
async def world(
    *, gpus: Gpus | None = None, load_every_s: float = LOAD_EVERY_S, tokens_every_s: float = TOKENS_EVERY_S
) -> AsyncIterator[World]:
    """Whatever happens in it, happens because of an order or of work that is there."""
    with mock.patch("actors.proxy.engines.thread.IDLE_WAIT_S", 1_000.0):
        async with Node("n") as node:
            peer = Peer()
            me = await node.spawn(lambda: peer, "peer", restarts=0)
            made = World(node, ScriptedEngine(), peer, me)
            host = EngineHost(
                "e0",
                made.engine,
                me,
                Spans("e0"),
                made.failures.append,
                gpus=gpus,
                load_every_s=load_every_s,
                tokens_every_s=tokens_every_s,
            )
            made.host = await node.spawn(lambda: host, "engine", restarts=0)
            try:
                yield made
            finally:
                made.engine.gate.set()
                made.engine.score_gate.set()
