"""What an engine's host does with requests, over a scripted engine: orders take effect between two steps."""

from __future__ import annotations

import asyncio

import numpy as np

from actors.proxy.engines.protocol import Begun, GenerateRequest
from actors.proxy.messages import (
    HostAbort,
    HostAdd,
    HostForget,
    HostRelease,
    HostScore,
    HostSuspend,
    Released,
    Scored,
)
from hwprobe.fitting import Work
from hwprobe.telemetry import GpuFigures
from tests.proxy.hosted import world
from tests.support.loops import run, settle, until

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


def test_a_request_that_is_refused_only_by_a_step_is_answered_with_the_reason() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.engine.refuses_late = {"r"}
            made.add("r", tokens=3)
            made.add("other", tokens=2)
            await until(lambda: made.peer.failed and made.peer.finished)
            assert made.peer.failed == [("r", "refused by engine e0: request r: not by this server")]
            await until(lambda: sorted(made.peer.served) == ["other", "r"])
            assert made.failures == []

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
            await settle()  # the order waits for the step to end
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


def test_steps_whose_work_was_never_counted_take_no_time_from_later_ones() -> None:
    """The scripted engine counts nothing, as one that is in the middle of a prompt; then it has nothing left."""

    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.add("a", tokens=3)
            await until(lambda: made.peer.served == ["a"])
            await made.ask(HostSuspend())  # the thread is past that turn
            made.engine.work.prefilled(10)
            made.engine.work.step(0.5)
            assert made.engine.work.take() == Work(busy_s=0.5, prefill_tokens=10)

    run(test())


def test_an_answer_that_was_aborted_is_told_of_as_one_without_a_length() -> None:
    """Its tokens count as sampled; how long answers are they do not say."""

    async def test() -> None:
        async with world() as made:
            await made.begin()
            made.add("a", tokens=2)
            await until(lambda: made.peer.served == ["a"])
            made.engine.gate.clear()
            made.add("b", tokens=5)
            await until(made.engine.in_step.is_set)
            made.node.tell(made.host, HostAbort("b"))
            await settle()  # the order waits for the step to end
            made.engine.gate.set()
            await until(lambda: made.peer.served == ["a", "b"])
            assert made.peer.finished[-1].finish_reason == "aborted"
            assert made.peer.sampled == [2, 0]
            assert made.peer.tokens == 2 + len(made.peer.finished[-1].tokens)

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
