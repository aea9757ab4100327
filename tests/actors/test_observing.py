"""What can be seen of a node: counts, dead letters, traces, slow handlers."""

import asyncio
import json
import logging
import os
from pathlib import Path

import msgspec
import pytest

import actors.core.metrics
import bus.virtual_time
from actors.core import Actor, LocalDirectory, Node, Ref, handler
from actors.core.logs import close_logging, configure_logging
from bus.message import Lane, NoSuchActor
from bus.simulated import SimulatedNetwork
from bus.tracing import trace
from tests.actors.support import WHERE, Add, Example, Fail, Mark, Total, Unknown, Wait, Where, stage, until


class Hop(msgspec.Struct, frozen=True):
    """To be passed on along these refs."""

    on: list[Ref]


class Relay(Actor):
    """Passes on, and keeps the trace under which it did."""

    def __init__(self) -> None:
        self.traces: list[int] = []

    @handler
    async def hop(self, message: Hop) -> None:
        self.traces.append(trace.get())
        logging.getLogger("relay").info("passing on")
        if message.on:
            self.node.tell(message.on[0], Hop(message.on[1:]))

    @handler
    async def mark(self, message: Mark) -> None:
        self.traces.append(trace.get())

    @handler(concurrent=True)
    async def add(self, message: Add) -> Total:
        self.traces.append(trace.get())
        return Total(message.amount)


class Sleeper(Actor):
    @handler
    async def add(self, message: Add) -> Total:
        await asyncio.sleep(message.amount / 1000)
        return Total(0)


# ---- counts ----------------------------------------------------------------------------------------------------------


async def test_messages_are_counted_by_the_lane_they_came_on_and_failures_by_themselves() -> None:
    async with stage("remote") as on:
        for lane, count in ((Lane.CONTROL, 3), (Lane.BULK, 2)):
            for _ in range(count):
                await on.asker.ask(on.ref, Add(1), Total, timeout_s=10, lane=lane)
        await on.host.ask(on.ref, Add(1), Total, timeout_s=10)
        with pytest.raises(KeyError):
            await on.host.ask(on.ref, Fail(), Total, timeout_s=10)
        found = on.host.description().actors["example"]
    assert found.lanes == {"control": 3, "bulk": 2, "local": 2}
    assert (found.kind, found.handled, found.failures, found.queued) == ("Example", 7, 1, 0)
    assert sum(found.latency) == 7


async def test_a_node_tells_of_its_process_and_whom_it_watches() -> None:
    async with Node("parent") as parent, Node("child") as child:
        parent.watch(child.address, silence_s=1000.0, on_lost=print)
        found = await parent.description_of(parent.address, timeout_s=10)
        assert found.watched == [child.address]
        assert found.process is not None
        assert found.process.pid == os.getpid()
        assert found.process.cpu_s > 0
        assert 10e6 < found.process.resident_bytes < 100e9
        parent.unwatch("child")
        assert parent.description().watched == []
    async with Node("n", transport=SimulatedNetwork(seed=1).join("n")) as simulated:
        assert simulated.description().process is None


def test_handlers_are_counted_by_how_long_they_took() -> None:
    async def main() -> list[int]:
        async with Node("n", transport=SimulatedNetwork(seed=1).join("n")) as node:
            ref = await node.spawn(Sleeper, "sleeper")
            for milliseconds in (0, 5, 50, 50, 500, 5_000, 50_000, 500_000):
                await node.ask(ref, Add(milliseconds), Total, timeout_s=1000)
            return node.description().actors["sleeper"].latency

    assert bus.virtual_time.run(main()) == [1, 0, 1, 2, 1, 1, 1, 1]


async def test_what_is_being_handled_and_what_waits_is_seen() -> None:
    async with stage("local") as on:
        asked = [asyncio.create_task(on.asker.ask(on.ref, Wait(), Total, timeout_s=10)) for _ in range(3)]
        await on.actor.waiting.wait()
        found = on.host.description().actors["example"]
        assert (found.handling, found.queued) == ("wait", 2)
        assert found.handling_s >= 0
        asked[1].cancel()
        on.actor.release.set()
        await asyncio.wait(asked)
        found = on.host.description().actors["example"]
        assert (found.handling, found.handling_s, found.queued, found.cancelled) == ("", 0.0, 0, 1)


