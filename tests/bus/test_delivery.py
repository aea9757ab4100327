"""Asks and tells between nodes whose messages are carried by hand: lost, doubled and delayed on purpose."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import numpy as np
import pytest

import bus.asking
from bus.answering import KEPT_ANSWER_BYTES, Request
from bus.codec import Decoder
from bus.message import (
    BusError,
    DeadlineExceeded,
    DecodeError,
    Failure,
    Header,
    Kind,
    Lane,
    NodeAddress,
    NoSuchActor,
    NotBegun,
    Overloaded,
    PeerLost,
    PeerRestarted,
    RemoteError,
    Superseded,
)
from tests.bus.hands import Hand, Message, carry, settle

pytestmark = pytest.mark.virtual_time


class Add(msgspec.Struct):
    amount: int


class Total(msgspec.Struct):
    value: int


class Sum(msgspec.Struct):
    """Looks like ``Total`` on the wire."""

    value: int


class Bytes(msgspec.Struct):
    data: np.ndarray


def ask(source: Hand, target: Hand, *, reply: Any = Total, **options: Any) -> asyncio.Task[Any]:
    """Ask for ``Add(1)``; the request is sent once the loop turns."""
    options.setdefault("timeout_s", 10.0)
    return asyncio.create_task(source.courier.ask(target.address, "counter", Add(1), Decoder(reply), **options))


class Counter:
    """Counts what it handles."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, request: Request) -> None:
        self.total += request.decode(Decoder(Add)).amount
        request.reply(Total(self.total))


# ---- asks ------------------------------------------------------------------------------------------------------------


async def test_an_ask_gets_its_reply() -> None:
    a, b = Hand("a"), Hand("b", serve=Counter())
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    carry(b, a)
    assert await waiting == Total(1)


async def test_answers_find_their_asks_in_any_order() -> None:
    a, b = Hand("a"), Hand("b", serve=Counter())
    first, second = ask(a, b), ask(a, b)
    await settle()
    carry(a, b)
    for answer in reversed(b.sent()):
        a.take(answer)
    assert (await first, await second) == (Total(1), Total(2))


async def test_a_tell_has_no_answer() -> None:
    a, b = Hand("a"), Hand("b")
    a.courier.tell(b.address, "counter", Add(1))
    carry(a, b)
    (request,) = b.requests
    request.reply(Total(1))
    request.fail(Failure("ValueError", "no"))
    assert b.sent() == []


async def test_a_reply_of_another_type_is_refused_even_where_its_fields_fit() -> None:
    a, b = Hand("a"), Hand("b", serve=lambda request: request.reply(Sum(1)))
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    carry(b, a)
    with pytest.raises(DecodeError, match=r"Add to counter@b: answered with Sum, expected Total"):
        await waiting


async def test_a_reply_that_cannot_travel_is_the_handlers_error() -> None:
    a, b = Hand("a"), Hand("b")
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    with pytest.raises(TypeError, match="cannot put a object in a message"):
        b.requests[0].reply(object())
    assert b.sent() == []
    waiting.cancel()


async def test_a_handlers_error_travels_with_its_traceback() -> None:
    a, b = Hand("a"), Hand("b", serve=lambda request: request.fail(Failure("KeyError", "'x'", "Traceback ...")))
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    carry(b, a)
    with pytest.raises(RemoteError, match=r"Add to counter@b: KeyError: 'x'") as caught:
        await waiting
    assert (caught.value.kind, caught.value.remote_message) == ("KeyError", "'x'")
    assert caught.value.remote_traceback == "Traceback ..."


@pytest.mark.parametrize("kind", [NoSuchActor, Overloaded, DecodeError, DeadlineExceeded])
async def test_a_refusal_arrives_as_what_it_is(kind: type[Exception]) -> None:
    a, b = Hand("a"), Hand("b", serve=lambda request: request.fail(Failure(kind.__name__, "because")))
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    carry(b, a)
    with pytest.raises(kind, match=r"Add to counter@b: because"):
        await waiting


async def test_a_loss_further_on_is_not_taken_for_a_loss_of_the_node_that_was_asked() -> None:
    a, b = Hand("a"), Hand("b", serve=lambda request: request.fail(Failure("PeerLost", "node c is lost")))
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    carry(b, a)
    with pytest.raises(RemoteError, match="PeerLost: node c is lost"):
        await waiting


