"""What a message to an actor does is the same within a node and between two."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import numpy as np
import pytest

from actors.core import Actor, Node, Ref, handler
from actors.core.envelope import WINDOW
from bus.message import BusError, DeadlineExceeded, DecodeError, Lane, NoSuchActor, Overloaded, RemoteError
from tests.actors.support import (
    WHERE,
    Add,
    Array,
    Count,
    Fail,
    Hurry,
    Mark,
    Stage,
    Sum,
    Total,
    Unknown,
    Wait,
    WaitBeside,
    WaitForCancelled,
    Where,
    stage,
    until,
)

pytestmark = pytest.mark.parametrize("where", WHERE)


# ---- asks and tells --------------------------------------------------------------------------------------------------


async def test_asks_are_answered_one_after_another_in_their_order(where: Where) -> None:
    async with stage(where) as on:
        totals = await asyncio.gather(*(on.add(1) for _ in range(100)))
    assert totals == list(range(1, 101))


async def test_tells_arrive_in_their_order(where: Where) -> None:
    async with stage(where) as on:
        for number in range(1000):
            on.asker.tell(on.ref, Mark(str(number)))
        await on.add(0)
        assert on.actor.marks == [str(number) for number in range(1000)]


async def test_a_reply_of_another_type_than_asked_for_is_refused(where: Where) -> None:
    async with stage(where) as on:
        with pytest.raises(DecodeError, match=r"Add to example@host: answered with Total, expected Sum"):
            await on.asker.ask(on.ref, Add(1), Sum, timeout_s=10)


@pytest.mark.parametrize("lane", Lane)
async def test_arrays_travel_both_ways(where: Where, lane: Lane) -> None:
    data = np.arange(200_000, dtype=np.int32).reshape(2, -1)
    async with stage(where) as on:
        answer = await on.asker.ask(on.ref, Array(data), Array, timeout_s=10, lane=lane)
    np.testing.assert_array_equal(answer.data, data * 2)


async def test_what_nobody_handles_is_refused_by_name(where: Where) -> None:
    async with stage(where) as on:
        with pytest.raises(NoSuchActor, match="example@host does not handle Unknown"):
            await on.asker.ask(on.ref, Unknown(), Total, timeout_s=10)
        with pytest.raises(NoSuchActor, match="there is no actor 'nobody' on node host"):
            await on.asker.ask(Ref(on.ref.node, "nobody"), Add(1), Total, timeout_s=10)


async def test_a_stream_is_not_asked_for_and_an_answer_not_streamed(where: Where) -> None:
    async with stage(where) as on:
        with pytest.raises(NoSuchActor, match="example@host answers Count with a stream"):
            await on.asker.ask(on.ref, Count(1), Total, timeout_s=10)
        with pytest.raises(NoSuchActor, match="example@host answers Add with one reply"):
            await anext(on.asker.stream(on.ref, Add(1), Total, timeout_s=10))


async def test_a_tell_that_nobody_takes_is_a_dead_letter(where: Where) -> None:
    async with stage(where) as on:
        on.asker.tell(on.ref, Unknown())
        on.asker.tell(Ref(on.ref.node, "nobody"), Add(1))
        await on.add(0)
        assert on.host.describe()["counters"]["dead_letters"] == 2


async def test_a_handlers_error_reaches_who_asked_and_the_actor_goes_on(where: Where) -> None:
    async with stage(where, restarts=0) as on:
        expected: type[Exception] = KeyError if where == "local" else RemoteError
        with pytest.raises(expected, match="on purpose") as caught:
            await on.asker.ask(on.ref, Fail(), Total, timeout_s=10)
        if isinstance(caught.value, RemoteError):
            assert caught.value.kind == "KeyError"
            assert "raise KeyError(message.text)" in caught.value.remote_traceback
        assert await on.add(1) == 1


async def test_a_handler_that_waits_for_something_cancelled_fails_and_the_actor_goes_on(where: Where) -> None:
    async with stage(where) as on:
        with pytest.raises((RuntimeError, RemoteError), match="waited for something that was cancelled"):
            await on.asker.ask(on.ref, WaitForCancelled(), Total, timeout_s=10)
        assert await on.add(1) == 1


async def test_a_deadline_names_who_waited_for_whom_over_what_and_for_how_long(where: Where) -> None:
    async with stage(where) as on:
        who = "host" if where == "local" else "asker"
        text = rf"{who} waited for Wait to example@host \(trajectory 7\): no answer within 0.05 s"
        with pytest.raises(DeadlineExceeded, match=text):
            await on.asker.ask(on.ref, Wait(), Total, timeout_s=0.05, about="trajectory 7")
        on.actor.release.set()
        assert await on.add(1) == 1
        assert on.asker.describe()["counters"]["deadlines"] == 1


async def test_a_full_mailbox_pushes_back_instead_of_growing(where: Where) -> None:
    async with stage(where, bound=5) as on:
        waiting = asyncio.create_task(on.asker.ask(on.ref, Wait(), Total, timeout_s=10))
        await on.actor.waiting.wait()
        others = [asyncio.create_task(on.add(1)) for _ in range(8)]
        done, fitting = await asyncio.wait(others, timeout=10, return_when="FIRST_EXCEPTION")
        while len(done) < 3:
            more, fitting = await asyncio.wait(fitting, timeout=10, return_when="FIRST_COMPLETED")
            done |= more
        for task in done:
            with pytest.raises(Overloaded, match="example@host: 5 messages are waiting already"):
                task.result()
        on.actor.release.set()
        await waiting
        assert sorted([await task for task in fitting]) == [1, 2, 3, 4, 5]


async def test_urgent_messages_overtake_what_waits_and_keep_their_own_order(where: Where) -> None:
    async with stage(where) as on:
        waiting = asyncio.create_task(on.asker.ask(on.ref, Wait(), Total, timeout_s=10))
        await on.actor.waiting.wait()
        for message in (Mark("1"), Mark("2"), Hurry("3"), Hurry("4")):
            on.asker.tell(on.ref, message)
        await until(lambda: len(on.host._cells["example"]._mailbox) == 4)
        on.actor.release.set()
        await waiting
        await on.add(0)
        assert on.actor.marks == ["3", "4", "1", "2"]


async def test_concurrent_handlers_do_not_hold_up_others(where: Where) -> None:
    async with stage(where) as on:
        waiting = [asyncio.create_task(on.asker.ask(on.ref, WaitBeside(), Total, timeout_s=10)) for _ in range(3)]
        await on.actor.waiting.wait()
        assert await on.add(5) == 5
        on.actor.release.set()
        assert [(await task).value for task in waiting] == [5, 5, 5]


# ---- streams ---------------------------------------------------------------------------------------------------------


async def test_a_stream_yields_every_item_in_order(where: Where) -> None:
    async with stage(where) as on:
        found = [item.value async for item in on.asker.stream(on.ref, Count(1000), Total, timeout_s=10)]
    assert found == list(range(1000))


async def test_a_streams_error_comes_after_the_items_before_it(where: Where) -> None:
    async with stage(where) as on:
        stream = on.asker.stream(on.ref, Count(10, fail_at=3), Total, timeout_s=10)
        assert [(await anext(stream)).value for _ in range(3)] == [0, 1, 2]
        with pytest.raises((ValueError, RemoteError), match="no 3"):
            await anext(stream)


async def test_items_of_another_type_end_the_stream(where: Where) -> None:
    async with stage(where) as on:
        async with aclosing(on.asker.stream(on.ref, Count(10), Sum, timeout_s=10)) as stream:
            with pytest.raises(DecodeError, match="answered with Total, expected Sum"):
                await anext(stream)
        await on.actor.stream_closed.wait()


async def test_a_slow_reader_bounds_what_its_sender_makes(where: Where) -> None:
    async with stage(where) as on, aclosing(on.asker.stream(on.ref, Count(1000), Total, timeout_s=10)) as stream:
        for taken in range(1, 101):
            await anext(stream)
            if taken % 20 == 0:
                await on.add(0)  # a round trip: everything that may have been made has been
            assert on.actor.yielded <= taken + WINDOW + 1
        assert on.actor.yielded >= 100


async def test_a_stream_that_is_left_early_stops_its_sender(where: Where) -> None:
    async with stage(where) as on:
        async with aclosing(on.asker.stream(on.ref, Count(1_000_000), Total, timeout_s=10)) as stream:
            await anext(stream)
        await on.actor.stream_closed.wait()
        assert on.actor.yielded <= WINDOW + 2
        assert await on.add(1) == 1


async def test_a_stream_that_is_closed_before_its_handler_began_never_begins(where: Where) -> None:
    async with stage(where) as on:
        waiting = asyncio.create_task(on.asker.ask(on.ref, Wait(), Total, timeout_s=10))
        await on.actor.waiting.wait()
        reading = asyncio.create_task(anext(on.asker.stream(on.ref, Count(10), Total, timeout_s=10)))
        await until(lambda: len(on.host._cells["example"]._mailbox) == 1)
        reading.cancel()
        await asyncio.wait([reading])
        await round_trip(on.asker, on.host)
        on.actor.release.set()
        await waiting
        await on.add(0)
        assert on.actor.yielded == 0


async def round_trip(asker: Node, host: Node) -> None:
    """What was sent before has arrived."""
    with pytest.raises(NoSuchActor):
        await asker.ask(Ref(host.address, "nobody"), Add(1), Total, timeout_s=10)


async def test_the_wait_for_an_item_has_a_deadline(where: Where) -> None:
    class Slow(Actor):
        @handler
        async def count(self, message: Count) -> Any:
            yield Total(0)
            await asyncio.Event().wait()

    async with stage(where) as on:
        ref = await on.host.spawn(Slow, "slow")
        async with aclosing(on.asker.stream(ref, Count(2), Total, timeout_s=0.05, about="version 3")) as stream:
            assert (await anext(stream)).value == 0
            text = r"waited for Count stream from slow@host \(version 3\): no item within 0.05 s, after 1"
            with pytest.raises(DeadlineExceeded, match=text):
                await anext(stream)


async def test_an_error_that_is_a_timeout_is_not_taken_for_the_deadline(where: Where) -> None:
    class Timing(Actor):
        @handler
        async def count(self, message: Count) -> Any:
            raise TimeoutError("of the handler's own")
            yield

    async with stage(where) as on:
        ref = await on.host.spawn(Timing, "timing")
        with pytest.raises((TimeoutError, RemoteError), match="of the handler's own"):
            await anext(on.asker.stream(ref, Count(1), Total, timeout_s=10))


# ---- the end of an actor ---------------------------------------------------------------------------------------------


async def test_stopping_answers_what_runs_and_what_waits(where: Where) -> None:
    async with stage(where) as on:
        running = [
            asyncio.create_task(on.asker.ask(on.ref, WaitBeside(), Total, timeout_s=10)),
            asyncio.create_task(on.asker.ask(on.ref, Wait(), Total, timeout_s=10)),
        ]
        await on.actor.waiting.wait()
        await until(lambda: on.host._cells["example"].describe().handled == 2)
        queued = asyncio.create_task(on.add(1))
        await until(lambda: len(on.host._cells["example"]._mailbox) == 1)
        await on.host.stop(on.ref)
        for task in running:
            with pytest.raises(NoSuchActor, match="example@host stopped while it handled Wait"):
                await task
        with pytest.raises(NoSuchActor, match="example@host has stopped"):
            await queued
        with pytest.raises(NoSuchActor, match="there is no actor 'example'"):
            await on.add(1)
        assert on.actor.stopped


async def test_a_stream_ends_with_its_actor(where: Where) -> None:
    def stream_of(on: Stage) -> AbstractAsyncContextManager[AsyncGenerator[Total, None]]:
        return aclosing(on.asker.stream(on.ref, Count(1_000_000), Total, timeout_s=10))

    async with stage(where) as on, stream_of(on) as stream:
        await anext(stream)
        await on.host.stop(on.ref)
        with pytest.raises(NoSuchActor, match="example@host stopped while it handled Count"):
            await _to_the_end(stream)


async def _to_the_end(stream: AsyncIterator[Total]) -> None:
    async for _ in stream:
        pass


async def test_closing_the_host_ends_what_waits_for_it(where: Where) -> None:
    async with stage(where) as on:
        asked = asyncio.create_task(on.asker.ask(on.ref, Wait(), Total, timeout_s=10))
        await on.actor.waiting.wait()
        await on.host.close()
        with pytest.raises(BusError):
            await asked
