"""Whoever stops waiting for an answer stops the work for it, within a node and between two."""

import asyncio
import math
from typing import Any

import msgspec
import pytest

import bus.asking
from actors.core import Actor, Node, Ref, handler
from bus.message import ActorStopped, DeadlineExceeded
from tests.actors.support import WHERE, Add, Mark, Total, Where, until

pytestmark = pytest.mark.parametrize("where", WHERE)


class Work(msgspec.Struct):
    """In line."""


class WorkBeside(msgspec.Struct):
    """In a concurrent handler."""


class MustEnd(msgspec.Struct):
    """In a handler that is not cancelled."""


class Defy(msgspec.Struct):
    """Answers though it was cancelled."""


class Worker(Actor):
    """Works until released, and notes how it ended."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.began = 0
        self.log: list[str] = []

    async def _work(self) -> Total:
        self.began += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        self.log.append("done")
        return Total(0)

    @handler
    async def work(self, message: Work) -> Total:
        return await self._work()

    @handler(concurrent=True)
    async def work_beside(self, message: WorkBeside) -> Total:
        return await self._work()

    @handler(cancellable=False)
    async def must_end(self, message: MustEnd) -> Total:
        return await self._work()

    @handler
    async def defy(self, message: Defy) -> Total:
        try:
            return await self._work()
        except asyncio.CancelledError:
            return Total(-1)

    @handler
    async def mark(self, message: Mark) -> None:
        self.log.append(message.text)

    @handler
    async def add(self, message: Add) -> Total:
        return Total(message.amount)


class Middle(Actor):
    """Passes work on."""

    def __init__(self, to: Ref) -> None:
        self.to = to

    @handler
    async def work(self, message: Work) -> Total:
        return await self.node.ask(self.to, message, Total, timeout_s=10)


class Scene:
    def __init__(self, asker: Node, host: Node, worker: Worker, ref: Ref) -> None:
        self.asker, self.host, self.worker, self.ref = asker, host, worker, ref

    def ask(self, message: Any, **options: Any) -> asyncio.Task[Total]:
        options.setdefault("timeout_s", 10)
        return asyncio.create_task(self.asker.ask(self.ref, message, Total, **options))

    async def goes_on(self) -> None:
        """The actor answers as if nothing had been."""
        assert (await self.ask(Add(7))).value == 7

    def asker_gives_up(self, where: Where) -> None:
        """The deadlines of all that it has asked pass now, however long the machine took until here."""
        deadlines = self.asker._deadlines if where == "local" else self.asker._courier._asking._deadlines
        deadlines._due(math.inf)

    @property
    def cancelled(self) -> int:
        return self.host._cells["worker"].metrics.cancelled


class At:
    """``async with At(where) as on``."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._nodes = [Node("host")] if where == "local" else [Node("host"), Node("asker")]

    async def __aenter__(self) -> Scene:
        worker = Worker()
        ref = await self._nodes[0].spawn(lambda: worker, "worker")
        return Scene(self._nodes[-1], self._nodes[0], worker, ref)

    async def __aexit__(self, *exc_info: object) -> None:
        for node in reversed(self._nodes):
            await node.close()


