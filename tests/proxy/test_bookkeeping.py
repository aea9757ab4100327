"""What the proxy believes to be ahead of each engine, whatever happens to requests and engines: the real proxy over
simulated engines, on virtual time."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.proxy.engines.protocol import Begun
from actors.proxy.kept import pack
from actors.proxy.messages import Abort, Accepted, Acknowledged, Add, MoveTrajectories, Moving, Rebalance, Remove
from bus.virtual_time import run
from tests.proxy.support import request, world
from tests.scheduling.heat import Play, Town, town
from tests.support.loops import run as run_really
from tests.support.loops import until

CLASSES = {"a20": "H20", "b20": "H20", "c800": "H800"}
NAMES = sorted(CLASSES)
LONG_S = 3000.0
"""By then every trajectory has ended, even the one that computed its prefix anew at every turn."""


class Event(msgspec.Struct, frozen=True):
    what: str
    which: int
    wait_s: float


EVENTS = st.lists(
    st.builds(
        Event,
        st.sampled_from(["begin", "begin", "begin", "abort", "move", "die", "come back", "swap", "rebalance"]),
        st.integers(0, 11),
        st.sampled_from([0.0, 0.01, 0.3, 5.0]),
    ),
    min_size=5,
    max_size=30,
)


def check(made: Town) -> None:
    """At any time: sums are those of what is in flight, of which there is one record each."""
    proxy = made.proxy
    for engine in proxy._engines.values():
        assert engine._claims.keys() == engine._left.keys() == engine.in_flight.keys()
        assert engine.outstanding == sum(engine._left.values())
        assert engine.context == sum(claim.length for claim in engine._claims.values())
        pairs = zip(engine._left.values(), engine._claims.values(), strict=True)
        assert all(0 <= left <= claim.prefill_ns + claim.decode_ns for left, claim in pairs)
    assert proxy._where == {id_: engine.name for engine in proxy._engines.values() for id_ in engine.in_flight}
    counted = sum(group.in_flight for group in proxy._pool._groups.values())
    assert counted == len(proxy._where)
    assert sum(group.engines for group in proxy._pool._groups.values()) == len(CLASSES)


async def happen(made: Town, event: Event, number: int, up: set[str]) -> None:
    name, other = NAMES[event.which % 3], NAMES[(event.which // 3 + 1 + event.which) % 3]
    node, proxy = made.node, made.proxy.ref
    match event.what:
        case "begin":
            play = Play(turns=1 + event.which % 4, observation=300 * (1 + event.which), response=1 + 20 * event.which)
            made.players.begin(f"t{number}", play)
        case "abort":
            for id_ in sorted(made.players.waiting())[: 1 + event.which % 3]:
                await node.ask(proxy, Abort(id_), Acknowledged, timeout_s=30.0, retries=3)
        case "move":
            order = MoveTrajectories(name, other, 1 + event.which, "because")
            await node.ask(proxy, order, Moving, timeout_s=30.0, retries=3)
        case "die" if name in up:
            up.discard(name)
            await made.kill(name)
        case "come back" if name not in up:
            up.add(name)
            await made.serve(name, number)
        case "swap" if name in up:
            await made.swap(name, number)
        case "rebalance":
            await node.ask(proxy, Rebalance(), timeout_s=30.0, retries=3)


@settings(deadline=None, max_examples=25)
@given(EVENTS)
def test_nothing_is_left_ahead_of_an_engine_once_all_is_answered(events: list[Event]) -> None:
    async def story() -> None:
        async with town(CLASSES) as made:
            up = set(NAMES)
            for name in NAMES:
                await made.serve(name)
            for number, event in enumerate(events, start=1):
                await happen(made, event, number, up)
                check(made)
                await asyncio.sleep(event.wait_s)
                check(made)
            for name in set(NAMES) - up:
                await made.serve(name, len(events) + 1)
            begun = sum(event.what == "begin" for event in events)
            deadline = asyncio.get_running_loop().time() + LONG_S
            while made.players.ended + len({text.partition("/")[0] for text in made.players.failures}) < begun:
                assert asyncio.get_running_loop().time() < deadline, made.players.waiting()
                await asyncio.sleep(1.0)
            await asyncio.sleep(1.0)  # the engines tell of their last answers
            check(made)
            proxy = made.proxy
            assert (proxy._where, proxy._queued) == ({}, {})
            assert [engine.outstanding for engine in proxy._engines.values()] == [0, 0, 0]
            assert [engine.context for engine in proxy._engines.values()] == [0, 0, 0]
            assert proxy._prefixes.holder.keys() <= {text.partition("/")[0] for text in made.players.failures}

    run(story())


def test_what_is_ahead_of_an_engine_shrinks_as_its_host_tells_of_tokens() -> None:
    """A task that has not been seen is taken to sample all that it may: 60 tokens, of which a request brings 20."""

    async def story() -> None:
        async with world({"e0": "H20"}) as made:
            host = await made.serve("e0")
            engine = made.proxy._engines["e0"]
            asked = request("t/0")
            asked = msgspec.structs.replace(asked, max_tokens=60, begun=tokens(20))
            await made.node.ask(made.proxy.ref, Add(asked, made.asker.ref), Accepted, timeout_s=5)
            (claim,) = engine._claims.values()
            assert (claim.sampled, engine.outstanding) == (40, claim.prefill_ns + claim.decode_ns)
            await until(lambda: "t/0" in host.held)
            for since, count, left in ((20, 8, 32), (28, 22, 10)):
                report = pack("e0", [("t/0", since, tokens(count)), ("u/0", 0, tokens(9))])
                await made.node.ask(made.proxy.ref, report, Acknowledged, timeout_s=5)
                assert engine.outstanding == claim.decode_ns * left // 40
            host.answer("t/0")
            await until(lambda: not made.proxy._where)
            assert (engine.outstanding, engine.context) == (0, 0)

    run_really(story())


def tokens(count: int) -> Begun:
    return Begun(np.arange(count, dtype=np.int32), np.zeros(count, np.float32), np.zeros(count, np.int32))


def test_an_engine_that_is_removed_leaves_nothing_behind() -> None:
    async def story() -> None:
        async with town(CLASSES) as made:
            for name in NAMES:
                await made.serve(name)
            for number in range(6):
                made.players.begin(f"t{number}", Play(turns=2))
            await asyncio.sleep(0.1)
            assert sum(engine.outstanding > 0 for engine in made.proxy._engines.values()) >= 2
            await made.node.ask(made.proxy.ref, Remove("a20", "it lies"), Acknowledged, timeout_s=30.0)
            check(made)
            with pytest.raises(ValueError, match="no engine 'x'"):
                await made.node.ask(made.proxy.ref, Remove("x", "?"), Acknowledged, timeout_s=30.0)
            await asyncio.sleep(60.0)
            assert made.players.ended == 6
            assert (made.proxy._engines["a20"].outstanding, made.proxy._engines["a20"].state) == (0, "removed")

    run(story())
