"""How versions come to an engine through its host, and what an engine that fails does to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from actors.proxy.engines.host import EngineHost, StagingOvertaken
from actors.proxy.engines.thread import NotServable
from actors.proxy.messages import (
    HostAbort,
    HostForget,
    HostResume,
    HostScore,
    HostSuspend,
    HostUpdate,
    Scored,
    Stage,
    Staged,
)
from actors.weightsync.manifest import Receipt
from tests.proxy.hosted import World, manifest, world
from tests.proxy.scripted_engine import ScriptedEngine
from tests.support.loops import run, settle, until


@asynccontextmanager
async def serving() -> AsyncIterator[World]:
    """A host whose engine serves version 0."""
    async with world() as made:
        await made.begin()
        yield made


async def begin_a_step(made: World, tokens: int = 1) -> None:
    """The engine is in the first step of request "a", until its gate is opened."""
    made.engine.gate.clear()
    made.add("a", tokens=tokens)
    await until(made.engine.in_step.is_set)


async def suspended_in_a_step(made: World) -> asyncio.Task[Any]:
    """What waits for the answer to a suspend that came in the middle of a step of three."""
    await begin_a_step(made, tokens=3)
    suspending = asyncio.create_task(made.ask(HostSuspend()))
    await settle()
    return suspending


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
        async with serving() as made:
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
        async with serving() as made:
            made.add("early", from_version=2)
            await made.ask(HostSuspend())
            await made.load(3)
            await made.ask(HostResume())
            await until(lambda: made.peer.served == ["early"])

    run(test())


def test_a_request_that_waits_for_its_version_can_be_aborted() -> None:
    async def test() -> None:
        async with serving() as made:
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
        async with serving() as made:
            made.add("long", prompt=17, from_version=1)
            await made.ask(HostSuspend())
            await made.load(1)
            await until(lambda: bool(made.peer.failed))
            assert made.peer.failed == [("long", "refused by engine e0: a prompt of 17 tokens, at most 16 fit")]

    run(test())


def test_suspend_is_answered_once_the_step_under_way_has_ended_and_then_none_is_made() -> None:
    async def test() -> None:
        async with serving() as made:
            suspending = await suspended_in_a_step(made)
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
        async with serving() as made:
            suspending = await suspended_in_a_step(made)
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
        async with serving() as made:
            with pytest.raises(NotServable, match="version 1 is for a suspended engine"):
                await made.load(1)
            assert made.engine.version == 0

    run(test())


def test_after_a_load_that_failed_the_engine_serves_nothing_until_one_succeeds() -> None:
    async def test() -> None:
        async with serving() as made:
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
        async with serving() as made:
            made.engine.fails = call
            made.add("a", tokens=1_000_000)
            made.node.tell(made.host, HostAbort("b"))
            made.node.tell(made.host, HostForget(["c"]))
            await until(lambda: made.failures)
            assert [str(error) for error in made.failures] == [f"{call}: device lost"]

    run(test())


def test_a_question_that_fails_is_the_askers_error_alone() -> None:
    async def test() -> None:
        async with serving() as made:
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
        async with serving() as made:
            await begin_a_step(made)
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
        async with serving() as made:
            return made.engine

    assert run(test()).closed
