"""Draining: what was accepted is done, what comes is refused, and the deadline holds."""

import asyncio

import pytest

from bus.message import NoSuchActor
from tests.actors.support import WHERE, Mark, Total, Wait, WaitBeside, Where, stage, until

pytestmark = pytest.mark.parametrize("where", WHERE)


async def test_what_was_accepted_is_done_and_what_comes_is_refused(where: Where) -> None:
    async with stage(where) as on:
        running = asyncio.create_task(on.asker.ask(on.ref, Wait(), Total, timeout_s=10))
        await on.actor.waiting.wait()
        beside = asyncio.create_task(on.asker.ask(on.ref, WaitBeside(), Total, timeout_s=10))
        queued = [asyncio.create_task(on.add(1)) for _ in range(20)]
        await until(lambda: len(on.host._cells["example"]._mailbox) == 21)
        draining = asyncio.create_task(on.host.drain(on.ref, within_s=10))
        await asyncio.sleep(0)
        with pytest.raises(NoSuchActor, match="example@host takes no more messages: it is draining"):
            await on.add(1)
        on.actor.release.set()
        assert [await task for task in queued] == list(range(1, 21))
        assert await draining == 0
        await running
        await beside
        assert on.actor.stopped
        with pytest.raises(NoSuchActor, match="there is no actor 'example'"):
            await on.add(1)


async def test_what_is_not_done_in_time_is_counted_and_refused(where: Where) -> None:
    async with stage(where) as on:
        running = asyncio.create_task(on.asker.ask(on.ref, Wait(), Total, timeout_s=10))
        await on.actor.waiting.wait()
        queued = asyncio.create_task(on.add(1))
        await until(lambda: len(on.host._cells["example"]._mailbox) == 1)
        assert await on.host.drain(on.ref, within_s=0.05) == 2
        for task in (running, queued):
            with pytest.raises(NoSuchActor, match="example@host"):
                await task
        assert on.actor.total == 0


async def test_an_idle_actor_is_drained_at_once(where: Where) -> None:
    async with stage(where) as on:
        await on.add(1)
        assert await on.host.drain(on.ref, within_s=0.0) == 0


async def test_a_node_that_drains_does_what_its_actors_had_accepted(where: Where) -> None:
    async with stage(where) as on:
        for number in range(100):
            on.asker.tell(on.ref, Mark(str(number)))
        await on.add(0)
        for number in range(100, 200):
            on.host.tell(on.ref, Mark(str(number)))
        await on.host.close(drain_s=10)
        assert on.actor.marks == [str(number) for number in range(200)]


async def test_an_actor_that_is_not_there_cannot_be_drained(where: Where) -> None:
    async with stage(where) as on:
        await on.host.stop(on.ref)
        with pytest.raises(ValueError, match="there is no actor example@host on node host to be drained"):
            await on.host.drain(on.ref, within_s=1)
