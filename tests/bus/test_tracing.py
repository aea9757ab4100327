"""Every request carries the number of the chain that it belongs to."""

import asyncio
from typing import Any

import msgspec

from bus.codec import Decoder
from bus.tracing import Traces, spelled, trace
from tests.bus.hands import Hand


class Note(msgspec.Struct):
    text: str = ""


async def test_what_nothing_caused_begins_a_trace_of_its_own_and_the_rest_goes_on() -> None:
    a, b = Hand("a"), Hand("b")
    a.courier.tell(b.address, "x", Note())
    a.courier.tell(b.address, "x", Note())
    trace.set(77)
    a.courier.tell(b.address, "x", Note())
    to, note = b.address, Note()
    notes: Decoder[Note] = Decoder(Note)
    waiting: asyncio.Task[Note] = asyncio.create_task(a.courier.ask(to, "x", note, notes, timeout_s=10))
    reading: asyncio.Task[Any] = asyncio.create_task(anext(a.courier.stream(to, "x", note, notes, timeout_s=10)))
    await asyncio.sleep(0)
    waiting.cancel()
    reading.cancel()
    first, second, *caused = [message.header.trace for message in a.sent()]
    assert 0 < first < second < 1 << 64
    assert caused == [77, 77, 77]


def test_traces_differ_between_nodes_and_incarnations_and_are_the_same_in_every_run() -> None:
    firsts = [Traces(name, epoch).current() for name, epoch in (("a", 1), ("a", 2), ("b", 1), ("a", 1))]
    assert firsts[0] == firsts[3]
    assert len(set(firsts)) == 3
    assert spelled(firsts[0])[8:] == "00000001"
