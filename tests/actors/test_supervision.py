"""Actors that fail: restarted within bounds, given up, and never left half dead."""

import asyncio

import pytest

from actors.core import Actor, Node, Ref, handler
from bus.message import NoSuchActor
from tests.actors.support import Add, Fail, Hurry, Mark, Total, Wait, WaitBeside, until


class Fragile(Actor):
    """Fails when told, and where a test wants it to."""

    def __init__(self, log: list[str], *, number: int = 0, failing: tuple[str, ...] = ()) -> None:
        self.log = log
        self.number = number
        self.failing = failing
        self.total = 0
        self.entered = asyncio.Event()

    def _note(self, what: str) -> None:
        self.log.append(f"{self.number} {what}")
        if what in self.failing:
            raise RuntimeError(f"{what} fails")

    async def on_start(self) -> None:
        self._note("start")

    async def on_stop(self) -> None:
        self._note("stop")

    async def on_failure(self, error: Exception) -> None:
        self._note(f"failure: {error}")

    @handler
    async def add(self, message: Add) -> Total:
        self.total += message.amount
        return Total(self.total)

    @handler
    async def fail(self, message: Fail) -> None:
        raise ValueError(message.text)

    @handler(concurrent=True)
    async def fail_beside(self, message: Mark) -> None:
        if message.text == "while another handler runs":
            await self.entered.wait()
        raise ValueError(message.text)

    @handler
    async def wait(self, message: Wait) -> Total:
        self._note("wait")
        self.entered.set()
        await asyncio.sleep(0.05)
        self._note("waited")
        return Total(self.total)

    @handler(concurrent=True)
    async def wait_beside(self, message: WaitBeside) -> Total:
        self.entered.set()
        await asyncio.Event().wait()
        raise AssertionError("never")


class Factory:
    """Makes numbered ``Fragile`` actors."""

    def __init__(self, *failing: tuple[str, ...]) -> None:
        self.log: list[str] = []
        self.made: list[Fragile] = []
        self._failing = failing

    def __call__(self) -> Fragile:
        number = len(self.made)
        failing = self._failing[number] if number < len(self._failing) else ()
        actor = Fragile(self.log, number=number, failing=failing)
        self.made.append(actor)
        return actor


async def total(node: Node, ref: Ref, amount: int = 0) -> int:
    return (await node.ask(ref, Add(amount), Total, timeout_s=10)).value


async def test_a_failing_tell_restarts_the_actor_with_fresh_state_and_the_hooks_in_order() -> None:
    factory = Factory()
    async with Node("n") as node:
        ref = await node.spawn(factory, "fragile")
        assert await total(node, ref, 5) == 5
        node.tell(ref, Fail("broken"))
        assert await total(node, ref, 1) == 1
    assert factory.log == ["0 start", "0 failure: broken", "0 stop", "1 start", "1 stop"]


async def test_messages_that_wait_survive_a_restart() -> None:
    async with Node("n") as node:
        ref = await node.spawn(Factory(), "fragile")
        node.tell(ref, Fail())
        totals = await asyncio.gather(*(total(node, ref, 1) for _ in range(5)))
    assert totals == [1, 2, 3, 4, 5]


async def test_a_failing_ask_does_not_restart_the_actor() -> None:
    factory = Factory()
    async with Node("n") as node:
        ref = await node.spawn(factory, "fragile")
        with pytest.raises(ValueError, match="broken"):
            await node.ask(ref, Fail("broken"), Total, timeout_s=10)
        assert factory.log == ["0 start"]


async def test_an_actor_is_restarted_as_often_as_allowed_then_given_up_by_name() -> None:
    factory = Factory()
    given_up: list[tuple[Ref, BaseException]] = []
    async with Node("n") as node:
        node.on_give_up(lambda ref, error: given_up.append((ref, error)))
        ref = await node.spawn(factory, "fragile", restarts=2)
        for number in range(3):
            node.tell(ref, Fail(str(number)))
        waiting = asyncio.create_task(total(node, ref))
        with pytest.raises(NoSuchActor, match=r"fragile@n failed too often, last with ValueError\('2'\)"):
            await waiting
        await until(lambda: bool(given_up))
        ((given_ref, error),) = given_up
        assert (given_ref, str(error)) == (ref, "2")
        assert node.describe()["counters"]["actors_given_up"] == 1
        await until(lambda: "fragile" not in node.describe()["actors"])
        assert len(factory.made) == 3
        assert factory.log[-2:] == ["2 failure: 2", "2 stop"]
        again = await node.spawn(Factory(), "fragile")
        assert await total(node, again, 1) == 1


async def test_a_given_up_actor_handles_nothing_more_not_even_what_waited() -> None:
    factory = Factory()
    async with Node("n") as node:
        ref = await node.spawn(factory, "fragile", restarts=0)
        node.tell(ref, Fail())
        waiting = [asyncio.create_task(total(node, ref, 1)) for _ in range(3)]
        for task in waiting:
            with pytest.raises(NoSuchActor):
                await task
        assert factory.made[0].total == 0