async def test_a_deadline_names_who_waited_for_whom_over_what_and_for_how_long() -> None:
    a, b = Hand("a"), Hand("b")
    with pytest.raises(
        DeadlineExceeded, match=r"a waited for Add to counter@b \(trajectory 7\): no answer within 0.01 s"
    ):
        await ask(a, b, timeout_s=0.01, about="trajectory 7")
    request, cancel = a.sent()
    b.take(request)
    b.requests[0].reply(Total(1))
    b.take(cancel)  # too late
    carry(b, a)
    assert a.courier.counters == {"deadlines": 1, "late_answers": 1}


async def test_a_full_connection_fails_the_ask_at_once() -> None:
    a, b = Hand("a"), Hand("b")
    a.transport.full = True
    with pytest.raises(Overloaded, match=r"Add to counter@b: too much waits for b"):
        await ask(a, b)
    with pytest.raises(Overloaded):
        a.courier.tell(b.address, "counter", Add(1))


async def test_answers_that_find_the_connection_full_are_counted_and_raise_nothing() -> None:
    a, b = Hand("a"), Hand("b")
    waiting = ask(a, b, retries=1)
    await settle()
    (message,) = carry(a, b)
    b.transport.full = True
    b.requests[0].reply(Total(1))
    b.take(message)  # and so it is for a duplicate's
    b.courier.ping(a.address)
    assert b.courier.counters == {"unsent_reply": 2, "duplicates": 1, "unsent_ping": 1}
    waiting.cancel()


async def test_a_cancelled_ask_leaves_nothing_behind() -> None:
    a, b = Hand("a"), Hand("b")
    waiting = ask(a, b)
    await settle()
    waiting.cancel()
    await settle()
    carry(a, b)
    b.requests[0].reply(Total(1))
    assert b.sent() == []
    assert (a.courier.counters, b.courier.counters) == ({}, {"cancelled": 1})


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize("lane", Lane)
async def test_a_cancelled_ask_cancels_what_it_caused_once_and_only_that(lane: Lane, retries: int) -> None:
    a, b = Hand("a"), Hand("b")
    cancelled: list[int] = []
    waiting, other = (ask(a, b, lane=lane, retries=retries) for _ in range(2))
    await settle()
    carry(a, b)
    for number, request in enumerate(b.requests):
        request.on_cancel = lambda number=number: cancelled.append(number)
    waiting.cancel()
    await settle()
    (message,) = carry(a, b)
    assert (message.kind, message.lane) == (Kind.CANCEL, lane)
    b.take(message)
    assert cancelled == [0]
    b.requests[1].reply(Total(1))
    carry(b, a)
    assert await other == Total(1)


async def test_an_ask_past_its_deadline_cancels_what_it_caused() -> None:
    a, b = Hand("a"), Hand("b")
    cancelled = asyncio.Event()
    waiting = ask(a, b, timeout_s=0.05)
    await settle()
    carry(a, b)
    b.requests[0].on_cancel = cancelled.set
    with pytest.raises(DeadlineExceeded):
        await waiting
    carry(a, b)
    assert cancelled.is_set()


async def test_a_cancelled_ask_that_arrives_again_is_not_begun_again() -> None:
    a, b = Hand("a"), Hand("b")
    waiting = ask(a, b, retries=3)
    await settle()
    (message,) = carry(a, b)
    waiting.cancel()
    await settle()
    carry(a, b)
    b.take(message)
    assert len(b.requests) == 1
    assert b.courier.counters == {"cancelled": 1, "duplicates": 1}


@pytest.mark.parametrize("how", ["lost", "restarted"])
async def test_what_a_node_that_is_gone_had_asked_for_is_cancelled(how: str) -> None:
    a, a2, b = Hand("a"), Hand("a", 2), Hand("b")
    cancelled = asyncio.Event()
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    b.requests[0].on_cancel = cancelled.set
    if how == "lost":
        b.courier.lose(a.address, "gone")
    else:
        a2.courier.ping(b.address)
        carry(a2, b)
    assert cancelled.is_set()
    waiting.cancel()


