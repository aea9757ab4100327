"""The checker finds each kind of fault: delivery is broken on purpose, one guarantee at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.strategies import SearchStrategy

import bus.answering
import bus.asking
from actors.core.mailbox import Mailbox
from actors.core.watching import Down, Watches
from bus.answering import Answering, Request, _Book
from bus.asking import Asking
from bus.codec import Frame
from bus.delivery import Courier
from bus.message import Header, Kind, Lane, NodeAddress, Overloaded
from bus.peers import Meeting, Peers
from bus.simulated import SimulatedNetwork, _Connection
from bus.wire import Wire
from tests.bus.histories import play
from tests.bus.plans import Plan, calm, full, plans, retries, watches
from tests.bus.semantics import violations

ATTEMPTS = 1_000

Patch = pytest.MonkeyPatch


def blamed(guarantee: str, plan: Plan) -> bool:
    return any(text.startswith(guarantee) for text in violations(play(plan)))


def expect(guarantee: str, among: SearchStrategy[Plan] = plans) -> None:
    """Some history must break this guarantee."""
    find(
        among,
        lambda plan: blamed(guarantee, plan),
        settings=settings(
            max_examples=ATTEMPTS,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_it_sees_a_repeated_ask_that_is_not_recognised(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Answering, "_first_time", lambda self, header: True)
    expect("once per incarnation", among=retries)


def test_it_sees_an_ask_that_is_forgotten_too_early(monkeypatch: Patch) -> None:
    forget = _Book.forget_before
    monkeypatch.setattr(_Book, "forget_before", lambda self, oldest: forget(self, 1 << 60))
    expect("calm", among=calm)


def test_it_sees_a_resend_under_another_name(monkeypatch: Patch) -> None:
    send = Asking._send

    def renamed(self: Asking, id_: int, asked: Any, sent: int = 0) -> None:
        if sent:
            id_ = next(self._ids)
            self._asked[id_] = asked
        send(self, id_, asked, sent)

    monkeypatch.setattr(Asking, "_send", renamed)
    expect("once per incarnation", among=retries)


def test_it_sees_messages_that_a_network_doubles(monkeypatch: Patch) -> None:
    deliver = SimulatedNetwork.deliver

    def twice(self: SimulatedNetwork, connection: _Connection, frames: Sequence[Frame]) -> None:
        deliver(self, connection, frames)
        deliver(self, connection, frames)

    monkeypatch.setattr(SimulatedNetwork, "deliver", twice)
    expect("at most once")


def test_it_sees_messages_that_overtake(monkeypatch: Patch) -> None:
    def unordered(self: _Connection, frames: Sequence[Frame], link: Any) -> None:
        delay = self._network.random.uniform(0, 0.01)
        self._network.loop.call_later(delay, self._network.deliver, self, frames)

    monkeypatch.setattr(_Connection, "_fly", unordered)
    expect("order")


def test_it_sees_messages_that_vanish(monkeypatch: Patch) -> None:
    on_request = Answering.on_request

    def forgetful(self: Answering, header: Header, frames: Sequence[Frame], *rest: Any) -> None:
        if header.kind is not Kind.TELL or msgspec.msgpack.decode(frames[0])["op"] % 3:
            on_request(self, header, frames, *rest)

    monkeypatch.setattr(Answering, "on_request", forgetful)
    expect("nothing vanishes")


def test_it_sees_a_full_mailbox_that_drops_in_silence(monkeypatch: Patch) -> None:
    put = Mailbox.put

    def silent(self: Mailbox, item: Any, **how: bool) -> None:
        with suppress(Overloaded):
            put(self, item, **how)

    monkeypatch.setattr(Mailbox, "put", silent)
    expect("nothing vanishes", among=full)


def test_it_sees_senders_of_an_earlier_incarnation(monkeypatch: Patch) -> None:
    meet = Peers.meet

    def trusting(self: Peers, sender: NodeAddress, now: float) -> Meeting:
        found = meet(self, sender, now)
        return Meeting.KNOWN if found is Meeting.STALE else found

    monkeypatch.setattr(Peers, "meet", trusting)
    expect("no stale sender")


def test_it_sees_what_was_meant_for_an_earlier_incarnation(monkeypatch: Patch) -> None:
    arrive = Courier._misdirected

    def take(self: Courier, header: Header) -> None:
        arrive(self, header)
        self._peers.admit(header.sender, 0.0)

    monkeypatch.setattr(Courier, "_misdirected", take)
    send = Wire.send

    def to_anyone(self: Wire, kind: Kind, to: NodeAddress, lane: Lane, **options: Any) -> None:
        anyone = NodeAddress(to.name, to.control, to.bulk, 0)
        send(self, kind, anyone, lane, **options)

    monkeypatch.setattr(Wire, "send", to_anyone)
    expect("no wrong incarnation")


def test_it_sees_asks_without_an_end(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Asking, "_expire", lambda self, asked, timeout_s: None)
    expect("one end")


def test_it_sees_asks_that_end_late(monkeypatch: Patch) -> None:
    expire = Asking._expire
    loop = asyncio.get_running_loop

    def late(self: Asking, asked: Any, timeout_s: float) -> None:
        loop().call_later(0.1, expire, self, asked, timeout_s)

    monkeypatch.setattr(Asking, "_expire", late)
    expect("deadline")


def test_it_sees_restarts_that_are_kept_from_the_asker(monkeypatch: Patch) -> None:
    fail = Asking.fail

    def silent(self: Asking, name: str, epochs: range, kind: type[Any], why: str) -> None:
        if "restarted" not in why:
            fail(self, name, epochs, kind, why)

    monkeypatch.setattr(Asking, "fail", silent)
    expect("PeerRestarted")


def test_it_sees_losses_that_are_none(monkeypatch: Patch) -> None:
    fail = Asking.fail

    def everybody(self: Asking, name: str, epochs: range, kind: type[Any], why: str) -> None:
        for asked in self._asked.values():
            fail(self, asked.to.name, range(1 << 30), kind, why)

    monkeypatch.setattr(Asking, "fail", everybody)
    expect("true losses")


def test_it_sees_the_reply_to_another_ask(monkeypatch: Patch) -> None:
    answer = Answering.answer
    first: dict[Answering, Any] = {}

    def stale(self: Answering, request: Request, kind: Kind, value: Any) -> None:
        answer(self, request, kind, first.setdefault(self, value) if kind is Kind.REPLY else value)

    monkeypatch.setattr(Answering, "answer", stale)
    expect("its own reply", among=calm)


def test_it_sees_streams_with_gaps(monkeypatch: Patch) -> None:
    on_item = Asking.on_item

    def credulous(self: Asking, header: Header, frames: Sequence[Frame]) -> None:
        reading = self._reading.get(header.id)
        if reading is not None:
            reading.expected = header.sequence
        on_item(self, header, frames)

    monkeypatch.setattr(Asking, "on_item", credulous)
    expect("streams in order")


def test_it_sees_streams_that_end_early(monkeypatch: Patch) -> None:
    on_item = Asking.on_item

    def hasty(self: Asking, header: Header, frames: Sequence[Frame]) -> None:
        on_item(self, header, frames)
        reading = self._reading.get(header.id)
        if reading is not None and header.sequence == 7:
            reading.end()

    monkeypatch.setattr(Asking, "on_item", hasty)
    expect("streams complete")


def test_it_sees_more_items_than_were_granted(monkeypatch: Patch) -> None:
    monkeypatch.setattr(bus.answering, "WINDOW", 24)
    expect("credit")


def test_it_sees_asks_that_are_left_in_memory(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Asking, "_forget", lambda self, id_, asked: None)
    expect("nothing left over")


def test_it_sees_senders_that_nobody_stops(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Answering, "close", lambda self: None)
    expect("nothing left over")


def test_it_sees_errors_without_a_name(monkeypatch: Patch) -> None:
    monkeypatch.setattr(bus.asking, "DeadlineExceeded", type("Late", (bus.message.BusError,), {}))
    expect("named errors")


def test_it_sees_a_failure_in_the_calm(monkeypatch: Patch) -> None:
    answer = Answering.answer

    def forgetful(self: Answering, request: Request, kind: Kind, value: Any) -> None:
        if request.header.id % 3:
            answer(self, request, kind, value)

    monkeypatch.setattr(Answering, "answer", forgetful)
    expect("calm", among=calm)


def test_it_sees_ends_that_nobody_is_told_of(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Watches, "gone", lambda self, gone: None)
    expect("every Down", among=watches)


def test_it_sees_ends_that_are_told_twice(monkeypatch: Patch) -> None:
    down = Watches._down

    def twice(self: Watches, id_: int, kind: Any, reason: str) -> None:
        away = self._away.get(id_)
        down(self, id_, kind, reason)
        if away is not None:
            away.notify(Down(away.ref, kind, reason))

    monkeypatch.setattr(Watches, "_down", twice)
    expect("one Down", among=watches)
