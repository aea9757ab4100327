"""The simulated network: what its links do to messages, what its faults do, and that it repeats itself."""

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from bus.codec import Frame
from bus.message import Lane, Overloaded, PeerLost
from bus.simulated import FRAME_OVERHEAD_BYTES, HANDSHAKE_ROUND_TRIPS, RECONNECT_S, Link, SimulatedNetwork
from bus.virtual_time import run

ROOT = Path(__file__).parents[2]


class Spot:
    """A node on the network that notes what arrives, and when."""

    def __init__(self, network: SimulatedNetwork, name: str, **options: Any) -> None:
        self.transport = network.join(name, **options)
        self.found: list[tuple[float, str]] = []
        self._loop = network.loop
        self.transport.start(self._receive)

    def _receive(self, lane: Lane, routing_id: bytes, frames: Sequence[Frame], *, more: bool = False) -> None:
        self.found.append((self._loop.time(), bytes(frames[0]).decode()))

    def send(self, to: "Spot", text: str, *, lane: Lane = Lane.CONTROL, size: int = 0) -> None:
        self.transport.send(to.transport.address, lane, [text.encode(), bytes(size)] if size else [text.encode()])

    def texts(self) -> list[str]:
        return [text for _, text in self.found]


Scenario = Callable[[], Coroutine[Any, Any, None]]


def simulated(scenario: Scenario) -> Callable[[], None]:
    """A test in virtual time."""

    def test() -> None:
        run(scenario(), limit_s=1e6)

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


async def settle(seconds: float = 10.0) -> None:
    await asyncio.sleep(seconds)


def lost(network: SimulatedNetwork) -> dict[str, int]:
    return {name.removeprefix("lost: "): count for name, count in network.counters.items() if name.startswith("lost")}


# ---- links -----------------------------------------------------------------------------------------------------------


@simulated
async def test_a_message_takes_its_latency_and_the_first_one_the_handshakes_as_well() -> None:
    network = SimulatedNetwork(seed=1, link=Link(latency_s=0.5, control_bytes_per_s=1e12))
    a, b = Spot(network, "a"), Spot(network, "b")
    a.send(b, "first")
    await settle()
    a.send(b, "second")
    await settle()
    (first, _), (second, _) = b.found
    assert first == pytest.approx(0.5 + 2 * 0.5 * HANDSHAKE_ROUND_TRIPS)
    assert second == pytest.approx(10.5)


@simulated
async def test_bytes_take_time_on_a_lane_of_their_own() -> None:
    network = SimulatedNetwork(seed=1, link=Link(latency_s=0.0, bulk_bytes_per_s=1000.0, control_bytes_per_s=100.0))
    a, b = Spot(network, "a"), Spot(network, "b")
    for name in ("x", "y"):
        a.send(b, name, lane=Lane.BULK, size=999 - 2 * FRAME_OVERHEAD_BYTES)
    a.send(b, "control")
    await settle()
    assert [(round(when, 6), text) for when, text in b.found] == [
        (round((7 + FRAME_OVERHEAD_BYTES) / 100, 6), "control"),
        (1.0, "x"),
        (2.0, "y"),
    ]


@simulated
async def test_each_direction_between_two_nodes_has_a_link_of_its_own() -> None:
    network = SimulatedNetwork(seed=1, link=Link(latency_s=0.0))
    network.set_link("a", "b", Link(latency_s=1.0))
    a, b = Spot(network, "a"), Spot(network, "b")
    a.send(b, "slow")
    b.send(a, "fast")
    await settle()
    assert b.found[0][0] > 1.0 > a.found[0][0]


@simulated
async def test_jitter_has_the_mean_that_was_asked_for_and_keeps_the_order() -> None:
    network = SimulatedNetwork(seed=1, link=Link(latency_s=1.0, jitter_s=0.5))
    a, b = Spot(network, "a"), Spot(network, "b")
    a.send(b, "hello")
    await settle(100)
    for number in range(2000):
        a.send(b, str(number))
        await settle(100)
    delays = [when % 100 - 1.0 for when, _ in b.found[1:]]
    assert sum(delays) / len(delays) == pytest.approx(0.5, rel=0.1)
    for number in range(2000):
        a.send(b, str(number))
    await settle(100)
    assert b.texts()[-2000:] == [str(number) for number in range(2000)]


@simulated
async def test_the_queue_holds_what_has_not_left_yet_and_no_more() -> None:
    network = SimulatedNetwork(seed=1, link=Link(latency_s=5.0, bulk_bytes_per_s=100.0), queued={Lane.BULK: 3})
    a, b = Spot(network, "a"), Spot(network, "b")
    a.send(b, "hello", lane=Lane.BULK)
    await settle(100)
    for name in ("x", "y", "z"):
        a.send(b, name, lane=Lane.BULK, size=99 - 2 * FRAME_OVERHEAD_BYTES)
    with pytest.raises(Overloaded, match="3 messages already wait for node b on the bulk lane"):
        a.send(b, "too much", lane=Lane.BULK)
    await asyncio.sleep(1.01)  # one has left, though it has not arrived
    assert b.texts() == ["hello"]
    a.send(b, "now", lane=Lane.BULK)
    await settle()
    assert b.texts() == ["hello", "x", "y", "z", "now"]


