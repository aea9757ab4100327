"""Asks and tells between nodes whose messages are carried by hand: answers, refusals and deadlines."""

import msgspec
import pytest

from bus.message import DeadlineExceeded, DecodeError, Failure, Header, Kind, Lane, NoSuchActor, Overloaded, RemoteError
from tests.bus.asks import Add, Counter, Sum, Total, ask
from tests.bus.hands import Hand, Message, carry, settle

pytestmark = pytest.mark.virtual_time


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