async def test_another_node_is_described_by_name_and_by_address() -> None:
    directory = LocalDirectory()
    async with Node("host", directory=directory) as host, Node("asker", directory=directory) as asker:
        await host.spawn(Example, "example")
        host.tell(Ref(host.address, "nobody"), Mark(""))
        for where in ("host", host.address):
            found = await asker.description_of(where, timeout_s=10)
            assert (found.node, found.address, list(found.actors)) == ("host", host.address, ["example"])
            assert found.counters["dead_letters"] == 1
            assert [letter.to for letter in found.dead_letters] == ["nobody@host"]


# ---- dead letters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHERE)
async def test_dead_letters_say_who_sent_what_to_whom_and_why(where: Where) -> None:
    async with stage(where) as on:
        on.asker.tell(on.ref, Unknown())
        on.asker.tell(Ref(on.ref.node, "nobody"), Add(1))
        await on.add(0)
        newest, oldest = on.host.dead_letters()
        sender = on.asker.address.name
        assert (newest.to, newest.type, newest.sender) == ("nobody@host", "Add", sender)
        assert "there is no actor 'nobody' on node host" in newest.why
        assert (oldest.to, oldest.type, oldest.sender) == ("example@host", "Unknown", sender)
        assert oldest.ago_s >= newest.ago_s >= 0
        assert on.host.description().actors["example"].dead_letters == 1


async def test_only_the_newest_dead_letters_are_kept_but_all_are_counted() -> None:
    async with Node("n") as node:
        for number in range(150):
            node.tell(Ref(node.address, f"nobody-{number}"), Mark(""))
        letters = node.dead_letters()
        assert node.describe()["counters"]["dead_letters"] == 150
    assert [letter.to for letter in letters] == [f"nobody-{number}@n" for number in range(149, 49, -1)]


# ---- traces ----------------------------------------------------------------------------------------------------------


async def test_what_one_message_causes_has_its_trace_on_every_node_and_others_have_theirs(tmp_path: Path) -> None:
    path = configure_logging("test", tmp_path)
    try:
        async with Node("a") as a, Node("b") as b:
            relays = [Relay() for _ in range(3)]
            first = await a.spawn(lambda: relays[0], "first")
            second = await b.spawn(lambda: relays[1], "second")
            third = await b.spawn(lambda: relays[2], "third")
            for _ in range(2):
                a.tell(first, Hop([second, third, first]))
            await until(lambda: len(relays[0].traces) == 4)
    finally:
        close_logging()
    one, other = relays[1].traces
    assert 0 not in (one, other)
    assert one != other
    assert relays[2].traces == [one, other]
    assert sorted(relays[0].traces) == sorted([one, one, other, other])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    said = [(line["actor"], line["trace"]) for line in lines if line["logger"] == "relay"]
    assert sorted(said) == sorted(
        (actor, f"{number:016x}") for number in (one, other) for actor in ("first@a", "first@a", "second@b", "third@b")
    )


async def test_a_timer_begins_a_trace_of_its_own_each_time() -> None:
    class Timed(Relay):
        async def on_start(self) -> None:
            self.every(0.01, Mark(""))

    timed = Timed()
    async with Node("n") as node:
        await node.spawn(lambda: timed, "timed")
        await until(lambda: len(timed.traces) >= 3)
    assert len(set(timed.traces)) == len(timed.traces)


# ---- slow handlers ---------------------------------------------------------------------------------------------------


def test_a_slow_handler_is_named_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Node("n", transport=SimulatedNetwork(seed=1).join("n")) as node:
            ref = await node.spawn(Sleeper, "sleeper")
            for milliseconds in (900, 1_500, 1_500, 70_000, 900):
                await node.ask(ref, Add(milliseconds), Total, timeout_s=100)

    bus.virtual_time.run(main())
    said = [record.getMessage() for record in caplog.records if record.name == actors.core.metrics.__name__]
    text = "sleeper@n: add takes long, {} s by now; 0 messages wait behind it"
    assert said == [text.format(seconds) for seconds in (1.5, 70.0)]


def test_a_handler_that_hangs_is_named_when_somebody_waits_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Node("n", transport=SimulatedNetwork(seed=1).join("n")) as node:
            ref = await node.spawn(Example, "example")
            hanging = asyncio.create_task(node.ask(ref, Wait(), Total, timeout_s=1000))
            await asyncio.sleep(5)
            for _ in range(3):
                node.tell(ref, Mark(""))
            await node.stop(ref)
            with pytest.raises(NoSuchActor):
                await hanging

    bus.virtual_time.run(main())
    said = [record.getMessage() for record in caplog.records if record.name == actors.core.metrics.__name__]
    assert said == ["example@n: wait takes long, 5.0 s by now; 0 messages wait behind it"]
