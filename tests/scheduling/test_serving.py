"""What a proxy says of the places that it serves, in virtual time, to a coordinator that does not always answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actors.core import Node, Ref
from bus import virtual_time
from bus.message import DeadlineExceeded, NodeAddress
from bus.simulated import SimulatedNetwork
from coordinator.serving import Serving

PROXY = Ref(NodeAddress("p0", "tcp://p0:1", "", 1), "proxy")


def told(story: Callable[[Serving], None], *, deaf: int = 0, slow_s: float = 0.0) -> list[dict[str, int]]:
    """What the coordinator has heard within a minute, each time after ``slow_s``. ``deaf``: how many asks it misses."""
    heard: list[dict[str, int]] = []

    async def scenario() -> None:
        missed = 0

        async def announce(ref: Ref, places: dict[str, int]) -> None:
            nonlocal missed
            await asyncio.sleep(slow_s)
            if missed < deaf:
                missed += 1
                raise DeadlineExceeded("no answer within 10 s")
            assert ref == PROXY
            heard.append(places)

        async with Node("p0", transport=SimulatedNetwork(seed=0).join("p0")) as node:
            story(Serving(node, announce))
            await asyncio.sleep(60.0)

    virtual_time.run(scenario())
    return heard


def _serves_later(serving: Serving) -> None:
    """32 places, half of them after 5 s, none after 10."""
    serving.changed({"CPU": 32})
    serving.begin(PROXY)
    loop = asyncio.get_running_loop()
    loop.call_later(5.0, serving.changed, {"CPU": 16})
    loop.call_later(10.0, serving.changed, {})


def test_every_change_is_told_the_last_place_that_goes_too() -> None:
    assert told(_serves_later) == [{"CPU": 32}, {"CPU": 16}, {}]


def test_what_was_not_heard_is_said_again_as_it_is_by_then() -> None:
    assert told(_serves_later, deaf=3) == [{"CPU": 16}, {}]  # after 6 s for the first time
    assert told(_serves_later, deaf=1, slow_s=10.0) == [{}]


def test_nothing_is_said_before_the_coordinator_knows_of_the_proxy() -> None:
    assert told(lambda serving: serving.changed({"CPU": 32})) == []
