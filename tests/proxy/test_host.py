"""The engine's host and its thread over a scripted engine: orders take effect between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from actors.core import Actor, Node, Ref, handler
from actors.proxy.engines.host import LOAD_EVERY_S, EngineHost, Gpus, NotServable, StagingOvertaken
from actors.proxy.engines.load import EngineLoad
from actors.proxy.engines.protocol import Begun, Completion, GenerateRequest
from actors.proxy.messages import (
    Acknowledged,
    Finished,
    HostAbort,
    HostAdd,
    HostForget,
    HostRelease,
    HostResume,
    HostScore,
    HostSuspend,
    HostUpdate,
    Released,
    RequestFailed,
    Scored,
    Served,
    Stage,
    Staged,
)
from actors.telemetry import Spans
from actors.weightsync.manifest import Manifest, Receipt, TensorFact
from actors.weightsync.messages import Block, Blocks, Fetch
from hwprobe.telemetry import GpuFigures
from tests.proxy.scripted_engine import ScriptedEngine
from tests.support.loops import run, settle, until


@pytest.fixture(autouse=True)
def _no_idle_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens, happens because of an order or of work that is there."""
    monkeypatch.setattr("actors.proxy.engines.host.IDLE_WAIT_S", 1_000.0)


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
        self.tokens = 0
        self.loads: list[EngineLoad] = []
        self.gates: dict[int, asyncio.Event] = {}  # version -> may be sent

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
        self.tokens += message.tokens
        if message.load is not None:
            self.loads.append(message.load)

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
async def world(*, gpus: Gpus | None = None, load_every_s: float = LOAD_EVERY_S) -> AsyncIterator[World]:
    async with Node("n") as node:
        peer = Peer()
        me = await node.spawn(lambda: peer, "peer", restarts=0)
        made = World(node, ScriptedEngine(), peer, me)
        host = EngineHost(
            "e0", made.engine, me, Spans("e0"), made.failures.append, gpus=gpus, load_every_s=load_every_s
        )
        made.host = await node.spawn(lambda: host, "engine", restarts=0)
        try:
            yield made
        finally:
            made.engine.gate.set()


# ---- requests ------------------------------------------------------------------------------------------------------


def test_completions_go_to_whoever_asked_and_the_proxy_is_told() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.add("a", tokens=3)
            await until(lambda: made.peer.served)
            (completion,) = made.peer.finished
            assert (completion.request_id, completion.finish_reason) == ("a", "length")
            assert completion.versions.tolist() == [0, 0, 0]
            assert (made.peer.served, made.peer.tokens) == (["a"], 3)

    run(test())


def test_what_one_step_finishes_for_one_asker_is_one_message() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.engine.gate.clear()
            made.add("a", tokens=2)
            await until(made.engine.in_step.is_set)
            made.add("b", tokens=1)
            await settle()
            made.engine.gate.set()
            await until(lambda: len(made.peer.finished) == 2)
            assert made.peer.messages == 1

    run(test())


def test_a_request_that_can_never_run_is_answered_with_the_reason() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.add("long", prompt=17)
            made.add("short")
            await until(lambda: made.peer.failed and made.peer.finished)
            assert made.peer.failed == [("long", "refused by engine e0: a prompt of 17 tokens, at most 16 fit")]
            await until(lambda: sorted(made.peer.served) == ["long", "short"])

    run(test())


def test_an_aborted_request_is_answered_with_the_tokens_that_it_has() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.engine.gate.clear()
            made.add("a", tokens=5)
            await until(made.engine.in_step.is_set)
            made.node.tell(made.host, HostAbort("a"))
            made.node.tell(made.host, HostAbort("unknown"))
            await settle()
            made.engine.gate.set()
            await until(lambda: made.peer.served)
            (completion,) = made.peer.finished
            assert completion.finish_reason == "aborted"
            assert len(completion.tokens) == 1  # it took effect after the step that was running
            made.node.tell(made.host, HostAbort("a"))
            await made.ask(HostSuspend())
            assert made.peer.served == ["a"]  # one answer

    run(test())


