"""SUSPEND, UPDATE and RESUME, over scripted engine hosts on real nodes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.proxy.messages import Accepted, Progress, Resume, Suspend, Update
from bus.message import PeerLost, RemoteError
from tests.proxy.support import die, world
from tests.support.loops import run, until


def test_a_suspended_engine_takes_requests_only_where_no_other_serves() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            await made.serve("e0")
            await made.serve("e1")
            await made.command(Suspend("e0"))
            assert [await made.add(f"a{index}/0") for index in range(3)] == ["e1"] * 3
            await made.command(Suspend("e1"))
            assert await made.add("b/0") == "e0"
            await made.command(Resume("e0"))
            assert (await made.engine("e0")).state == "serving"
            assert await made.add("c/0") == "e0"

    run(test())


def test_a_command_for_all_reaches_all_that_can_take_it() -> None:
    async def test() -> None:
        async with world(["e0", "e1", "e2"]) as made:
            hosts = [await made.serve("e0"), await made.serve("e1"), await made.start("e2")]
            await made.command(Suspend())
            assert [host.log for host in hosts] == [["suspend"], ["suspend"], []]
            await made.command(Resume())
            assert [engine.state for engine in (await made.describe()).engines] == ["serving", "serving", "cold"]

    run(test())


def test_an_update_brings_the_engines_receipt() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0")
            await made.command(Suspend("e0"))
            done = await made.command(Update("e0", 4))
            assert done.version == 4
            assert done.receipt is not None
            assert (done.receipt.version, done.receipt.engine) == (4, "e0")
            await made.command(Resume("e0", 4))
            assert host.log == ["suspend", "update 4", "resume"]
            assert (await made.engine("e0")).version == 4

    run(test())


def test_an_engine_without_an_accepted_receipt_is_resumed_by_nobody() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0")
            await made.command(Suspend("e0"))
            host.fails_update = ["digest differs"]
            with pytest.raises(RemoteError, match="digest differs"):
                await made.command(Update("e0", 1))
            with pytest.raises(ValueError, match="engine e0 has no accepted receipt"):
                await made.command(Resume("e0"))
            await made.command(Resume())  # all that can: none
            assert "resume" not in host.log
            assert (await made.engine("e0")).state == "suspended"

    run(test())


def test_the_first_answer_to_a_command_does_not_wait_for_the_engine() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0")
            host.suspends_at_once.clear()
            progress: Any = Progress
            answers = made.node.stream(made.proxy.ref, Suspend("e0"), progress, timeout_s=5)
            assert await anext(aiter(answers)) == Accepted("e0")
            second = asyncio.ensure_future(anext(answers))
            await until(lambda: host.log == ["suspend"])
            assert not second.done()
            die(made, "e0", restarting=False)
            with pytest.raises(PeerLost, match="SIGKILL"):
                await second

    run(test())


def test_a_command_to_an_unknown_engine_names_those_that_there_are() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            with pytest.raises(ValueError, match="no engine 'e7'; there are e0, e1"):
                await made.answers(Suspend("e7"))

    run(test())