async def test_a_failing_concurrent_tell_restarts_the_actor_but_not_under_a_running_handler() -> None:
    factory = Factory()
    async with Node("n") as node:
        ref = await node.spawn(factory, "fragile")
        node.tell(ref, Mark("while another handler runs"))
        await node.ask(ref, Wait(), Total, timeout_s=10)
        await until(lambda: len(factory.made) == 2)
        assert await total(node, ref, 1) == 1
    assert factory.log == [
        "0 start",
        "0 wait",
        "0 waited",
        "0 failure: while another handler runs",
        "0 stop",
        "1 start",
        "1 stop",
    ]


async def test_a_restart_comes_before_the_next_message_though_more_are_waiting() -> None:
    factory = Factory()
    async with Node("n") as node:
        ref = await node.spawn(factory, "fragile")
        node.tell(ref, Mark("while another handler runs"))
        await asyncio.gather(*(node.ask(ref, Wait(), Total, timeout_s=10) for _ in range(2)))
    assert factory.log == [
        "0 start",
        "0 wait",
        "0 waited",
        "0 failure: while another handler runs",
        "0 stop",
        "1 start",
        "1 wait",
        "1 waited",
        "1 stop",
    ]


async def test_a_restart_ends_the_concurrent_handlers_of_the_failed_actor() -> None:
    factory = Factory()
    async with Node("n") as node:
        ref = await node.spawn(factory, "fragile")
        waiting = asyncio.create_task(node.ask(ref, WaitBeside(), Total, timeout_s=10))
        await until(factory.made[0].entered.is_set)
        node.tell(ref, Fail())
        with pytest.raises(NoSuchActor, match="stopped while it handled WaitBeside"):
            await waiting
        assert await total(node, ref, 1) == 1


async def test_a_concurrent_message_whose_handler_is_ended_before_its_first_step_is_answered() -> None:
    async with Node("n") as node:
        ref = await node.spawn(Factory(), "fragile")
        waiting = asyncio.create_task(node.ask(ref, WaitBeside(), Total, timeout_s=10))
        await asyncio.sleep(0)  # it is in the mailbox, and the actor takes both messages in one go
        node.tell(ref, Fail())
        with pytest.raises(NoSuchActor, match="stopped while it handled WaitBeside"):
            await waiting


async def test_two_failures_of_one_actor_cost_one_restart() -> None:
    factory = Factory()
    async with Node("n") as node:
        ref = await node.spawn(factory, "fragile", restarts=1)
        node.tell(ref, Mark("first"))
        node.tell(ref, Mark("second"))
        await until(lambda: len(factory.made) == 2)
        assert await total(node, ref, 1) == 1


async def test_hooks_that_fail_do_not_keep_the_actor_from_its_restart() -> None:
    factory = Factory(("failure: broken", "stop"))
    async with Node("n") as node:
        ref = await node.spawn(factory, "fragile")
        node.tell(ref, Fail("broken"))
        assert await total(node, ref, 1) == 1
    assert factory.log == ["0 start", "0 failure: broken", "0 stop", "1 start", "1 stop"]


async def test_a_restart_that_fails_counts_as_a_failure() -> None:
    factory = Factory((), ("start",), ("start",))
    async with Node("n") as node:
        ref = await node.spawn(factory, "fragile", restarts=3)
        node.tell(ref, Fail("broken"))
        assert await total(node, ref, 1) == 1
        assert len(factory.made) == 4


async def test_restarts_that_all_fail_end_in_giving_up() -> None:
    factory = Factory((), ("start",), ("start",))
    async with Node("n") as node:
        ref = await node.spawn(factory, "fragile", restarts=2)
        node.tell(ref, Fail("broken"))
        with pytest.raises(NoSuchActor, match="start fails"):
            await total(node, ref)
        assert len(factory.made) == 3


async def test_an_actor_that_cannot_start_fails_its_spawn_and_frees_its_name() -> None:
    factory = Factory(("start",))
    async with Node("n") as node:
        with pytest.raises(RuntimeError, match="start fails"):
            await node.spawn(factory, "fragile")
        assert factory.log == ["0 start", "0 stop"]
        ref = await node.spawn(factory, "fragile")
        assert await total(node, ref, 1) == 1


async def test_what_was_sent_to_an_actor_while_it_failed_to_start_is_answered() -> None:
    class Slow(Fragile):
        async def on_start(self) -> None:
            self.entered.set()
            await asyncio.sleep(0.02)
            raise RuntimeError("too slow")

    actor = Slow([])
    async with Node("n") as node:
        spawning = asyncio.create_task(node.spawn(lambda: actor, "slow"))
        await actor.entered.wait()
        waiting = asyncio.create_task(total(node, Ref(node.address, "slow")))
        with pytest.raises(RuntimeError, match="too slow"):
            await spawning
        with pytest.raises(NoSuchActor, match="slow@n did not start"):
            await waiting


async def test_urgent_messages_of_an_actor_that_is_restarted_go_to_its_successor() -> None:
    class Hasty(Fragile):
        @handler(urgent=True)
        async def hurry(self, message: Hurry) -> Total:
            return Total(self.number)

    made: list[Hasty] = []

    def factory() -> Hasty:
        made.append(Hasty([], number=len(made)))
        return made[-1]

    async with Node("n") as node:
        ref = await node.spawn(factory, "hasty")
        node.tell(ref, Fail())
        await until(lambda: len(made) == 2)
        assert (await node.ask(ref, Hurry("?"), Total, timeout_s=10)).value == 1
