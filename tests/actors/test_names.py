"""Names find their actors, also after a move; actors are started on other nodes by name."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import msgspec
import pytest

from actors.core import Actor, LocalDirectory, Named, Node, Ref, Restarts, handler
from bus.message import ActorStopped, DeadlineExceeded, DecodeError, Lane, NoSuchActor, PeerLost, RemoteError
from bus.tracing import trace
from tests.actors.support import Add, Example, Fail, Mark, Total, Wait, until

COUNTER = Named("counter")


class Start(msgspec.Struct, frozen=True):
    total: int = 0


class Counter(Actor):
    """Can begin anywhere."""

    def __init__(self, start: Start) -> None:
        self.total = start.total

    @handler
    async def add(self, message: Add) -> Total:
        self.total += message.amount
        return Total(self.total)

    @handler
    async def fail(self, message: Fail) -> Total:
        raise ValueError(message.text)


@asynccontextmanager
async def three() -> AsyncIterator[tuple[Node, Node, Node]]:
    """A node that asks, and two that offer counters, in one directory."""
    directory = LocalDirectory()
    async with (
        Node("asker", directory=directory) as asker,
        Node("one", directory=directory) as one,
        Node("two", directory=directory) as two,
    ):
        for node in (asker, one, two):
            node.offer("counter", Counter, Start)
        yield asker, one, two


async def total(node: Node, amount: int = 0, timeout_s: float = 10) -> int:
    return (await node.ask(COUNTER, Add(amount), Total, timeout_s=timeout_s)).value


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", [0, 1])
async def test_a_name_finds_its_actor_here_and_elsewhere(home: int) -> None:
    async with three() as nodes:
        ref = await nodes[home].spawn(lambda: Counter(Start()), "c")
        await nodes[home].announce("counter", ref)
        assert [await total(node, 1) for node in nodes] == [1, 2, 3]
        assert await nodes[0].find("counter", timeout_s=10) == ref


async def test_a_name_waits_for_its_actor_to_be_announced_but_not_longer_than_the_asker() -> None:
    async with three() as (asker, one, _):
        asking = asyncio.create_task(total(asker, 1))
        asker.tell(COUNTER, Add(10))
        await asyncio.sleep(0.05)
        with pytest.raises(NoSuchActor, match=r"nobody announced 'counter' within 0.0"):
            await total(asker, timeout_s=0.05)
        await one.announce("counter", await one.spawn(lambda: Counter(Start()), "c"))
        await asking
        await until(lambda: one.describe()["actors"]["c"]["handled"] == 2)
        assert await total(asker) == 11


async def test_a_name_goes_on_meaning_its_actor_after_a_move() -> None:
    async with three() as (asker, one, two):
        ref = await one.spawn(lambda: Counter(Start()), "c")
        await one.announce("counter", ref)
        assert await total(asker, 5) == 5
        asking = [asyncio.create_task(total(asker, 1)) for _ in range(50)]
        await asyncio.sleep(0)
        await one.drain(ref, within_s=10)
        asking += [asyncio.create_task(total(asker, 1)) for _ in range(50)]
        await asyncio.sleep(0.05)
        moved = await two.spawn(lambda: Counter(Start(55)), "c")
        await two.announce("counter", moved)
        totals = [await task for task in asking]
        assert await asker.find("counter", timeout_s=10) == moved
        assert len(set(totals)) == 100  # each had its effect once, there or here
        assert await total(two, 0) == max(totals)


async def test_an_ask_that_may_have_been_begun_before_the_move_is_not_sent_again() -> None:
    async with three() as (asker, one, two):
        example = Example()
        ref = await one.spawn(lambda: example, "e")
        await one.announce("counter", ref)
        asking = asyncio.create_task(asker.ask(COUNTER, Wait(), Total, timeout_s=10))
        await example.waiting.wait()
        await one.stop(ref)
        await two.announce("counter", await two.spawn(lambda: Counter(Start()), "c"))
        with pytest.raises(ActorStopped):
            await asking
        assert await total(asker, 1) == 1


async def test_a_name_goes_on_after_its_node_was_lost_and_the_asker_in_between_is_told() -> None:
    async with three() as (asker, one, two):
        example = Example()
        await one.announce("counter", await one.spawn(lambda: example, "e"))
        asking = asyncio.create_task(asker.ask(COUNTER, Wait(), Total, timeout_s=10))
        await example.waiting.wait()
        asker.lose(one.address, "its process ended")
        with pytest.raises(PeerLost):
            await asking
        await two.announce("counter", await two.spawn(lambda: Counter(Start()), "c"))
        assert await total(asker, 1) == 1


async def test_a_handler_whose_own_ask_was_not_begun_is_not_asked_again() -> None:
    class Asking(Actor):
        calls = 0

        @handler
        async def add(self, message: Add) -> Total:
            Asking.calls += 1
            return await self.node.ask(Ref(self.node.address, "nobody"), message, Total, timeout_s=1)

    async with three() as (asker, one, _):
        await one.announce("counter", await one.spawn(Asking, "a"))
        with pytest.raises(NoSuchActor, match="there is no actor 'nobody'"):
            await total(asker)
        assert Asking.calls == 1


async def test_tells_to_a_name_keep_their_order_and_unknown_ones_are_dead_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.core.names.TELL_WITHIN_S", 0.05)
    async with three() as (asker, one, _):
        asker.tell(Named("nobody"), Mark(""))
        example = Example()
        await one.announce("example", await one.spawn(lambda: example, "e"))
        for number in range(100):
            asker.tell(Named("example"), Mark(str(number)))
            if number % 30 == 0:
                await asyncio.sleep(0.01)
        await until(lambda: len(example.marks) == 100)
        assert example.marks == [str(number) for number in range(100)]
        await until(lambda: bool(asker.dead_letters()))
        (letter,) = asker.dead_letters()
        assert (letter.to, letter.type) == ("'nobody'", "Mark")


async def test_a_name_is_withdrawn_with_its_actor_unless_it_stands_for_another_by_then() -> None:
    directory = LocalDirectory()
    async with Node("n", directory=directory) as node:
        first = await node.spawn(Example, "first")
        await node.announce("x", first)
        await node.announce("y", first)
        second = await node.spawn(Example, "second")
        await node.announce("y", second)
        await node.stop(first)
        await asyncio.sleep(0.01)
        assert (await directory.find("x"), await directory.find("y")) == (None, second)
        assert await directory.find("@n") is not None
    assert (await directory.find("y"), await directory.find("@n")) == (None, None)


async def test_a_node_without_a_directory_says_so() -> None:
    async with Node("n") as node:
        with pytest.raises(ValueError, match="node n was given no directory"):
            await node.ask(COUNTER, Add(1), Total, timeout_s=1)
        with pytest.raises(ValueError, match="node n was given no directory"):
            node.tell(COUNTER, Add(1))


async def test_tells_that_wait_for_a_name_go_as_they_were_told_and_one_that_cannot_travel_keeps_none_back() -> None:
    class Hearing(Actor):
        heard: ClassVar[set[tuple[str, int]]] = set()

        @handler
        async def mark(self, message: Mark) -> None:
            self.heard.add((message.text, trace.get()))

    async with three() as (asker, one, _):
        trace.set(7)
        asker.tell(Named("hearing"), Mark("first"))
        asker.tell(Named("hearing"), Mark(object()))  # type: ignore[arg-type]
        trace.set(8)
        asker.tell(Named("hearing"), Mark("second"), lane=Lane.BULK)
        await one.announce("hearing", await one.spawn(Hearing, "h"))
        await until(lambda: len(Hearing.heard) == 2)
        assert Hearing.heard == {("first", 7), ("second", 8)}
        assert one.describe()["actors"]["h"]["lanes"] == {"control": 1, "bulk": 1, "local": 0}
        (letter,) = asker.dead_letters()
        assert letter.to == "'hearing'"
        assert "cannot put a object in a message" in letter.why


async def test_a_tell_that_waits_for_a_name_when_its_node_closes_is_a_dead_letter() -> None:
    async with Node("n", directory=LocalDirectory()) as node:
        node.tell(COUNTER, Add(1))  # not even looked for
        await node.close()
        (letter,) = node.dead_letters()
        assert "node n closed before it was found" in letter.why


# ---- actors on other nodes -------------------------------------------------------------------------------------------


async def test_an_actor_is_started_on_a_named_node_with_typed_settings() -> None:
    async with three() as (asker, one, _):
        ref = await asker.spawn_on("one", "counter", "c", Start(40), timeout_s=10)
        assert ref.node == one.address
        assert (await asker.ask(ref, Add(2), Total, timeout_s=10)).value == 42
        again = await one.spawn_on(one.address, "counter", "d", Start(1), timeout_s=10, restarts=Restarts(at_most=0))
        assert (await asker.ask(again, Add(0), Total, timeout_s=10)).value == 1


async def test_what_cannot_be_started_there_is_said_here() -> None:
    async with three() as (asker, one, _):
        one.offer("example", Example)
        with pytest.raises(NoSuchActor, match="node one offers no 'unheard'; on offer: counter, example"):
            await asker.spawn_on("one", "unheard", "x", timeout_s=10)
        with pytest.raises(DecodeError):
            await asker.spawn_on("one", "counter", "x", Mark("not settings"), timeout_s=10)
        await asker.spawn_on("one", "example", "x", timeout_s=10)
        with pytest.raises(RemoteError, match="node one has an actor 'x' already"):
            await asker.spawn_on("one", "example", "x", timeout_s=10)
        with pytest.raises((NoSuchActor, DeadlineExceeded)):
            await asker.spawn_on("nowhere", "example", "x", timeout_s=0.05)
        with pytest.raises(ValueError, match="node one offers 'example' already"):
            one.offer("example", Example)


async def test_a_monitor_of_an_actor_started_elsewhere_hears_of_its_end() -> None:
    async with three() as (asker, one, _):
        ref = await asker.spawn_on("one", "counter", "c", Start(), timeout_s=10)
        downs: list[str] = []
        asker.monitor(ref, lambda down: downs.append(down.kind))
        await asyncio.sleep(0.05)
        await one.stop(ref)
        await until(lambda: downs == ["stopped"])