async def test_an_ask_that_was_answered_or_never_sent_is_not_cancelled() -> None:
    a, b = Hand("a"), Hand("b", serve=Counter())
    waiting = ask(a, b)
    await settle()
    carry(a, b)
    carry(b, a)
    await waiting
    a.transport.full = True
    with pytest.raises(Overloaded):
        await ask(a, b)
    assert a.sent() == []
    assert a.courier.counters == {}


async def test_an_ask_without_retries_is_forgotten_once_it_is_answered() -> None:
    a, b = Hand("a"), Hand("b", serve=Counter())
    for _ in range(100):
        waiting = ask(a, b)
        await settle()
        carry(a, b)
        carry(b, a)
        await waiting
    assert len(b.courier._answering._asks) == 0


async def test_an_ask_cancelled_in_the_moment_of_its_failure_leaves_no_unseen_error() -> None:
    a, b = Hand("a"), Hand("b")
    waiting = ask(a, b)
    await settle()
    a.courier.lose(b.address, "gone")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_an_answer_from_another_node_is_not_taken_for_that_of_the_one_asked() -> None:
    a, b, c = Hand("a"), Hand("b"), Hand("c")
    waiting = ask(a, b)
    await settle()
    (message,) = a.sent()
    header = message.header
    forged = Header(kind=Kind.REPLY, to="", sender=c.address, to_epoch=0, id=header.id, type="Total")
    a.take(Message(a.address, Lane.CONTROL, [msgspec.msgpack.encode(forged), msgspec.msgpack.encode(Total(666))]))
    await settle()
    assert not waiting.done()
    assert a.courier.counters == {"late_answers": 1}
    waiting.cancel()


# ---- retries ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resends come at once."""
    monkeypatch.setattr(bus.asking, "RESEND_AFTER_S", 0.001)


async def resent(hand: Hand) -> Message:
    """The next message that is sent again."""
    for _ in range(1000):
        await asyncio.sleep(0.001)
        messages = hand.sent()
        if messages:
            return messages[0]
    raise AssertionError("nothing was sent again")


@pytest.mark.usefixtures("impatient")
async def test_an_ask_whose_answer_got_lost_takes_effect_once() -> None:
    counter = Counter()
    a, b = Hand("a"), Hand("b", serve=counter)
    waiting = ask(a, b, retries=3)
    await settle()
    carry(a, b)
    assert [message.kind for message in b.sent()] == [Kind.REPLY]  # which never arrives
    b.take(await resent(a))
    carry(b, a)
    assert await waiting == Total(1)
    assert counter.total == 1
    assert b.courier.counters["duplicates"] == 1


@pytest.mark.usefixtures("impatient")
async def test_an_ask_that_got_lost_itself_takes_effect_when_it_is_sent_again_though_later_ones_came_before() -> None:
    counter = Counter()
    a, b = Hand("a"), Hand("b", serve=counter)
    first = ask(a, b, retries=3)
    await settle()
    a.sent()  # which never arrives
    second = ask(a, b, retries=3)
    await settle()
    for message in a.sent():
        if message.header.id == 2:
            b.take(message)
    while counter.total < 2:
        b.take(await resent(a))
    carry(b, a)
    assert (await first, await second) == (Total(2), Total(1))


@pytest.mark.usefixtures("impatient")
async def test_an_ask_that_is_still_worked_on_is_not_begun_again() -> None:
    a, b = Hand("a"), Hand("b")
    waiting = ask(a, b, retries=3)
    await settle()
    carry(a, b)
    b.take(await resent(a))
    (request,) = b.requests
    request.reply(Total(1))
    carry(b, a)
    assert await waiting == Total(1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("epoch", "kind"), [(0, NoSuchActor), (1, NotBegun)])
async def test_an_ask_that_an_earlier_incarnation_may_have_begun_is_not_said_not_to_have(
    epoch: int, kind: type[BusError]
) -> None:
    a, b = Hand("a"), Hand("b")
    to = msgspec.structs.replace(b.address, epoch=epoch)
    waiting: asyncio.Task[Total] = asyncio.create_task(
        a.courier.ask(to, "counter", Add(1), Decoder(Total), timeout_s=10, retries=1)
    )
    await settle()
    a.sent()  # which an earlier incarnation may have got
    b.take(await resent(a))
    b.requests[0].fail(Failure("NotBegun", "there is no actor 'counter' on node b"))
    carry(b, a)
    with pytest.raises(NoSuchActor, match="there is no actor 'counter' on node b") as caught:
        await waiting
    assert type(caught.value) is kind


