"""How long a peer may be silent before it is given up: by hand, and in virtual time on the bus."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core import Node
from actors.core.liveness import WINDOW, Patience
from bus.simulated import Link, SimulatedNetwork
from bus.virtual_time import run

LEAST, MOST = 5.0, 20.0


def silent(patience: Patience, pings: int) -> bool:
    return [patience.looked(heard=False) for _ in range(pings)][-1]


def test_a_peer_that_always_answered_is_given_up_after_the_least() -> None:
    patience = Patience(least=LEAST, most=MOST)
    assert not any(patience.looked(heard=True) for _ in range(100))
    assert not silent(patience, 4)
    assert silent(patience, 1)


def test_one_that_has_been_silent_before_is_given_three_times_as_long() -> None:
    patience = Patience(least=LEAST, most=MOST)
    silent(patience, 4)
    patience.looked(heard=True)
    assert not silent(patience, 11)
    assert silent(patience, 1)


def test_nobody_is_given_more_than_the_most() -> None:
    patience = Patience(least=LEAST, most=MOST)
    for pings in (4, 11, 19):
        assert not silent(patience, pings)
        patience.looked(heard=True)
    assert not silent(patience, 19)
    assert silent(patience, 1)


def test_a_silence_is_forgotten_after_the_window() -> None:
    patience = Patience(least=LEAST, most=MOST)
    silent(patience, 4)
    for _ in range(WINDOW):
        patience.looked(heard=True)
    assert patience.limit == 12.0
    patience.looked(heard=True)
    assert patience.limit == LEAST


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=60))
def test_silences_below_the_least_raise_no_alarm_and_death_is_found_by_the_most(bursts: list[tuple[bool, int]]) -> None:
    patience = Patience(least=LEAST, most=MOST)
    for heard, pings in bursts:
        for _ in range(pings):
            assert not patience.looked(heard=heard or patience.unanswered == 4)
    assert any(patience.looked(heard=False) for _ in range(int(MOST)))


def given_up(pauses: list[tuple[float, float]], *, cuts: bool = False, peer_dies: bool = False) -> list[float]:
    """When a watcher gave its peer up. ``pauses``: after so long, this process stands still (or, with ``cuts``, the
    network between the two) for so long."""
    lost: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = SimulatedNetwork(seed=1, link=Link(latency_s=0.01))
        theirs = network.join("b")
        async with Node("a", transport=network.join("a")) as a, Node("b", transport=theirs) as b:
            a.watch(b.address, silence_s=MOST, least_s=LEAST, on_lost=lambda why: lost.append(loop.time()))
            for after_s, for_s in pauses:
                await asyncio.sleep(after_s)
                if cuts:
                    network.partition({"a"}, {"b"}, cut=True)
                    await asyncio.sleep(for_s)
                    network.heal()
                else:
                    loop._now += for_s  # type: ignore[attr-defined]  # as after SIGCONT: what was due is late
            if peer_dies:
                theirs.crash()
            await asyncio.sleep(2 * MOST)

    run(main(), seed=1)
    return lost


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 1000.0)), max_size=20))
def test_pauses_of_the_watcher_raise_no_alarm(pauses: list[tuple[float, float]]) -> None:
    assert given_up(pauses) == []


@pytest.mark.parametrize("cut_s", [1.0, 3.0])
def test_short_cuts_of_the_network_raise_no_alarm(cut_s: float) -> None:
    assert given_up([(5.0, cut_s)] * 6, cuts=True) == []


def test_a_dead_peer_is_found_after_the_least_of_the_watchers_own_time() -> None:
    (at,) = given_up([], peer_dies=True)
    assert LEAST <= at <= LEAST + 2.0
