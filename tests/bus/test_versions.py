"""Nodes of different protocol versions refuse each other, and say so at once."""

import asyncio
from typing import Any

import msgspec
import pytest

from bus.codec import Decoder
from bus.message import Header, Kind, Lane, NodeAddress, ProtocolMismatch
from tests.bus.asks import Add, Counter, Total, ask
from tests.bus.hands import Hand, carry, settle
from tests.bus.test_zeromq import Nodes, echo
from tests.bus.test_zeromq import ask as ask_over_sockets

OLD, NEW = 1, 2
SAID = "node {} speaks version {} of the bus protocol, node {} version {}: install the same version of the library"


@pytest.mark.parametrize(("ours", "theirs"), [(OLD, NEW), (NEW, OLD)])
async def test_an_ask_of_another_version_ends_at_once_and_names_both(ours: int, theirs: int) -> None:
    a, b = Hand("a", protocol=ours), Hand("b", protocol=theirs)
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    carry(b, a)
    with pytest.raises(ProtocolMismatch, match="Add to counter@b: " + SAID.format("b", theirs, "a", ours)):
        await waiting
    assert b.requests == []
    assert (a.sent(), b.sent()) == ([], []), "a refusal is not refused in turn"


async def test_a_stream_of_another_version_ends_at_once(caplog: pytest.LogCaptureFixture) -> None:
    a, b = Hand("a"), Hand("b", protocol=NEW)
    totals: Decoder[Total] = Decoder(Total)
    items = a.courier.stream(b.address, "counter", Add(1), totals, timeout_s=10)
    waiting = asyncio.create_task(anext(items))
    await settle()
    carry(a, b)
    carry(b, a)
    with pytest.raises(ProtocolMismatch, match="Add stream from counter@b: " + SAID.format("b", NEW, "a", OLD)):
        await waiting


async def test_nodes_over_sockets_refuse_each_other_in_both_directions() -> None:
    async with Nodes() as nodes:
        old, new = nodes("old", echo), nodes("new", echo, protocol=NEW)
        for one, other in ((old, new), (new, old)):
            for lane in Lane:
                with pytest.raises(ProtocolMismatch):
                    await ask_over_sockets(one, other.address, "hello", lane=lane)
        assert (old.peer("new"), new.peer("old")) == (None, None)


async def test_other_versions_are_logged_once_per_node_and_counted_per_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b, c = Hand("a", protocol=NEW), Hand("b"), Hand("c", protocol=NEW)
    for _ in range(100):
        for source in (a, c):
            source.courier.tell(b.address, "counter", Add(1))
            carry(source, b)
    assert b.courier.counters["wrong_protocol"] == 200
    assert b.requests == []
    assert b.sent() == [], "nobody waits for an answer to a tell"
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(" of the bus")[0] for text in told] == [
        f"node b refuses messages: node {name} speaks version 2" for name in "ac"
    ]


async def test_a_refusal_ends_only_what_was_asked_of_who_refuses() -> None:
    a, b, stranger = Hand("a"), Hand("b", serve=Counter()), Hand("stranger", protocol=NEW)
    waiting = ask(a, b)
    await settle()
    (request,) = a.sent()
    stranger.courier._wire.try_send(Kind.ERROR, a.address, id_=request.header.id)
    carry(stranger, a)
    b.take(request)
    carry(b, a)
    assert await waiting == Total(1)


def future_header(**changes: Any) -> list[Any]:
    """A header of a version to come: more fields at its end, of which this one knows nothing, and in its sender's
    address; the fields that are frozen stand where they stand."""
    fields: dict[str, Any] = {
        "protocol": 7,
        "kind": int(Kind.ASK),
        "to": "counter",
        "sender": ["z", "tcp://z:1", "tcp://z:2", 1, {"key": b"x"}],
        "to_epoch": 0,
        "id": 5,
        "type": {"name": "Add", "schema": 3},
        "budget": None,
        "new": [1, 2, 3],
    }
    return list((fields | changes).values())


async def test_a_header_of_another_layout_is_understood_as_far_as_it_must_be() -> None:
    b = Hand("b")
    assert b.transport.receive is not None
    b.transport.receive(Lane.CONTROL, b"z/1", [msgspec.msgpack.encode(future_header()), b"\xc1 no msgpack at all"])
    (answer,) = b.sent()
    assert answer.to == NodeAddress("z", "tcp://z:1", "tcp://z:2", 1)
    assert (answer.kind, answer.header.id, answer.header.protocol) == (Kind.ERROR, 5, OLD)


def test_this_version_keeps_to_what_all_versions_must_keep_to() -> None:
    sender = NodeAddress("n", "c", "b", 4)
    header = Header(kind=Kind.ASK, to="t", sender=sender, to_epoch=3, id=9)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(header))
    assert fields[:6] == [OLD, 1, "t", ["n", "c", "b", 4], 3, 9]
    assert (Kind.ASK, Kind.ERROR, Kind.STREAM) == (1, 3, 4)


class Added(msgspec.Struct):
    """``Add`` as software to come may have it."""

    amount: int
    unit: str = "apples"


async def test_what_newer_software_adds_at_the_end_is_passed_over() -> None:
    """Within one version of the protocol: fields of a body, of a header and of an address that are not known here."""
    b = Hand("b", serve=Counter())
    body = msgspec.msgpack.encode(Added(2))
    sender = ["z", "tcp://z:1", "tcp://z:2", 1, {"rack": 7}]
    header = list(msgspec.msgpack.decode(msgspec.msgpack.encode(Header(kind=Kind.ASK, to="counter", sender=b.address,
        to_epoch=0, id=9, type="Add", budget_s=5.0))))  # fmt: skip
    header[3] = sender
    assert b.transport.receive is not None
    b.transport.receive(Lane.CONTROL, b"z/1", [msgspec.msgpack.encode([*header, "more", 1.5]), body])
    (answer,) = b.sent()
    assert (answer.kind, answer.to.name) == (Kind.REPLY, "z")
    assert msgspec.msgpack.decode(answer.frames[1]) == {"value": 2}


@pytest.mark.parametrize(
    "changes",
    [{"sender": ["y", "tcp://z:1", "tcp://z:2", 1]}, {"sender": None}, {"id": "5"}, {"protocol": OLD}, {"to": 3}],
    ids=["another's name", "no sender", "no id", "this version", "no actor"],
)
async def test_what_is_a_header_of_no_version_is_malformed_and_not_answered(changes: dict[str, Any]) -> None:
    b = Hand("b")
    assert b.transport.receive is not None
    b.transport.receive(Lane.CONTROL, b"z/1", [msgspec.msgpack.encode(future_header(**changes))])
    assert b.courier.counters == {"malformed": 1}
    assert b.sent() == []


async def test_a_header_nested_beyond_all_measure_is_malformed() -> None:
    b = Hand("b")
    assert b.transport.receive is not None
    deep = msgspec.msgpack.encode(future_header())[:-4] + b"\x91" * 100_000
    b.transport.receive(Lane.CONTROL, b"z/1", [deep])
    assert b.courier.counters == {"malformed": 1}
