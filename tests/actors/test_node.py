"""A node: its names, its watch over peers, and how it ends."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence

import msgspec
import pytest

import actors.core.cell
import actors.core.liveness
import bus.asking
from actors.core import Actor, Node, Ref, handler
from bus.codec import Frame
from bus.message import (
    BusError,
    DeadlineExceeded,
    Header,
    Kind,
    Lane,
    NodeAddress,
    NoSuchActor,
    PeerLost,
    PeerRestarted,
)
from bus.transport import Receive, Transport
from bus.zeromq import ZeroMQTransport
from tests.actors.support import Add, Count, Example, Mark, Total, Wait, descriptors, stage, until


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings and resends come soon."""
    monkeypatch.setattr(actors.core.liveness, "PING_EVERY_S", 0.01)
    monkeypatch.setattr(bus.asking, "RESEND_AFTER_S", 0.05)


# ---- names -----------------------------------------------------------------------------------------------------------


async def test_a_name_is_taken_once() -> None:
    async with Node("n") as node:
        await node.spawn(Example, "one")
        with pytest.raises(ValueError, match="node n has an actor 'one' already"):
            await node.spawn(Example, "one")


async def test_a_ref_with_any_epoch_reaches_the_actor() -> None:
    async with stage("remote") as on:
        anyone = Ref(NodeAddress("host", on.host.address.control, "", 0), "example")
        for asker in (on.asker, on.host):
            await asker.ask(anyone, Add(1), Total, timeout_s=10)
        assert on.actor.total == 2


async def test_a_ref_to_an_earlier_incarnation_of_this_very_node_is_refused() -> None:
    async with stage("local") as on:
        address = on.host.address
        earlier = Ref(NodeAddress(address.name, address.control, address.bulk, address.epoch - 1), "example")
        with pytest.raises(PeerRestarted):
            await on.host.ask(earlier, Add(1), Total, timeout_s=10)
        assert on.actor.total == 0


async def test_actors_of_other_nodes_cannot_be_stopped_from_here() -> None:
    async with stage("remote") as on:
        with pytest.raises(ValueError, match="example@host lives on another node than asker"):
            await on.asker.stop(on.ref)
        assert await on.add(1) == 1


async def test_a_malformed_actor_is_refused_when_it_is_spawned() -> None:
    class Malformed(Actor):
        @handler
        async def number(self, message: int) -> None:
            """Not a struct."""

    async with Node("n") as node:
        with pytest.raises(TypeError, match=r"expected a msgspec.Struct"):
            await node.spawn(Malformed, "malformed")


# ---- retries over real sockets ---------------------------------------------------------------------------------------


