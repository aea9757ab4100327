"""A prompt that another engine computes first, at the hosts of both, over scripted engines."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from actors.core import Actor, Ref, handler
from actors.proxy.engines.protocol import Begun, GenerateRequest
from actors.proxy.messages import Acknowledged, HostAbort, HostAdd, HostPrefill, HostRelease, Released
from bus.message import PeerLost
from tests.proxy.hosted import World, world
from tests.support.loops import run, settle, until


class Prefiller(Actor):
    """The other engine's host: answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []
        self.may_answer = asyncio.Event()
        self.fails = False

    @handler(concurrent=True)
    async def prefill(self, message: HostPrefill) -> Acknowledged:
        self.asked.append(message.request)
        await self.may_answer.wait()
        if self.fails:
            raise PeerLost("its engine is gone")
        return Acknowledged()


async def prefilled(made: World, *, begun: Begun | None = None) -> tuple[Prefiller, Ref]:
    """A request is with the host, whose prompt another one computes."""
    await made.begin()
    prefiller = Prefiller()
    at = await made.node.spawn(lambda: prefiller, "prefiller", restarts=0)
    request = GenerateRequest("a", "a", np.arange(3, dtype=np.int32), 4, stop=("x",), logprobs=2, begun=begun)
    made.node.tell(made.host, HostAdd([request], [made.me], [], [at]))
    await until(lambda: prefiller.asked)
    await settle()
    assert "add a" not in made.engine.log
    return prefiller, at


@pytest.mark.parametrize("fails", [False, True], ids=["computed", "not computed"])
def test_a_request_joins_its_engine_once_its_prompt_is_computed_or_will_not_be(fails: bool) -> None:
    async def test() -> None:
        async with world() as made:
            prefiller, _ = await prefilled(made)
            (asked,) = prefiller.asked
            assert (asked.prompt.tolist(), asked.max_tokens) == ([0, 1, 2], 1)
            assert (asked.stop, asked.logprobs) == ((), 0)
            prefiller.fails = fails
            prefiller.may_answer.set()
            await until(lambda: made.peer.served == ["a"])
            assert made.engine.log.count("add a") == 1
            assert [len(one.tokens) for one in made.peer.finished] == [4]

    run(test())


def test_tokens_that_a_request_brings_are_part_of_the_prompt_that_is_computed() -> None:
    async def test() -> None:
        async with world() as made:
            begun = Begun(np.array([7, 8], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32))
            prefiller, _ = await prefilled(made, begun=begun)
            (asked,) = prefiller.asked
            assert (asked.prompt.tolist(), asked.begun) == ([0, 1, 2, 7, 8], None)
            prefiller.may_answer.set()
            await until(lambda: made.peer.served == ["a"])

    run(test())


def test_a_request_that_waits_for_its_prompt_can_be_aborted_and_let_go() -> None:
    async def test() -> None:
        async with world() as made:
            prefiller, at = await prefilled(made)
            made.node.tell(made.host, HostAbort("a"))
            await until(lambda: made.peer.served == ["a"])
            ((id_, reason),) = [(one.request_id, one.finish_reason) for one in made.peer.finished]
            assert (id_, reason) == ("a", "aborted")
            begun = Begun(np.array([7], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))
            other = GenerateRequest("b", "b", np.zeros(2, np.int32), 4, begun=begun)
            made.node.tell(made.host, HostAdd([other], [made.me], [], [at]))
            await until(lambda: len(prefiller.asked) == 2)
            (released,) = (await made.ask(HostRelease(["b"]), Released)).requests
            assert released.begun is not None
            assert released.begun.tokens.tolist() == [7]
            prefiller.may_answer.set()
            await settle()
            assert not [line for line in made.engine.log if line in ("add a", "add b")]
            assert len(made.peer.finished) == 1

    run(test())


def test_a_host_computes_a_prompt_for_another_and_tells_nobody_else() -> None:
    async def test() -> None:
        async with world() as made:
            await made.begin()
            request = GenerateRequest("a for e1", "a", np.zeros(3, np.int32), 1)
            await made.ask(HostPrefill(request))
            assert "add a for e1" in made.engine.log
            made.add("b")
            await until(lambda: made.peer.served == ["b"])
            assert [one.request_id for one in made.peer.finished] == ["b"]
            assert made.peer.tokens == 1
            with pytest.raises(ValueError, match="a prompt of 99 tokens"):
                await made.ask(HostPrefill(GenerateRequest("c for e1", "c", np.zeros(99, np.int32), 1)))

    run(test())