def test_orders_are_carried_out_in_the_order_in_which_they_came_between_two_steps() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.engine.gate.clear()
            made.add("a", tokens=2)
            await until(made.engine.in_step.is_set)
            made.add("b")
            made.node.tell(made.host, HostAbort("b"))
            made.node.tell(made.host, HostForget(["x"]))
            scored = asyncio.create_task(made.ask(HostScore(np.zeros(3, np.int32)), Scored))
            await settle()
            made.engine.gate.set()
            assert (await scored).logprobs.tolist() == [0, 0]
            await until(lambda: len(made.peer.served) == 2)
            assert made.engine.log == ["add a", "step", "add b", "abort b", "forget x", "score", "step"]
            assert made.engine.threads == {"engine"}

    run(test())


def test_trajectories_that_ended_are_forgotten_after_the_requests_that_brought_the_news() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.engine.gate.clear()
            made.add("a", tokens=2)
            await until(made.engine.in_step.is_set)
            request = GenerateRequest("b", "b", np.zeros(2, np.int32), max_tokens=1)
            made.node.tell(made.host, HostAdd([request], [made.me], ["x", "y"]))
            await settle()
            made.engine.gate.set()
            await until(lambda: len(made.peer.served) == 2)
            assert made.engine.log == ["add a", "step", "add b", "forget x", "forget y", "step"]

    run(test())


# ---- requests that leave -------------------------------------------------------------------------------------------


def test_what_is_let_go_is_given_back_with_its_tokens_between_two_steps_and_answered_to_nobody() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.engine.gate.clear()
            made.add("a", tokens=5)
            await until(made.engine.in_step.is_set)
            made.add("b", tokens=5)
            releasing = asyncio.create_task(made.ask(HostRelease(["a", "b", "unknown"]), Released))
            await settle()
            assert not releasing.done()
            made.engine.gate.set()
            running, waiting = (await releasing).requests
            assert (running.request_id, running.begun.tokens.tolist(), running.begun.versions.tolist()) == (
                "a",
                [0],
                [0],
            )
            assert (waiting.request_id, waiting.begun) == ("b", None)
            await until(lambda: made.peer.tokens == 1)  # what it sampled counts, though it answered nothing
            assert (made.peer.finished, made.peer.served) == ([], [])
            made.node.tell(made.host, HostAbort("a"))
            await made.ask(HostSuspend())
            assert made.peer.finished == []

    run(test())


def test_what_was_answered_before_it_could_be_let_go_is_missing_in_the_answer() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.engine.gate.clear()
            made.add("a", tokens=1)
            await until(made.engine.in_step.is_set)
            releasing = asyncio.create_task(made.ask(HostRelease(["a"]), Released))
            await settle()
            made.engine.gate.set()
            assert (await releasing).requests == []
            await until(lambda: made.peer.served == ["a"])
            assert len(made.peer.finished) == 1

    run(test())


def test_a_request_whose_version_is_yet_to_come_can_be_let_go() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            request = GenerateRequest("a", "a", np.zeros(2, np.int32), max_tokens=1, from_version=5)
            made.node.tell(made.host, HostAdd([request], [made.me]))
            (early,) = (await made.ask(HostRelease(["a"]), Released)).requests
            assert (early.request_id, early.begun) == ("a", None)
            await made.ask(HostSuspend())
            await made.load(5)
            assert not [line for line in made.engine.log if "add" in line or "abort" in line]

    run(test())


def test_tokens_that_a_request_brings_are_not_counted_again() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            begun = Begun(np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32))
            request = GenerateRequest("a", "a", np.zeros(2, np.int32), max_tokens=5, begun=begun)
            made.node.tell(made.host, HostAdd([request], [made.me]))
            await until(lambda: made.peer.served == ["a"])
            assert made.peer.tokens == 5 - 2  # the scripted engine samples all five

    run(test())


# ---- load ----------------------------------------------------------------------------------------------------------


class ScriptedGpus:
    def __init__(self) -> None:
        self.stopped = False

    def take(self) -> GpuFigures:
        return GpuFigures(
            state="measuring", samples=1, utilisation=0.7, memory_used=1, memory_total=2, devices=("GPU-1",), errors={}
        )

    def stop(self) -> None:
        self.stopped = True


