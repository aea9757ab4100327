"""A running request is moved between two real engines, through the real proxy and the real hosts, by an order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.core import Actor, Node, Ref, handler
from actors.proxy.engines.host import EngineHost
from actors.proxy.engines.protocol import Completion, GenerateRequest
from actors.proxy.engines.torch_engine import TorchEngine
from actors.proxy.messages import (
    Accepted,
    Acknowledged,
    Add,
    DescribeProxy,
    EngineReady,
    Finished,
    MoveTrajectories,
    Moving,
    Progress,
    ProxyState,
    Resume,
)
from actors.proxy.proxy import LLMProxy
from actors.telemetry import Spans
from tests.engines.reference import MAX_MODEL_LEN, Reference, prompt, write_tiny_policy
from tests.proxy.support import ScriptedFleet
from tests.support.loops import run, until

BEFORE = 13
"""Tokens that the first engine samples."""
TOKENS = 60
HOLD_S = 15.0


class PacedEngine(TorchEngine):
    """Holds up its last step before the move until it is let go on."""

    def __init__(self, policy_dir: Path) -> None:
        super().__init__(policy_dir, max_sequences=4, max_model_len=MAX_MODEL_LEN)
        self._left = BEFORE
        self.waits = threading.Event()
        self.go_on = threading.Event()

    def step(self) -> Sequence[Completion]:
        self._left -= 1
        if not self._left:
            self.waits.set()
            self.go_on.wait(HOLD_S)
        return super().step()


class Asker(Actor):
    def __init__(self) -> None:
        self.answers: list[tuple[str, Completion]] = []

    @handler
    async def take(self, message: Finished) -> None:
        self.answers += [(message.engine, completion) for completion in message.completions]


class Rig:
    """The proxy on one node, each engine on another."""

    def __init__(self, node: Node, reference: Reference) -> None:
        self._node = node
        self._reference = reference
        self.failures: list[BaseException] = []
        self.proxy = LLMProxy({"e0": "CPU", "e1": "CPU"}, {}, failed=self.failures.append)
        self.proxy.fleet = ScriptedFleet()
        self.asker = Asker()

    async def host(self, where: Node, name: str, engine: TorchEngine, version: int) -> None:
        """An engine is up, with weights, and does not serve yet."""
        host = EngineHost(name, engine, self.proxy.ref, Spans(name), self.failures.append)
        ref = await where.spawn(lambda: host, "engine", restarts=0)
        await host._thread.call(lambda: host._thread.load(version, lambda: self._reference.weights(version)))
        ready = EngineReady(name, ref, engine.limits, 0.1)
        await self._node.ask(self.proxy.ref, ready, Acknowledged, timeout_s=5)

    async def serve(self, name: str, version: int) -> None:
        progress: Any = Progress
        async for _ in self._node.stream(self.proxy.ref, Resume(name, version), progress, timeout_s=5):
            continue

    async def ask(self, message: Any, reply: type[Any]) -> Any:
        return await self._node.ask(self.proxy.ref, message, reply, timeout_s=5)


async def moved(
    policy_dir: Path, reference: Reference, request: GenerateRequest, versions: tuple[int, int]
) -> tuple[Completion, ProxyState]:
    """The completion of a request that an order moves while it runs, and what the proxy has counted."""
    paced = PacedEngine(policy_dir)
    other = TorchEngine(policy_dir, max_sequences=4, max_model_len=MAX_MODEL_LEN)
    async with Node("control") as node, Node("engine-0") as first, Node("engine-1") as second:
        rig = Rig(node, reference)
        await node.spawn(lambda: rig.proxy, "proxy", restarts=0)
        asker: Ref = await node.spawn(lambda: rig.asker, "asker", restarts=0)
        await rig.host(first, "e0", paced, versions[0])
        await rig.host(second, "e1", other, versions[1])
        await rig.serve("e0", versions[0])
        assert await rig.ask(Add(request, asker), Accepted) == Accepted("e0")
        await until(paced.waits.is_set)
        await rig.serve("e1", versions[1])
        assert await rig.ask(MoveTrajectories("e0", "e1", 1, "too busy"), Moving) == Moving(asked=1)
        host = first._cells["engine"].actor
        assert isinstance(host, EngineHost)
        await until(lambda: host._thread._orders)  # the engine is asked while its step runs
        paced.go_on.set()
        await until(lambda: rig.asker.answers)
        await until(lambda: not rig.proxy._where)
        ((engine, completion),) = rig.asker.answers
        assert engine == "e1"
        assert (rig.failures, paced.unfinished(), other.unfinished()) == ([], 0, 0)
        state: ProxyState = await rig.ask(DescribeProxy(), ProxyState)
        return completion, state


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    policy_dir = write_tiny_policy(tmp_path_factory.mktemp("policy"), tied=True)
    return policy_dir, Reference(policy_dir)


def test_a_request_that_is_moved_while_it_runs_is_the_greedy_continuation_unmoved(
    policy: tuple[Path, Reference],
) -> None:
    policy_dir, reference = policy
    request = GenerateRequest("t/0", "t", prompt(9, 1), TOKENS, temperature=0.0)
    completion, state = run(moved(policy_dir, reference, request, (0, 0)))
    assert completion.tokens.tolist() == reference.greedy(0, request.prompt, TOKENS)
    assert completion.versions.tolist() == [0] * TOKENS
    np.testing.assert_allclose(completion.logprobs, reference.behaviour(request, completion), rtol=0, atol=1e-4)
    assert state.counters == {"moves_ordered": 1, "moved_running": 1, "moved_tokens": BEFORE}
    assert state.tokens == TOKENS, "each is counted once, by the engine that sampled it"


def test_each_token_keeps_its_version_when_the_other_engine_is_a_version_ahead(policy: tuple[Path, Reference]) -> None:
    policy_dir, reference = policy
    request = GenerateRequest("t/0", "t", prompt(9, 1), TOKENS, seed=5)
    completion, _ = run(moved(policy_dir, reference, request, (1, 2)))
    assert completion.versions.tolist() == [1] * BEFORE + [2] * (TOKENS - BEFORE)
    np.testing.assert_allclose(completion.logprobs, reference.behaviour(request, completion), rtol=0, atol=1e-4)
