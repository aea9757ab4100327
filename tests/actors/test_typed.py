"""Messages that declare their reply: typed for mypy, and checked when they run.

The wrong uses below are errors for ``mypy --strict``: were one not, its ``type: ignore`` would be reported as unused.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, assert_type

import msgspec
import pytest

from actors import Actor, Message, Node, Ref, handler
from bus.message import DecodeError, NoSuchActor
from tests.actors.support import WHERE, Example, Where


class Total(msgspec.Struct, frozen=True):
    value: int


class Sum(msgspec.Struct, frozen=True):
    value: int


class Add(Message[Total], frozen=True):
    amount: int


class Upto(Message[Total], frozen=True):
    """Answered with a stream."""

    end: int


class Forget(Message[None], frozen=True):
    """Answered with nothing."""


class Plain(msgspec.Struct, frozen=True):
    """Does not say."""


class Counter(Actor):
    def __init__(self) -> None:
        self.total = 0

    @handler
    async def add(self, message: Add) -> Total:
        self.total += message.amount
        return Total(self.total)

    @handler
    async def upto(self, message: Upto) -> AsyncGenerator[Total, None]:
        for value in range(message.end):
            yield Total(value)

    @handler
    async def forget(self, message: Forget) -> None:
        self.total = 0

    @handler
    async def plain(self, message: Plain) -> Total:
        return Total(-1)


class At:
    """A node that asks, and a counter there or elsewhere."""

    def __init__(self, where: Where) -> None:
        self._nodes = [Node("host")] if where == "local" else [Node("host"), Node("asker")]

    async def __aenter__(self) -> tuple[Node, Ref[Counter]]:
        return self._nodes[-1], await self._nodes[0].spawn(Counter, "counter")

    async def __aexit__(self, *exc_info: object) -> None:
        for node in reversed(self._nodes):
            await node.close()


@pytest.mark.parametrize("where", WHERE)
async def test_a_reply_is_of_the_type_that_its_message_declares(where: Where) -> None:
    async with At(where) as (node, counter):
        assert_type(counter, Ref[Counter])
        total = await node.ask(counter, Add(2), timeout_s=10)
        assert_type(total, Total)
        assert total == Total(2)
        nothing = await node.ask(counter, Forget(), timeout_s=10)  # type: ignore[func-returns-value]
        assert nothing is None
        found = []
        async for item in node.stream(counter, Upto(3), timeout_s=10):
            assert_type(item, Total)
            found.append(item.value)
        assert found == [0, 1, 2]
        named = await node.ask(counter, Plain(), Total, timeout_s=10)
        assert_type(named, Total)


@pytest.mark.parametrize("where", WHERE)
async def test_a_wrong_use_is_an_error_for_the_type_checker_and_when_it_runs(where: Where) -> None:
    async with At(where) as (node, counter):
        wrong: Sum = await node.ask(counter, Add(1), timeout_s=10)  # type: ignore[arg-type]
        assert isinstance(wrong, Total)
        with pytest.raises(TypeError, match=r"name the type of the reply, or derive it from Message\[Reply\]"):
            await node.ask(counter, Plain(), timeout_s=10)  # type: ignore[call-overload]
        with pytest.raises(DecodeError, match="answered with Total, expected Sum"):
            await node.ask(counter, Add(1), Sum, timeout_s=10)
        other: Ref[Example] = counter  # type: ignore[assignment]
        assert str(other) == "counter@host"
        with pytest.raises(NoSuchActor, match="does not handle Total"):
            await node.ask(counter, Total(1), Total, timeout_s=10)


async def test_a_handler_that_answers_otherwise_than_its_message_declares_is_refused_when_it_is_spawned() -> None:
    class Wrong(Actor):
        @handler
        async def add(self, message: Add) -> Sum:
            return Sum(1)

    class WrongItems(Actor):
        @handler
        async def upto(self, message: Upto) -> AsyncGenerator[Sum, None]:
            yield Sum(1)

    async with Node("n") as node:
        with pytest.raises(TypeError, match=r"Wrong.add: answers with Sum, but Add is a Message\[Total\]"):
            await node.spawn(Wrong, "wrong")
        with pytest.raises(TypeError, match=r"WrongItems.upto: answers with items of Sum, but Upto is"):
            await node.spawn(WrongItems, "wrong")


async def test_typed_refs_travel_in_messages() -> None:
    class Introduce(Message[Total], frozen=True):
        to: Ref[Counter]

    class Friend(Actor):
        @handler
        async def meet(self, message: Introduce) -> Total:
            return await self.node.ask(message.to, Add(40), timeout_s=10)

    Friend.meet.__annotations__["message"] = Introduce  # a class of this function's own
    async with Node("host") as host, Node("asker") as asker:
        counter = await host.spawn(Counter, "counter")
        friend = await host.spawn(Friend, "friend")
        await asyncio.sleep(0)
        assert await asker.ask(friend, Introduce(counter), timeout_s=10) == Total(40)
        anything: Ref = counter
        assert_type(anything, Ref[Any])
