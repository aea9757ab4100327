"""What is a handler, and what is not."""

from typing import Any

import msgspec
import pytest

from actors.core import Actor, Ref, handler
from bus.message import NodeAddress
from tests.actors.support import Add, Count, Example, Total


def test_an_actor_knows_its_handlers_and_what_they_promise() -> None:
    facts = Example.handlers()
    assert facts["Add"].method == "add"
    assert facts["Add"].message is Add
    assert (facts["Add"].concurrent, facts["Add"].urgent, facts["Add"].streams) == (False, False, False)
    assert facts["WaitBeside"].concurrent
    assert facts["Hurry"].urgent
    assert facts["Count"].streams
    assert facts["Count"].concurrent, "a stream must not hold up everything else"


def test_a_subclass_has_its_own_handlers_and_those_it_inherits() -> None:
    class More(Example):
        @handler
        async def more(self, message: Total) -> None:
            """Nothing."""

    assert "Total" in More.handlers()
    assert "Add" in More.handlers()
    assert "Total" not in Example.handlers()


def test_a_handler_takes_one_annotated_struct() -> None:
    class Bare(Actor):
        @handler
        async def bare(self, message) -> None:  # type: ignore[no-untyped-def]
            """No annotation."""

    class Two(Actor):
        @handler
        async def two(self, message: Add, other: Add) -> None:
            """One too many."""

    class Number(Actor):
        @handler
        async def number(self, message: int) -> None:
            """Not a struct."""

    class Synchronous(Actor):
        @handler
        def synchronous(self, message: Add) -> None:
            """Not async."""

    for actor, complaint in (
        (Bare, "Bare.bare: a handler takes one message with an annotated type"),
        (Two, "Two.two: a handler takes one message with an annotated type"),
        (Number, "Number.number: handles <class 'int'>, expected a msgspec.Struct"),
        (Synchronous, "Synchronous.synchronous: a handler is 'async def'"),
    ):
        with pytest.raises(TypeError, match=complaint):
            actor.handlers()


def test_two_handlers_of_one_message_are_refused() -> None:
    class Twice(Actor):
        @handler
        async def first(self, message: Count) -> None:
            """One."""

        @handler
        async def second(self, message: Count) -> None:
            """The other."""

    with pytest.raises(TypeError, match="Twice: two handlers take messages of one name"):
        Twice.handlers()


def test_a_ref_travels_and_is_readable() -> None:
    ref = Ref(NodeAddress("engine-0", "tcp://h:1", "tcp://h:2", 7), "engine")
    again: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(ref), type=Ref)
    assert again == ref
    assert str(again) == "engine@engine-0"