class Losing:
    """A transport that loses the first answer."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.lost: list[Kind] = []

    @property
    def address(self) -> NodeAddress:
        return self._inner.address

    @property
    def counters(self) -> Counter[str]:
        return self._inner.counters

    def start(self, receive: Receive) -> None:
        self._inner.start(receive)

    def send(self, to: NodeAddress, lane: Lane, frames: Sequence[Frame]) -> None:
        kind = msgspec.msgpack.decode(frames[0], type=Header).kind
        if kind is Kind.REPLY and not self.lost:
            self.lost.append(kind)
            return
        self._inner.send(to, lane, frames)

    def disconnect(self, peer: NodeAddress) -> None:
        self._inner.disconnect(peer)

    def expect(self) -> None:
        self._inner.expect()

    def news(self) -> bool:
        return self._inner.news()

    def keep(self, name: str, endpoints: Collection[str]) -> None:
        self._inner.keep(name, endpoints)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.usefixtures("quick")
async def test_an_ask_with_retries_takes_effect_once_though_its_answer_was_lost() -> None:
    transport = Losing(ZeroMQTransport("host", 1))
    async with Node("host", transport=transport) as host, Node("asker") as asker:
        actor = Example()
        ref = await host.spawn(lambda: actor, "example")
        assert (await asker.ask(ref, Add(1), Total, timeout_s=10, retries=5)).value == 1
        assert transport.lost == [Kind.REPLY]
        assert actor.total == 1


async def test_without_retries_a_lost_answer_is_a_deadline() -> None:
    transport = Losing(ZeroMQTransport("host", 1))
    async with Node("host", transport=transport) as host, Node("asker") as asker:
        ref = await host.spawn(Example, "example")
        with pytest.raises(DeadlineExceeded):
            await asker.ask(ref, Add(1), Total, timeout_s=0.1)


# ---- the watch over peers --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
async def test_a_silent_peer_is_lost_and_whatever_waits_for_it_fails() -> None:
    async with stage("remote") as on:
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(on.asker.ask(on.ref, Wait(), Total, timeout_s=60))
        await on.actor.waiting.wait()
        on.asker.watch(on.host.address, silence_s=0.1, on_lost=lost.set_result)
        on.host._transport.close()  # as if its cable were cut
        reason = await lost
        assert reason.startswith("no sign of life for 0.1")
        with pytest.raises(PeerLost, match=r"Wait to example@host: node host is lost: no sign of life"):
            await waiting


@pytest.mark.usefixtures("quick")
async def test_a_peer_that_answers_is_not_lost_and_one_no_longer_watched_is_not_missed() -> None:
    lost: list[str] = []
    async with stage("remote") as on:
        on.asker.watch(on.host.address, silence_s=0.2, on_lost=lost.append)
        await asyncio.sleep(0.6)
        assert lost == []
        on.asker.unwatch("host")
        on.host._transport.close()
        await asyncio.sleep(0.4)
        assert lost == []


@pytest.mark.usefixtures("quick")
async def test_time_in_which_the_watcher_stood_still_is_no_silence_of_its_peer() -> None:
    lost: list[str] = []
    host_up, host_down = threading.Event(), threading.Event()
    addresses: list[NodeAddress] = []

    def host() -> None:
        async def main() -> None:
            async with Node("host") as node:
                addresses.append(node.address)
                host_up.set()
                await asyncio.to_thread(host_down.wait)

        asyncio.run(main())

    thread = threading.Thread(target=host)
    thread.start()
    try:
        await asyncio.to_thread(host_up.wait)
        async with Node("asker") as asker:
            asker.watch(addresses[0], silence_s=1.0, on_lost=lost.append)
            await until(lambda: asker._courier.last_heard("host") is not None)
            time.sleep(1.5)  # noqa: ASYNC251 (standing still is the point)
            await asyncio.sleep(0.2)
    finally:
        host_down.set()
        thread.join()
    assert lost == []


async def test_watching_begins_when_it_begins_however_long_ago_the_peer_was_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with stage("remote") as on:
        await on.add(1)
        await asyncio.sleep(0.3)
        monkeypatch.setattr(actors.core.liveness, "PING_EVERY_S", 0.05)
        lost: list[str] = []
        on.asker.watch(on.host.address, silence_s=0.2, on_lost=lost.append)
        await asyncio.sleep(0.5)
        assert lost == []


# ---- the end ---------------------------------------------------------------------------------------------------------


async def test_a_closed_node_refuses_to_spawn_and_counts_what_is_told() -> None:
    async with stage("remote") as on:
        await on.asker.close()
        await on.asker.close()
        with pytest.raises(BusError, match="node asker has closed: cannot spawn 'late'"):
            await on.asker.spawn(Example, "late")
        on.asker.tell(on.ref, Add(1))
        assert on.asker.describe()["counters"]["dead_letters"] == 1


async def test_actors_are_stopped_newest_first() -> None:
    stopped: list[str] = []

    class Named(Actor):
        async def on_stop(self) -> None:
            stopped.append(self.ref.actor)

    async with Node("n") as node:
        for name in ("a", "b", "c"):
            await node.spawn(Named, name)
    assert stopped == ["c", "b", "a"]


async def test_an_actor_that_fails_to_stop_does_not_keep_the_node_from_closing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stubborn(Actor):
        async def on_stop(self) -> None:
            raise RuntimeError("I stay")

    async with Node("n") as node:
        await node.spawn(Stubborn, "stubborn")
        await node.spawn(Example, "example")
    assert "stubborn@n: on_stop failed" in caplog.text


async def test_a_handler_that_does_not_end_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actors.core.cell, "HANDLERS_END_S", 0.05)

    class Clinging(Actor):
        @handler(concurrent=True)
        async def cling(self, message: Mark) -> None:
            entered.set()
            try:
                await release.wait()
            except asyncio.CancelledError:
                await release.wait()

    entered, release = asyncio.Event(), asyncio.Event()
    async with Node("n") as node:
        ref = await node.spawn(Clinging, "clinging")
        node.tell(ref, Mark(""))
        await entered.wait()
    assert "clinging@n: clinging@n cling does not end" in caplog.text
    release.set()
    await asyncio.sleep(0.01)


async def test_closing_waits_for_an_actor_that_is_being_stopped_already() -> None:
    class Slow(Actor):
        async def on_stop(self) -> None:
            began.set()
            await asyncio.sleep(0.1)
            ended.set()

    began, ended = asyncio.Event(), asyncio.Event()
    async with Node("n") as node:
        ref = await node.spawn(Slow, "slow")
        node.background(node.stop(ref))
        await began.wait()
    assert ended.is_set()


async def test_background_work_ends_with_the_node_and_its_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("endless")
            node.background(endless_too())

    async def endless_too() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("what it started at its end")

    async def failing() -> None:
        raise RuntimeError("out of order")

    async with Node("n") as node:
        node.background(endless())
        node.background(failing())
        await asyncio.sleep(0.01)
    assert ended[0] == "endless"
    assert "out of order" in caplog.text


async def test_what_a_node_does_is_described() -> None:
    async with stage("remote") as on:
        await on.add(1)
        with pytest.raises(NoSuchActor):
            await on.asker.ask(Ref(on.host.address, "nobody"), Add(1), Total, timeout_s=10)
        found = on.host.describe()
        assert (found["node"], found["counters"], list(found["actors"])) == ("host", {"dead_letters": 1}, ["example"])
        nothing = {"asks": 0, "asks_with_retries": 0, "streams_read": 0, "streams_sent": 0, "answers": 0}
        assert found["unfinished"] == nothing
        assert found["actors"]["example"]["handled"] == 1


async def test_nodes_that_came_and_went_leave_no_descriptor_and_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    async def live() -> None:
        async with stage("remote") as on:
            await on.add(1)
            async for _ in on.asker.stream(on.ref, Count(40), Total, timeout_s=10):
                pass
            on.asker.watch(on.host.address, silence_s=5, on_lost=lambda why: None)

    await live()
    await asyncio.sleep(0.1)
    before, threads = descriptors(), threading.active_count()
    for _ in range(5):
        await live()
    await until(lambda: descriptors() <= before)
    assert threading.active_count() == threads
