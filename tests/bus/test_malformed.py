"""What is no message of this protocol from who it says is counted, and has no effect."""

from typing import Any

import msgspec
import pytest

from bus.message import Header, Kind, Lane
from tests.bus.asks import Add
from tests.bus.hands import Hand, Message

pytestmark = pytest.mark.virtual_time


def tell_of(source: Hand, target: Hand, **changes: Any) -> Message:
    header = Header(
        kind=Kind.TELL, to="counter", sender=source.address, to_epoch=target.address.epoch, id=0, type="Add"
    )
    header = msgspec.structs.replace(header, **changes)
    return Message(target.address, Lane.CONTROL, [msgspec.msgpack.encode(header), msgspec.msgpack.encode(Add(1))])


async def test_another_protocol_is_counted_and_dropped() -> None:
    a, b = Hand("a"), Hand("b")
    b.take(tell_of(a, b, protocol=99))
    assert b.requests == []
    assert b.courier.counters == {"wrong_protocol": 1}


async def test_a_sender_must_be_who_its_connection_says() -> None:
    a, b = Hand("a"), Hand("b")
    b.take(tell_of(a, b), routing_id=b"c/1")
    b.take(tell_of(a, b), routing_id=b"a/2")
    b.take(tell_of(a, b), routing_id=b"\xff")
    assert b.requests == []
    assert b.courier.counters == {"malformed": 3}


@pytest.mark.parametrize("budget", [float("nan"), float("inf"), -1.0])
async def test_a_deadline_that_is_no_time_is_malformed(budget: float) -> None:
    a, b = Hand("a"), Hand("b")
    b.take(tell_of(a, b, budget_s=budget), routing_id=b"a/1")
    assert b.courier.counters == {"malformed": 1}


async def test_a_message_without_any_frame_is_malformed() -> None:
    b = Hand("b")
    assert b.transport.receive is not None
    b.transport.receive(Lane.CONTROL, b"a/1", [])
    assert b.courier.counters == {"malformed": 1}
