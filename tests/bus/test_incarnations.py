"""Nodes that are lost, restart or close: what waits for them, and what their earlier incarnations say."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from bus.codec import Decoder
from bus.message import NodeAddress, PeerLost, PeerRestarted, Superseded
from tests.bus.asks import Add, Counter, Total, ask
from tests.bus.hands import Hand, carry, settle

pytestmark = pytest.mark.virtual_time


async def test_whatever_waits_for_a_lost_node_fails_at_once_and_so_does_what_is_asked_of_it_later() -> None:
    a, b = Hand("a"), Hand("b")
    waiting = ask(a, b)
    await settle()
    a.courier.lose(b.address, "its process ended")
    with pytest.raises(PeerLost, match=r"Add to counter@b: node b is lost: its process ended"):
        await waiting
    with pytest.raises(PeerLost, match=r"Add to counter@b: node b is lost: its process ended"):
        await ask(a, b)
    with pytest.raises(PeerLost):
        a.courier.tell(b.address, "counter", Add(1))
    assert a.transport.disconnected == [b.address]


async def test_a_loss_leaves_alone_what_waits_for_others() -> None:
    a, b, c = Hand("a"), Hand("b"), Hand("c", serve=Counter())
    waiting = ask(a, c)
    await settle()
    a.courier.lose(b.address, "gone")
    for message in a.sent():
        c.take(message)
    carry(c, a)
    assert await waiting == Total(1)


async def test_a_successor_is_asked_as_if_nothing_had_been_even_before_it_was_heard() -> None:
    a, b1, b2 = Hand("a"), Hand("b", 1), Hand("b", 2, serve=Counter())
    a.courier.lose(b1.address, "gone")
    waiting = ask(a, b2)
    await settle()
    carry(a, b2)
    carry(b2, a)
    assert await waiting == Total(1)


async def test_what_waits_for_a_successor_at_the_same_place_outlives_its_predecessor() -> None:
    a, b1, b2 = Hand("a"), Hand("b", 1), Hand("b", 2)
    b1.courier.ping(a.address)
    carry(b1, a)
    a.courier.tell(b2.address, "counter", Add(1))
    a.courier.lose(b1.address, "its process ended")
    b2.courier.ping(a.address)
    carry(b2, a)
    a.courier.lose(b2.address, "so did this one's")
    spared = msgspec.structs.replace(b1.address, control="", bulk="")
    assert a.transport.disconnected == [spared, b2.address]


async def test_who_is_heard_somewhere_is_waited_for_nowhere_else_but_where_its_successor_may_be() -> None:
    a, b2 = Hand("a"), Hand("b", 2)
    b2.courier.ping(a.address)
    carry(b2, a)
    assert a.transport.kept == {"b": {"tcp://b:1", "tcp://b:2"}}
    later = NodeAddress("b", "tcp://b:3", "tcp://b:4", 4)
    a.courier.tell(later, "counter", Add(1))
    b3 = Hand("b", 3)
    b3.courier.ping(a.address)
    carry(b3, a)
    assert a.transport.kept == {"b": {"tcp://b:1", "tcp://b:2", "tcp://b:3", "tcp://b:4"}}


async def test_an_ask_that_waits_learns_of_a_restart() -> None:
    a, b1, b2 = Hand("a"), Hand("b", 1), Hand("b", 2)
    waiting = ask(a, b1)
    await settle()
    b2.courier.ping(a.address)
    carry(b2, a)
    with pytest.raises(PeerRestarted, match=r"Add to counter@b: node b restarted"):
        await waiting


async def test_a_ref_to_an_earlier_incarnation_is_refused_at_once_where_its_successor_is_known() -> None:
    a, b1, b2 = Hand("a"), Hand("b", 1), Hand("b", 2)
    b2.courier.ping(a.address)
    carry(b2, a)
    with pytest.raises(PeerRestarted, match=r"Add to counter@b: node b restarted since it was addressed"):
        await ask(a, b1)


async def test_a_ref_to_an_earlier_incarnation_is_refused_by_its_successor_at_the_same_place() -> None:
    counter = Counter()
    a, b1, b2 = Hand("a"), Hand("b", 1), Hand("b", 2, serve=counter)
    waiting = ask(a, b1)
    await settle()
    carry(a, b2)
    assert counter.total == 0
    carry(b2, a)
    with pytest.raises(PeerRestarted):
        await waiting


async def test_an_ask_to_whichever_incarnation_answers_is_answered_by_any() -> None:
    a, b2 = Hand("a"), Hand("b", 2, serve=Counter())
    anyone = msgspec.structs.replace(b2.address, bulk="", epoch=0)
    waiting: asyncio.Task[Total] = asyncio.create_task(
        a.courier.ask(anyone, "counter", Add(1), Decoder(Total), timeout_s=10)
    )
    await settle()
    carry(a, b2)
    carry(b2, a)
    assert await waiting == Total(1)


async def test_messages_of_an_earlier_incarnation_are_dropped() -> None:
    a1, a2, b = Hand("a", 1), Hand("a", 2), Hand("b")
    a1.courier.tell(b.address, "counter", Add(1))
    a2.courier.tell(b.address, "counter", Add(2))
    carry(a2, b)
    carry(a1, b)
    assert [request.decode(Decoder(Add)) for request in b.requests] == [Add(2)]
    assert b.courier.counters == {"stale_epoch": 1}
    assert b.transport.disconnected == []


async def test_who_asks_as_an_earlier_incarnation_is_told_so_and_nothing_is_done() -> None:
    a1, a2, b = Hand("a", 1), Hand("a", 2), Hand("b")
    a2.courier.tell(b.address, "counter", Add(2))
    carry(a2, b)
    waiting = ask(a1, b)
    await settle()
    carry(a1, b)
    carry(b, a1)
    with pytest.raises(Superseded, match=r"node b refuses incarnation 1 of node a: a later one is known, 2"):
        await waiting
    assert [request.decode(Decoder(Add)) for request in b.requests] == [Add(2)]
    assert b.courier.counters == {"stale_epoch": 1}


async def test_a_stream_that_an_earlier_incarnation_opens_ends_with_that_word() -> None:
    a1, a2, b = Hand("a", 1), Hand("a", 2), Hand("b")
    a2.courier.tell(b.address, "counter", Add(2))
    carry(a2, b)
    items: AsyncGenerator[Total, None] = a1.courier.stream(b.address, "counter", Add(1), Decoder(Total), timeout_s=10)
    waiting = asyncio.ensure_future(anext(items))
    await settle()
    carry(a1, b)
    carry(b, a1)
    with pytest.raises(Superseded, match="refuses incarnation 1 of node a"):
        await waiting


async def test_who_was_given_up_as_lost_is_told_so_when_it_asks() -> None:
    a, b = Hand("a", 1), Hand("b")
    a.courier.tell(b.address, "counter", Add(1))
    carry(a, b)
    b.courier.lose(a.address, "no sign of life for 20.0 s")
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    carry(b, a)
    with pytest.raises(Superseded, match="that one is lost here"):
        await waiting
    assert b.courier.counters["stale_epoch"] == 1


async def test_answers_for_an_earlier_incarnation_of_the_asker_go_nowhere() -> None:
    a1, a2, b = Hand("a", 1), Hand("a", 2), Hand("b")
    waiting = ask(a1, b)
    await settle()
    carry(a1, b)
    a2.courier.ping(b.address)
    carry(a2, b)
    b.sent()
    b.requests[0].reply(Total(1))
    assert b.sent() == []
    assert b.courier.counters == {"cancelled": 1}
    waiting.cancel()


async def test_each_incarnation_of_an_asker_counts_its_asks_anew() -> None:
    counter = Counter()
    a1, a2, b = Hand("a", 1), Hand("a", 2), Hand("b", serve=counter)
    for source in (a1, a2):
        waiting = ask(source, b, retries=1)
        await settle()
        carry(source, b)
        carry(b, source)
        await waiting
    assert counter.total == 2


async def test_a_node_that_closes_takes_leave_so_that_nobody_waits_for_it() -> None:
    a, b = Hand("a"), Hand("b")
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    b.courier.close()
    carry(b, a)
    with pytest.raises(PeerLost, match="node b is lost: it has closed"):
        await waiting
    assert a.transport.disconnected == [b.address]


async def test_closing_ends_what_waits() -> None:
    a, b = Hand("a"), Hand("b")
    waiting = ask(a, b)
    await settle()
    a.courier.close()
    with pytest.raises(PeerLost, match=r"Add to counter@b: this node is closing"):
        await waiting


async def test_a_ping_is_a_sign_of_life_both_ways() -> None:
    a, b = Hand("a"), Hand("b")
    assert a.courier.last_heard("b") is None
    a.courier.ping(b.address)
    carry(a, b)
    carry(b, a)
    assert a.courier.last_heard("b") is not None
    assert b.courier.last_heard("a") is not None