def test_the_proxy_hears_how_loaded_the_engine_is_while_a_step_runs_and_while_none_does() -> None:
    async def test() -> None:
        gpus = ScriptedGpus()
        async with world(gpus=gpus, load_every_s=0.02) as made:
            await made.begin()
            await until(lambda: made.peer.loads and made.peer.loads[-1].occupancy == 0.0)
            made.engine.gate.clear()
            for name in ("a", "b"):
                made.add(name, tokens=3)
            await until(made.engine.in_step.is_set)
            told = len(made.peer.loads)
            await until(lambda: len(made.peer.loads) >= told + 3)
            load = made.peer.loads[-1]  # of 8 places; the second request may still wait for the step to end
            assert load.occupancy in (1 / 8, 2 / 8)
            assert (load.busy, load.figure, load.load) == (1.0, "gpu_utilisation", 0.7)
            made.engine.gate.set()
            await until(lambda: len(made.peer.served) == 2)
            await until(lambda: made.peer.loads[-1].occupancy == 0.0)
        assert gpus.stopped

    run(test())


# ---- suspend, update, resume ---------------------------------------------------------------------------------------


def test_no_step_is_made_without_weights() -> None:
    async def test() -> None:
        async with world() as made:
            made.add("a")
            with pytest.raises(NotServable, match="no weights"):
                await made.ask(HostResume())
            assert made.engine.log == []
            await made.load(0)
            assert made.engine.log == ["load 0", "add a", "score"]  # weights, but nobody has said to serve
            await made.ask(HostResume())
            await until(lambda: made.peer.served == ["a"])

    run(test())


def test_a_request_for_a_later_version_joins_the_engine_with_it() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.add("early", from_version=2)
            made.add("now")
            await until(lambda: made.peer.served == ["now"])
            for version in (1, 2):
                await made.ask(HostSuspend())
                await made.load(version)
                await made.ask(HostResume())
            await until(lambda: made.peer.served == ["now", "early"])
            assert [completion.versions.tolist() for completion in made.peer.finished] == [[0], [2]]
            assert made.engine.log == ["add now", "step", "load 1", "score", "load 2", "add early", "score", "step"]

    run(test())


def test_a_newer_version_than_the_one_that_a_request_is_for_will_do() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.add("early", from_version=2)
            await made.ask(HostSuspend())
            await made.load(3)
            await made.ask(HostResume())
            await until(lambda: made.peer.served == ["early"])

    run(test())


def test_a_request_that_waits_for_its_version_can_be_aborted() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.add("early", from_version=1)
            made.node.tell(made.host, HostAbort("early"))
            await until(lambda: made.peer.served == ["early"])
            (completion,) = made.peer.finished
            assert (completion.finish_reason, len(completion.tokens)) == ("aborted", 0)
            await made.ask(HostSuspend())
            await made.load(1)
            assert "add early" not in made.engine.log

    run(test())


def test_a_request_that_its_engine_refuses_when_its_version_comes_is_answered_with_the_reason() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.add("long", prompt=17, from_version=1)
            await made.ask(HostSuspend())
            await made.load(1)
            await until(lambda: bool(made.peer.failed))
            assert made.peer.failed == [("long", "refused by engine e0: a prompt of 17 tokens, at most 16 fit")]

    run(test())


def test_suspend_is_answered_once_the_step_under_way_has_ended_and_then_none_is_made() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.engine.gate.clear()
            made.add("a", tokens=3)
            await until(made.engine.in_step.is_set)
            suspending = asyncio.create_task(made.ask(HostSuspend()))
            await settle()
            assert not suspending.done()
            made.engine.gate.set()
            await suspending
            assert not made.engine.in_step.is_set()
            steps = made.engine.log.count("step")
            made.add("b")
            await made.ask(HostScore(np.zeros(2, np.int32)), Scored)  # it has taken its orders once more
            assert made.engine.log.count("step") == steps
            await made.ask(HostResume())
            await until(lambda: sorted(made.peer.served) == ["a", "b"])

    run(test())