async def given_up(task: asyncio.Task[Total]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize("message", [Work(), WorkBeside()])
async def test_a_cancelled_ask_cancels_its_handler_and_the_actor_goes_on(
    where: Where, message: msgspec.Struct, retries: int
) -> None:
    async with At(where) as on:
        asked = on.ask(message, retries=retries)
        await until(lambda: on.worker.began == 1)
        await given_up(asked)
        await on.goes_on()
        assert on.worker.log == ["cancelled"]
        assert on.cancelled == 1


@pytest.mark.parametrize("message", [Work(), WorkBeside()])
async def test_an_ask_past_its_deadline_cancels_its_handler(where: Where, message: msgspec.Struct) -> None:
    async with At(where) as on:
        asked = on.ask(message)
        await until(lambda: on.worker.began == 1)
        on.asker_gives_up(where)
        with pytest.raises(DeadlineExceeded):
            await asked
        await on.goes_on()
        await until(lambda: on.worker.log == ["cancelled"])


async def test_what_waits_in_line_is_not_begun_once_it_was_given_up(where: Where) -> None:
    async with At(where) as on:
        first, second, third = (on.ask(Work()) for _ in range(3))
        await until(lambda: len(on.host._cells["worker"]._mailbox) == 2)
        await given_up(second)
        await asyncio.sleep(0.05)
        on.worker.release.set()
        await first
        await third
        assert on.worker.began == 2
        assert on.cancelled == 1


async def test_what_must_run_to_its_end_does(where: Where) -> None:
    async with At(where) as on:
        running, waiting = on.ask(MustEnd()), on.ask(MustEnd())
        await until(lambda: on.worker.began == 1 and len(on.host._cells["worker"]._mailbox) == 1)
        await given_up(running)
        await given_up(waiting)
        await asyncio.sleep(0.05)
        on.worker.release.set()
        await on.goes_on()
        assert on.worker.log == ["done", "done"]


async def test_a_handler_that_answers_though_it_was_cancelled_harms_nobody(where: Where) -> None:
    async with At(where) as on:
        asked = on.ask(Defy())
        await until(lambda: on.worker.began == 1)
        await given_up(asked)
        await on.goes_on()
        again = on.ask(Work())
        await until(lambda: on.worker.began == 2)
        await given_up(again)
        await on.goes_on()
        assert on.worker.log == ["cancelled", "cancelled"]


async def test_a_cancellation_travels_on_through_those_who_wait_for_others(where: Where) -> None:
    async with At(where) as on:
        middle = await on.asker.spawn(lambda: Middle(on.ref), "middle")
        asked = asyncio.create_task(on.host.ask(middle, Work(), Total, timeout_s=10))
        await until(lambda: on.worker.began == 1)
        await given_up(asked)
        await until(lambda: on.worker.log == ["cancelled"])
        await on.goes_on()


async def test_only_what_was_given_up_is_cancelled(where: Where) -> None:
    async with At(where) as on:
        kept, dropped = on.ask(WorkBeside()), on.ask(WorkBeside())
        on.asker.tell(on.ref, Mark("told"))
        await until(lambda: on.worker.began == 2)
        await given_up(dropped)
        await on.goes_on()
        await until(lambda: "cancelled" in on.worker.log)
        on.worker.release.set()
        assert await kept == Total(0)
        assert on.worker.log == ["told", "cancelled", "done"]


async def test_an_actor_can_be_stopped_while_a_cancelled_handler_ends(where: Where) -> None:
    class Slow(Worker):
        @handler
        async def work(self, message: Work) -> Total:
            self.began += 1
            try:
                await self.release.wait()
            finally:
                await asyncio.sleep(0.05)
                self.log.append("let go")
            return Total(0)

    slow = Slow()
    async with At(where) as on:
        ref = await on.host.spawn(lambda: slow, "slow")
        asked = asyncio.create_task(on.asker.ask(ref, Work(), Total, timeout_s=10))
        other = asyncio.create_task(on.asker.ask(ref, Work(), Total, timeout_s=10))
        await until(lambda: slow.began == 1 and len(on.host._cells["slow"]._mailbox) == 1)
        await given_up(asked)
        await asyncio.sleep(0.02)
        await on.host.stop(ref)
        with pytest.raises(Exception, match="slow@host has stopped"):
            await other
        assert slow.began == 1


async def test_who_asked_a_node_that_is_gone_has_nothing_done_for_it(where: Where) -> None:
    async with At(where) as on:
        asked = on.ask(Work())
        await until(lambda: on.worker.began == 1)
        if where == "local":
            await given_up(asked)
        else:
            on.host.lose(on.asker.address, "its process ended")
        await until(lambda: on.worker.log == ["cancelled"])
        asked.cancel()
        await asyncio.wait([asked])


async def test_an_actor_that_stops_in_the_middle_says_that_it_had_begun(where: Where) -> None:
    async with At(where) as on:
        asked = on.ask(Work())
        await until(lambda: on.worker.began == 1)
        await on.host.stop(on.ref)
        with pytest.raises(ActorStopped, match="worker@host stopped while it handled Work"):
            await asked


async def test_an_ask_that_is_sent_again_is_cancelled_once(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus.asking, "RESEND_AFTER_S", 0.02)
    async with At(where) as on:
        asked = on.ask(Work(), retries=5)
        await until(lambda: on.worker.began == 1)
        await asyncio.sleep(0.1)
        await given_up(asked)
        await on.goes_on()
        await asyncio.sleep(0.05)
        assert on.worker.began == 1
        assert on.worker.log == ["cancelled"]