@pytest.mark.usefixtures("impatient")
async def test_a_failure_is_recorded_like_a_reply() -> None:
    a, b = Hand("a"), Hand("b", serve=lambda request: request.fail(Failure("ValueError", "no")))
    waiting = ask(a, b, retries=1)
    await settle()
    carry(a, b)
    b.sent()
    b.take(await resent(a))
    carry(b, a)
    with pytest.raises(RemoteError, match="ValueError: no"):
        await waiting


@pytest.mark.usefixtures("impatient")
async def test_a_recorded_answer_is_the_one_that_was_given_whatever_happens_to_its_array() -> None:
    data = np.zeros(10_000, np.uint8)
    a, b = Hand("a"), Hand("b", serve=lambda request: request.reply(Bytes(data)))
    waiting = ask(a, b, reply=Bytes, retries=1)
    await settle()
    carry(a, b)
    b.sent()
    data[:] = 7
    b.take(await resent(a))
    carry(b, a)
    assert (await waiting).data.max() == 0


@pytest.mark.usefixtures("impatient")
async def test_a_lost_answer_too_large_to_be_recorded_is_an_error_not_a_second_effect() -> None:
    served = []

    def serve(request: Request) -> None:
        served.append(request)
        request.reply(Bytes(np.zeros(KEPT_ANSWER_BYTES + 1, np.uint8)))

    a, b = Hand("a"), Hand("b", serve=serve)
    waiting = ask(a, b, reply=Bytes, retries=1)
    await settle()
    carry(a, b)
    b.sent()
    b.take(await resent(a))
    carry(b, a)
    with pytest.raises(RemoteError, match=r"AnswerLost: it was handled, but its answer of 1048\d\d\d bytes got lost"):
        await waiting
    assert len(served) == 1


@pytest.mark.usefixtures("impatient")
async def test_an_ask_is_sent_as_often_as_was_allowed_each_time_with_what_is_left_of_its_time() -> None:
    a, b = Hand("a"), Hand("b")
    with pytest.raises(DeadlineExceeded):
        await ask(a, b, retries=2, timeout_s=0.2)
    *headers, cancel = [message.header for message in a.sent()]
    assert cancel.kind is Kind.CANCEL
    assert len(headers) == 3
    assert len({header.id for header in headers}) == 1
    budgets = [header.budget_s for header in headers]
    assert 0.2 >= budgets[0] > budgets[1] > budgets[2] > 0


@pytest.mark.usefixtures("impatient")
async def test_without_retries_nothing_is_sent_again_and_nothing_recorded() -> None:
    a, b = Hand("a"), Hand("b", serve=Counter())
    with pytest.raises(DeadlineExceeded):
        await ask(a, b, timeout_s=0.05)
    message, cancel = a.sent()
    assert (message.kind, cancel.kind) == (Kind.ASK, Kind.CANCEL)
    assert message.header.oldest == 0


async def test_what_its_asker_gave_up_is_not_begun_when_it_arrives_late() -> None:
    counter = Counter()
    a, b = Hand("a"), Hand("b", serve=counter)
    with pytest.raises(DeadlineExceeded):
        await ask(a, b, retries=1, timeout_s=0.01)
    late, _ = a.sent()
    waiting = ask(a, b, retries=1)
    await settle()
    carry(a, b)
    b.take(late)
    carry(b, a)
    assert await waiting == Total(1)
    assert counter.total == 1
    assert b.courier.counters["given_up"] == 1


async def test_answers_are_remembered_no_longer_than_somebody_waits_for_them() -> None:
    a, b = Hand("a"), Hand("b", serve=Counter())
    for _ in range(1000):
        waiting = ask(a, b, retries=1)
        await settle()
        carry(a, b)
        carry(b, a)
        await waiting
    book = b.courier._answering._books["a"]  # what else shows it would be a measurement of memory
    assert len(book.answers) == 1


# ---- incarnations ----------------------------------------------------------------------------------------------------


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


# ---- what does not fit -----------------------------------------------------------------------------------------------


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