# ---- faults of links -------------------------------------------------------------------------------------------------


async def many(link: Link, count: int = 10_000) -> tuple[SimulatedNetwork, list[int], list[int]]:
    """What arrives of so many messages, and what was reported lost."""
    gone: list[int] = []
    network = SimulatedNetwork(
        seed=1, link=link, on_lost=lambda why, source, frames: gone.append(int(bytes(frames[0])))
    )
    a, b = Spot(network, "a"), Spot(network, "b")
    for number in range(count):
        a.send(b, str(number))
        await asyncio.sleep(0.001)
    await settle()
    return network, [int(text) for text in b.texts()], gone


@simulated
async def test_without_faults_asked_for_every_message_arrives_once_and_in_order() -> None:
    network, found, gone = await many(Link(jitter_s=0.01))
    assert found == list(range(10_000))
    assert (gone, lost(network)) == ([], {})


@simulated
async def test_losses_are_as_frequent_as_asked_for_and_each_is_reported() -> None:
    network, found, gone = await many(Link(loss=0.1))
    assert 900 < len(gone) < 1100
    assert sorted(found + gone) == list(range(10_000))
    assert lost(network) == {"link": len(gone)}


@simulated
async def test_second_arrivals_are_as_frequent_as_asked_for() -> None:
    network, found, _ = await many(Link(duplication=0.1))
    twice = len(found) - len(set(found))
    assert set(found) == set(range(10_000))
    assert 900 < twice < 1100
    assert network.counters["duplicated"] == twice


@simulated
async def test_messages_are_overtaken_as_often_as_asked_for_and_all_arrive() -> None:
    network, found, _ = await many(Link(reordering=0.1))
    assert sorted(found) == list(range(10_000))
    overtaken = sum(later < earlier for earlier, later in itertools.pairwise(found))
    assert 500 < overtaken <= network.counters["reordered"] < 1100


@simulated
async def test_what_comes_in_one_moment_on_a_lane_is_told_to_be_followed_but_for_the_last() -> None:
    network = SimulatedNetwork(seed=1)
    senders = [Spot(network, name) for name in "abc"]
    came: list[tuple[float, Lane, str, bool]] = []

    def receive(lane: Lane, routing_id: bytes, frames: Sequence[Frame], *, more: bool = False) -> None:
        came.append((network.loop.time(), lane, bytes(frames[0]).decode(), more))

    target = network.join("target")
    target.start(receive)
    for lane in Lane:
        for number, sender in enumerate(senders):  # as far away as each other
            sender.transport.send(target.address, lane, [str(number).encode()])
    await settle()
    senders[0].transport.send(target.address, Lane.CONTROL, [b"later"])
    await settle()
    assert len({at for at, _, _, _ in came[:-1]}) == 1
    for lane in Lane:
        told = [(text, more) for _, came_on, text, more in came if came_on is lane]
        assert told[:3] == [("0", True), ("1", True), ("2", False)]
    assert came[-1][1:] == (Lane.CONTROL, "later", False)


@simulated
async def test_what_has_come_to_a_node_that_crashes_in_that_moment_is_counted_as_lost() -> None:
    network = SimulatedNetwork(seed=1)
    senders = [Spot(network, name) for name in "abc"]
    came: list[bytes] = []

    def crash(lane: Lane, routing_id: bytes, frames: Sequence[Frame], *, more: bool = False) -> None:
        came.append(routing_id)
        target.crash()

    target = network.join("target")
    target.start(crash)
    for sender in senders:
        sender.transport.send(target.address, Lane.CONTROL, [b"the end"])
    await settle()
    assert came == [b"a/1"]
    assert network.counters["delivered"] == 1
    assert lost(network) == {"crashed": 2}


# ---- partitions ------------------------------------------------------------------------------------------------------


@simulated
async def test_a_partition_holds_everything_back_until_it_heals() -> None:
    network = SimulatedNetwork(seed=1, link=Link(latency_s=1.0))
    a, b, c = Spot(network, "a"), Spot(network, "b"), Spot(network, "c")
    a.send(b, "hello")
    await settle()
    a.send(b, "in the air")
    await asyncio.sleep(0.5)
    network.partition({"a", "c"}, {"b"})
    a.send(b, "held")
    a.send(c, "beside")
    await settle(1000)
    assert b.texts() == ["hello"]
    assert c.texts() == ["beside"]
    network.heal()
    a.send(b, "after")
    await settle()
    assert b.texts() == ["hello", "in the air", "held", "after"]


