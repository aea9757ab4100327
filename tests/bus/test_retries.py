"""Asks that are sent again take effect once, whatever of them is lost, doubled or late."""

import asyncio

import msgspec
import numpy as np
import pytest

import bus.asking
from bus.answering import KEPT_ANSWER_BYTES, Request
from bus.codec import Decoder
from bus.message import BusError, DeadlineExceeded, Failure, Kind, NoSuchActor, NotBegun, RemoteError
from tests.bus.asks import Add, Bytes, Counter, Total, ask
from tests.bus.hands import Hand, Message, carry, settle

pytestmark = pytest.mark.virtual_time


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
