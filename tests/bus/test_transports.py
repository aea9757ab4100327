"""What every transport keeps: order by sender and lane, at most once, push-back, and whom a message is from."""

import asyncio
from collections.abc import Sequence

import pytest

import bus.simulated
import bus.zeromq
from bus.codec import Frame
from bus.message import CannotListen, Lane, NodeAddress, Overloaded, PeerLost
from bus.transport import Transport
from tests.bus.places import QUEUED, Place, everywhere, without_keys

Arrival = tuple[Lane, bytes, list[bytes]]


def listen(transport: Transport) -> list[Arrival]:
    """Start it; what arrives is in the list."""
    found: list[Arrival] = []

    def receive(lane: Lane, routing_id: bytes, frames: Sequence[Frame], *, more: bool = False) -> None:
        found.append((lane, routing_id, [bytes(frame) for frame in frames]))

    transport.start(receive)
    return found


def texts(found: list[Arrival], lane: Lane | None = None) -> list[bytes]:
    """First frames, of one lane or of both."""
    return [frames[0] for came_on, _, frames in found if lane in (None, came_on)]


def nobody() -> NodeAddress:
    return NodeAddress("nobody", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9", 1)


@everywhere
async def test_frames_arrive_as_they_were_sent_with_lane_and_sender(place: Place) -> None:
    a, b = place.join("a", 3), place.join("b", 4)
    listen(a)
    found = listen(b)
    frames: list[Frame] = [b"head", b"", bytearray(b"x" * 100_000), memoryview(b"tail")]
    a.send(b.address, Lane.BULK, frames)
    await place.until(lambda: len(found) == 1)
    a.send(b.address, Lane.CONTROL, [b"short"])
    await place.until(lambda: len(found) == 2)
    assert found == [
        (Lane.BULK, b"a/3", [b"head", b"", b"x" * 100_000, b"tail"]),
        (Lane.CONTROL, b"a/3", [b"short"]),
    ]


@everywhere
async def test_a_lane_keeps_the_order_of_each_sender_and_doubles_nothing(place: Place) -> None:
    senders = [place.join(name, 1) for name in ("a", "b", "c")]
    target = place.join("d", 1)
    found = listen(target)
    for sender in senders:
        listen(sender)
    for number in range(100):
        for sender in senders:
            for lane in Lane:
                while True:
                    try:
                        sender.send(target.address, lane, [b"%d" % number])
                        break
                    except Overloaded:
                        await asyncio.sleep(0.001)
    await place.until(lambda: len(found) >= 600)
    await place.quiet()
    for sender in senders:
        for lane in Lane:
            name = f"{sender.address.name}/1".encode()
            assert [int(frames[0]) for on, who, frames in found if who == name and on is lane] == list(range(100))


@everywhere
async def test_control_does_not_wait_for_bulk(place: Place) -> None:
    a, b = place.join("a", 1), place.join("b", 1)
    listen(a)
    found = listen(b)
    for lane in Lane:
        a.send(b.address, lane, [b"hello"])
    await place.until(lambda: len(found) == 2)
    for _ in range(QUEUED // 2):
        a.send(b.address, Lane.BULK, [b"block", bytes(16 << 20)])
    a.send(b.address, Lane.CONTROL, [b"abort"])
    await place.until(lambda: len(found) == QUEUED // 2 + 3)
    assert texts(found).index(b"abort") < QUEUED // 2 + 2, "it overtakes"


@everywhere
async def test_nothing_arrives_within_send(place: Place) -> None:
    a, b = place.join("a", 1), place.join("b", 1)
    listen(a)
    found = listen(b)
    a.send(b.address, Lane.CONTROL, [b"x"])
    assert found == []
    await place.until(lambda: bool(found))


@everywhere
async def test_a_node_can_send_to_itself(place: Place) -> None:
    a = place.join("a", 1)
    found = listen(a)
    a.send(a.address, Lane.CONTROL, [b"x"])
    await place.until(lambda: found == [(Lane.CONTROL, b"a/1", [b"x"])])


@everywhere
async def test_what_has_arrived_does_not_change_with_what_it_was_sent_from(place: Place) -> None:
    a, b = place.join("a", 1), place.join("b", 1)
    listen(a)
    kept: list[Frame] = []
    b.start(lambda lane, routing_id, frames, *, more=False: kept.extend(frames))
    data = bytearray(b"1" * 100_000)
    a.send(b.address, Lane.BULK, [data])
    await place.until(lambda: bool(kept))
    data[:] = b"2" * 100_000
    assert bytes(kept[0]) == b"1" * 100_000


@everywhere
async def test_a_full_queue_pushes_back_and_loses_nothing_that_it_took(place: Place) -> None:
    a, b = place.join("a", 1), place.join("b", 1)
    listen(a)
    for number in range(QUEUED):
        a.send(b.address, Lane.CONTROL, [b"%d" % number])  # b does not listen yet
        await asyncio.sleep(0)
    sent = QUEUED
    for _ in range(QUEUED):
        a.send(nobody(), Lane.CONTROL, [b"x"])
    with pytest.raises(Overloaded, match=f"{QUEUED} messages already wait for node nobody on the control lane"):
        a.send(nobody(), Lane.CONTROL, [b"too much"])
    found = listen(b)
    await place.until(lambda: len(found) == sent)
    assert texts(found) == [b"%d" % number for number in range(sent)]
    a.send(b.address, Lane.CONTROL, [b"again"])
    await place.until(lambda: len(found) == sent + 1)


@everywhere
async def test_the_queues_of_two_lanes_and_of_two_peers_are_their_own(place: Place) -> None:
    a, b = place.join("a", 1), place.join("b", 1)
    listen(a)
    found = listen(b)
    for _ in range(QUEUED):
        a.send(nobody(), Lane.CONTROL, [b"x"])
    with pytest.raises(Overloaded):
        a.send(nobody(), Lane.CONTROL, [b"too much"])
    a.send(nobody(), Lane.BULK, [b"x"])
    a.send(b.address, Lane.CONTROL, [b"x"])
    await place.until(lambda: len(found) == 1)


@everywhere
async def test_too_large_a_frame_is_refused_by_name(place: Place) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (bus.zeromq, bus.simulated):
            patch.setattr(module, "MAX_FRAME_BYTES", 1000)
        a, b = place.join("a", 1), place.join("b", 1)
        listen(a)
        found = listen(b)
        with pytest.raises(ValueError, match="array of 1001 bytes: at most 1000 travel in one"):
            a.send(b.address, Lane.BULK, [b"head", bytes(1001)])
        a.send(b.address, Lane.BULK, [b"head", bytes(1000)])
        await place.until(lambda: texts(found) == [b"head"])


@everywhere
async def test_an_address_that_is_none_is_a_lost_peer(place: Place) -> None:
    a = place.join("a", 1)
    listen(a)
    with pytest.raises(PeerLost, match="cannot connect to node b at 'garbage': Invalid argument"):
        a.send(NodeAddress("b", "garbage", "garbage", 1), Lane.CONTROL, [b"x"])


@everywhere
async def test_a_taken_place_is_refused(place: Place) -> None:
    a = place.join("a", 1)
    listen(a)
    with pytest.raises(CannotListen, match="Address already in use"):
        place.join("a", 2, like=a)


@everywhere
async def test_a_closed_transport_sends_and_hears_nothing(place: Place) -> None:
    a, b = place.join("a", 1), place.join("b", 1)
    found = listen(a)
    listen(b)
    a.close()
    a.close()
    with pytest.raises(PeerLost, match="node a has closed its connections"):
        a.send(b.address, Lane.CONTROL, [b"x"])
    b.send(a.address, Lane.CONTROL, [b"x"])
    await place.quiet()
    assert found == []


@without_keys
async def test_what_was_sent_before_closing_still_leaves(place: Place) -> None:
    a, b = place.join("a", 1), place.join("b", 1)
    listen(a)
    found = listen(b)
    for number in range(QUEUED):
        a.send(b.address, Lane.CONTROL, [b"%d" % number])
    a.close()
    await place.until(lambda: texts(found) == [b"%d" % number for number in range(QUEUED)])


@everywhere
async def test_what_waits_for_a_node_arrives_once_it_listens(place: Place) -> None:
    a, first = place.join("a", 1), place.join("b", 1)
    listen(a)
    listen(first)
    first.close()
    for number in range(QUEUED):
        a.send(first.address, Lane.CONTROL, [b"%d" % number])
    await place.quiet()
    second = place.join("b", 2, like=first)
    found = listen(second)
    await place.until(lambda: texts(found) == [b"%d" % number for number in range(QUEUED)])


@everywhere
async def test_a_successor_at_the_same_place_hears_what_is_sent_after_its_predecessor_was_killed(place: Place) -> None:
    a, first = place.join("a", 1), place.join("b", 1)
    listen(a)
    before = listen(first)
    a.send(first.address, Lane.CONTROL, [b"before"])
    await place.until(lambda: bool(before))
    place.kill(first)
    second = place.join("b", 2, like=first)
    after = listen(second)
    answers = 0
    while not after:  # what meets the broken connection may be lost
        try:
            a.send(first.address, Lane.CONTROL, [b"%d" % answers])
            answers += 1
        except Overloaded:
            pass
        await asyncio.sleep(0.01)
    await place.quiet()
    numbers = [int(text) for text in texts(after)]
    assert numbers == sorted(set(numbers))
    assert texts(before) == [b"before"]


@everywhere
async def test_a_killed_sender_sends_nothing_more_and_its_successor_is_another_sender(place: Place) -> None:
    first, b = place.join("a", 1), place.join("b", 1)
    listen(first)
    found = listen(b)
    first.send(b.address, Lane.CONTROL, [b"first"])
    await place.until(lambda: bool(found))
    place.kill(first)
    second = place.join("a", 2)
    listen(second)
    second.send(b.address, Lane.CONTROL, [b"second"])
    await place.until(lambda: len(found) == 2)
    assert found == [(Lane.CONTROL, b"a/1", [b"first"]), (Lane.CONTROL, b"a/2", [b"second"])]


@everywhere
async def test_disconnecting_drops_what_waits_and_what_follows_arrives(place: Place) -> None:
    a, b = place.join("a", 1), place.join("b", 1)
    listen(a)
    listen(b)
    b.close()
    for _ in range(QUEUED):
        a.send(b.address, Lane.CONTROL, [b"dropped"])
    a.disconnect(b.address)
    a.send(b.address, Lane.CONTROL, [b"kept"])
    found = listen(place.join("b", 2, like=b))
    await place.until(lambda: bool(found))
    await place.quiet()
    assert texts(found) == [b"kept"]


@everywhere
async def test_a_node_is_left_anywhere_but_where_it_is_now(place: Place) -> None:
    a, b, c = place.join("a", 1), place.join("b", 1), place.join("c", 1)
    listen(a)
    listen(b)
    listen(c)
    b.close()
    c.close()
    later = place.join("b", 2)
    for gone, text in ((b, b"dropped"), (c, b"another's")):
        a.send(gone.address, Lane.CONTROL, [text])
    a.send(later.address, Lane.CONTROL, [b"kept"])
    a.keep("b", {later.address.control, later.address.bulk})
    found, at_earlier_place, others = (
        listen(later),
        listen(place.join("b", 3, like=b)),
        listen(place.join("c", 2, like=c)),
    )
    await place.until(lambda: bool(found) and bool(others))
    await place.quiet()
    assert (texts(found), texts(at_earlier_place), texts(others)) == ([b"kept"], [], [b"another's"])


@everywhere
async def test_what_cannot_be_delivered_does_not_keep_back_what_follows(place: Place) -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(str(context.get("exception"))))
    a, b = place.join("a", 1), place.join("b", 1)
    listen(a)
    found: list[bytes] = []

    def receive(lane: Lane, routing_id: bytes, frames: Sequence[Frame], *, more: bool = False) -> None:
        found.append(bytes(frames[0]))
        if frames[0] == b"1":
            raise ValueError("a fault of ours")

    b.start(receive)
    for number in range(5):
        a.send(b.address, Lane.CONTROL, [b"%d" % number])
    await place.until(lambda: len(found) == 5)
    assert reported == ["a fault of ours"]


@everywhere
async def test_what_was_sent_before_closing_still_leaves_where_a_connection_stands(place: Place) -> None:
    a, b = place.join("a", 1), place.join("b", 1)
    listen(a)
    found = listen(b)
    a.send(b.address, Lane.CONTROL, [b"hello"])
    await place.until(lambda: texts(found) == [b"hello"])
    for number in range(QUEUED // 2):
        a.send(b.address, Lane.CONTROL, [b"%d" % number])
    a.close()
    await place.until(lambda: texts(found) == [b"hello", *(b"%d" % number for number in range(QUEUED // 2))])