@simulated
async def test_a_partition_that_cuts_loses_what_is_in_the_air_and_no_more() -> None:
    network = SimulatedNetwork(seed=1, link=Link(latency_s=1.0))
    a, b = Spot(network, "a"), Spot(network, "b")
    a.send(b, "hello")
    await settle()
    a.send(b, "in the air")
    await asyncio.sleep(0.5)
    network.partition({"a"}, {"b"}, cut=True)
    a.send(b, "held")
    await settle()
    network.heal()
    await settle()
    assert b.texts() == ["hello", "held"]
    assert lost(network) == {"partition": 1}


@simulated
async def test_a_block_has_one_direction() -> None:
    network = SimulatedNetwork(seed=1)
    a, b = Spot(network, "a"), Spot(network, "b")
    network.block("a", "b")
    a.send(b, "there")
    b.send(a, "back")
    await settle()
    assert (a.texts(), b.texts()) == (["back"], [])


@simulated
async def test_a_broken_connection_loses_what_is_in_the_air_and_comes_back_by_itself() -> None:
    network = SimulatedNetwork(seed=1, link=Link(latency_s=1.0))
    a, b = Spot(network, "a"), Spot(network, "b")
    a.send(b, "hello")
    await settle()
    a.send(b, "in the air")
    await asyncio.sleep(0.5)
    network.cut("a", "b")
    a.send(b, "after")
    await settle()
    assert b.texts() == ["hello", "after"]
    assert b.found[-1][0] <= 10.5 + RECONNECT_S + 5.1


# ---- crashes ---------------------------------------------------------------------------------------------------------


@simulated
async def test_what_is_in_the_air_to_a_node_that_crashes_is_lost_and_what_waits_goes_to_its_successor() -> None:
    network = SimulatedNetwork(seed=1, link=Link(latency_s=1.0, control_bytes_per_s=100.0))
    a, b = Spot(network, "a"), Spot(network, "b", port=7)
    a.send(b, "hello")
    await settle()
    a.send(b, "air", size=10)
    a.send(b, "waits", size=500)
    await asyncio.sleep(1.0)
    b.transport.crash()
    a.send(b, "later")
    await settle(100)
    successor = Spot(network, "b", port=7)
    await settle(100)
    assert (b.texts(), successor.texts()) == (["hello"], ["waits", "later"])
    assert lost(network) == {"crashed": 1}
    assert successor.transport.address.epoch > b.transport.address.epoch


@simulated
async def test_a_node_that_crashes_says_no_more_and_what_it_said_before_still_arrives() -> None:
    network = SimulatedNetwork(seed=1, link=Link(latency_s=1.0, control_bytes_per_s=100.0))
    a, b = Spot(network, "a"), Spot(network, "b")
    a.send(b, "hello")
    await settle()
    a.send(b, "said", size=10)
    a.send(b, "unsaid", size=500)
    await asyncio.sleep(0.5)
    a.transport.crash()
    with pytest.raises(PeerLost, match="node a has crashed"):
        a.send(b, "never")
    await settle()
    assert b.texts() == ["hello", "said"]
    assert lost(network) == {"crashed": 1}


@simulated
async def test_a_closing_node_has_a_moment_for_what_waits() -> None:
    network = SimulatedNetwork(seed=1, link=Link(latency_s=0.0, control_bytes_per_s=1000.0))
    a, b = Spot(network, "a"), Spot(network, "b")
    for number in range(10):
        a.send(b, str(number), size=80)  # 99 ms each
    a.transport.close()
    await settle()
    assert b.texts() == ["0", "1", "2"]
    assert lost(network) == {"closed": 7}


@simulated
async def test_a_connection_made_anew_does_not_overtake_what_the_old_one_sent() -> None:
    network = SimulatedNetwork(seed=1, link=Link(latency_s=0.001, jitter_s=1.0))
    a, b = Spot(network, "a"), Spot(network, "b")
    for number in range(300):
        a.send(b, str(number))
        await asyncio.sleep(0.01)
        a.transport.disconnect(b.transport.address)
    await settle(100)
    numbers = [int(text) for text in b.texts()]
    assert numbers == sorted(numbers)
    assert len(numbers) > 100


# ---- again and again -------------------------------------------------------------------------------------------------


def traffic(messages: int, seed: int, hash_seed: int) -> str:
    """One run in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.bus.traffic", str(messages), str(seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    ).stdout


def test_a_run_of_actors_repeats_exactly_from_its_seed_in_any_process() -> None:
    first = traffic(5_000, 1, hash_seed=1)
    assert traffic(5_000, 1, hash_seed=2) == first
    assert traffic(5_000, 2, hash_seed=1) != first


@pytest.mark.deep
def test_a_million_messages_repeat_exactly() -> None:
    assert traffic(1_000_000, 3, hash_seed=1) == traffic(1_000_000, 3, hash_seed=2)