def test_an_update_in_the_middle_of_a_request_keeps_its_tokens_and_marks_the_new_ones() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.engine.gate.clear()
            made.add("a", tokens=3)
            await until(made.engine.in_step.is_set)
            suspending = asyncio.create_task(made.ask(HostSuspend()))
            await settle()
            made.engine.gate.set()
            await suspending
            receipt = await made.load(1)
            assert (receipt.version, receipt.engine, receipt.digests) == (1, "e0", {"w": "digest of w"})
            assert receipt.canary_logprobs.tolist() == [-1, -1, -1]
            await made.ask(HostResume())
            await until(lambda: made.peer.served)
            assert made.peer.finished[0].versions.tolist() == [0, 1, 1]

    run(test())


def test_a_serving_engine_is_not_given_weights() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            with pytest.raises(NotServable, match="version 1 is for a suspended engine"):
                await made.load(1)
            assert made.engine.version == 0

    run(test())


def test_after_a_load_that_failed_the_engine_serves_nothing_until_one_succeeds() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            await made.ask(HostSuspend())
            made.engine.fails = "load"
            with pytest.raises(RuntimeError, match="load: device lost"):
                await made.load(1)
            with pytest.raises(NotServable, match="no weights"):
                await made.ask(HostResume())
            made.engine.fails = ""
            await made.load(1)
            await made.ask(HostResume())
            assert made.failures == []

    run(test())


def test_only_what_is_staged_can_be_loaded_and_only_once() -> None:
    async def test() -> None:
        async with world() as made:
            with pytest.raises(ValueError, match="version 3 is not staged at engine e0, nothing is"):
                await made.ask(HostUpdate(3), Receipt)
            await made.ask(Stage(manifest(2), made.me), Staged)
            with pytest.raises(ValueError, match="version 3 is not staged at engine e0, version 2 is"):
                await made.ask(HostUpdate(3), Receipt)
            await made.load(2)
            with pytest.raises(ValueError, match="nothing is"):
                await made.ask(HostUpdate(2), Receipt)

    run(test())


def test_staging_that_is_overtaken_says_so_and_the_later_order_counts() -> None:
    async def test() -> None:
        async with world() as made:
            made.peer.gates[1] = asyncio.Event()
            early = asyncio.create_task(made.ask(Stage(manifest(1), made.me), Staged))
            await settle()
            staged: Staged = await made.ask(Stage(manifest(2), made.me), Staged)
            assert (staged.version, staged.bytes) == (2, 8)
            made.peer.gates[1].set()
            with pytest.raises(StagingOvertaken, match="version 1 was overtaken by version 2"):
                await early
            receipt: Receipt = await made.ask(HostUpdate(2), Receipt)
            assert receipt.version == 2

    run(test())


# ---- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["step", "add", "abort", "forget"])
def test_an_engine_that_raises_ends_the_process_with_a_named_error(call: str) -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.engine.fails = call
            made.add("a", tokens=1_000_000)
            made.node.tell(made.host, HostAbort("b"))
            made.node.tell(made.host, HostForget(["c"]))
            await until(lambda: made.failures)
            assert [str(error) for error in made.failures] == [f"{call}: device lost"]

    run(test())


def test_a_question_that_fails_is_the_askers_error_alone() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.engine.fails = "score"
            with pytest.raises(RuntimeError, match="score: device lost"):
                await made.ask(HostScore(np.zeros(2, np.int32)), Scored)
            made.engine.fails = ""
            made.add("a")
            await until(lambda: made.peer.served == ["a"])
            assert made.failures == []

    run(test())


def test_an_asker_that_no_longer_waits_harms_nobody() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.engine.gate.clear()
            made.add("a")
            await until(made.engine.in_step.is_set)
            host = made.node._cells["engine"].actor
            assert isinstance(host, EngineHost)
            question = host._thread.call(lambda: made.engine.score(np.zeros(2, np.int32)))
            question.cancel()
            await asyncio.sleep(0)
            made.engine.gate.set()
            made.add("b")
            await until(lambda: sorted(made.peer.served) == ["a", "b"])
            assert made.failures == []
            assert "score" not in made.engine.log

    run(test())


def test_stopping_closes_the_engine() -> None:
    async def test() -> ScriptedEngine:
        async with world() as made:
            await made.begin()
            return made.engine

    assert run(test()).closed
