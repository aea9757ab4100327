"""Hot spots, from the engines' telemetry to the requests that move: the real proxy and watch, on virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.core import Actor, Node, handler
from actors.proxy.engines.load import EngineLoad
from actors.proxy.engines.protocol import GenerateRequest
from actors.proxy.messages import Accepted, Add, DescribeProxy, EngineState, MoveTrajectories, Moving, ProxyState
from bus.simulated import Link, SimulatedNetwork
from bus.virtual_time import run
from coordinator.engines import Engines
from coordinator.leadership import SOLE, Authority
from coordinator.scheduling.hotspots import COOL, HOT, KEEP_S
from coordinator.scheduling.hotwatch import HotWatch
from tests.scheduling.heat import Play, Town, town

H20S = {f"e{number}": "H20" for number in range(4)}
PLAY = Play(turns=200, opening=30_000)
MANY = 32
"""Trajectories that an H20 alone cannot keep up with: each asks for 4% of it (1,200 tokens to prefill at 139 us, every
four seconds). Eight of them wait on average, for 1.3 s, and each would let as many wait as long; their prefixes would
take 4.2 s and more elsewhere. So none goes elsewhere by itself."""
SHORT = Play(turns=200)
OPENED_S = 150
"""In which an H20 has computed their first prompts."""
LAST_S = 15.0
"""In which a request ends at the engine that it is not moved from, because versions differ during a swap."""


def at_once(story: Callable[[Town], Coroutine[Any, Any, None]], *, seed: int = 0, link: Link | None = None) -> None:
    async def main() -> None:
        async with town(H20S, seed=seed, link=link) as made:
            await story(made)

    run(main(), seed=seed)


async def skewed(made: Town, count: int = MANY, play: Play = PLAY) -> None:
    """All trajectories on one engine, because it was alone when they began; the others come up after that."""
    await made.serve("e0")
    for number in range(count):
        made.players.begin(f"t{number}", play)
    await made.go_on(OPENED_S if play.opening else 3)
    for name in ("e1", "e2", "e3"):
        await made.serve(name)


def check_players(made: Town, *, twice: bool = False) -> None:
    """No request failed or was answered twice, and every token is the one that its seed and place ask for. ``twice``:
    an engine died; what it had answered in its last moment is answered again."""
    players = made.players
    assert players.wrong == []
    assert players.failures == []
    assert twice or [id_ for id_, count in players.answers.items() if count > 1] == []


async def check_none_lost(made: Town) -> None:
    """Whatever has waited for longer than messages travel is known to the proxy."""
    waiting = made.players.waiting()
    await asyncio.sleep(0.2)
    proxy = made.proxy
    assert waiting & made.players.waiting() <= set(proxy._where) | set(proxy._queued)
    assert set(proxy._where) == {id_ for engine in proxy._engines.values() for id_ in engine.in_flight}


def check_no_way_back(made: Town) -> None:
    """No trajectory is moved by order again within the cool-down, nor played meanwhile where it came from, but for the
    request that it had there (``LAST_S``)."""
    moved: dict[str, float] = {}
    for at, trajectories, source in made.moves:
        for trajectory in trajectories:
            assert at - moved.get(trajectory, -math.inf) >= KEEP_S, f"{trajectory} is moved again at {at:.0f} s"
            moved[trajectory] = at
            turns = made.players.engines.get(trajectory, [])
            back = [when for when, engine in turns if engine == source and at + LAST_S < when < at + KEEP_S]
            assert back == [], f"{trajectory}, moved from {source} at {at:.0f} s, is played there"


def test_what_waits_for_its_version_takes_no_place() -> None:
    async def story(made: Town) -> None:
        await made.serve("e0")
        request = GenerateRequest("t0/0", "t0", np.zeros(8, np.int32), 1, seed=1, from_version=1)
        await made.node.ask(made.proxy.ref, Add(request, made.players.ref), Accepted, timeout_s=30.0)
        await made.go_on(4)
        (load,) = [engine.load for engine in (await made.describe()).engines if engine.name == "e0"]
        assert load is not None
        assert (load.occupancy, load.busy) == (0.0, 0.0)
        await made.swap("e0", 1)
        await made.go_on(2)
        assert made.players.answers == {"t0/0": 1}

    at_once(story)


def test_a_skewed_load_is_evened_out_within_a_minute_and_stays_so() -> None:
    async def story(made: Town) -> None:
        made.watch()
        await skewed(made)
        start = made.history[-1][0]
        await made.go_on(91)
        assert made.mean("e0", start - 12, start) > HOT
        for name in H20S:
            assert made.mean(name, start + 60, start + 90) < HOT
        held = {engine.name: engine.trajectories for engine in (await made.describe()).engines}
        assert sum(held.values()) == MANY
        assert max(held.values()) <= MANY / 2
        assert 1 <= len(made.said) <= 3, "one order to each of the others"
        assert max(at for at, _ in made.said) < start + 30
        check_players(made)
        check_no_way_back(made)
        await check_none_lost(made)
        moved = sum(len(trajectories) for _, trajectories, _ in made.moves)
        assert moved >= MANY - max(held.values()) - 1

    at_once(story)


def test_without_the_watch_it_stays_skewed() -> None:
    """So what the test above sees is the watch's doing."""

    async def story(made: Town) -> None:
        await skewed(made)
        await made.go_on(60)
        assert made.mean("e0", 40, 60) > HOT
        assert [engine.trajectories for engine in (await made.describe()).engines] == [MANY, 0, 0, 0]

    at_once(story)


def longest_heat(made: Town) -> int:
    """Seconds for which the mean of the last ten was above the mark without a break, beside an engine with room."""
    longest = lasting = dict.fromkeys(H20S, 0)
    for at, _ in made.history[9:]:
        means = {name: made.mean(name, at - 9.5, at + 0.5) for name in H20S if made.told(name, at)}
        room = min(means.values()) < COOL
        lasting = {name: lasting[name] + 1 if room and means.get(name, 0.0) > HOT else 0 for name in H20S}
        longest = {name: max(longest[name], lasting[name]) for name in H20S}
    return max(longest.values())


async def storm(made: Town, seed: int) -> None:
    """Another skew of other trajectories; in half of the seeds an engine dies in the middle of a move, in half of them
    the engines swap to another version one after the other."""
    chance = random.Random(seed)
    made.watch()
    await skewed(made, chance.randint(20, 40), Play(turns=chance.randint(10, 60), response=chance.choice([1, 3, 30])))
    while not made.said and made.history[-1][0] < 30:
        await made.go_on(1)
    dies = chance.random() < 0.5
    if dies:
        name = chance.choice(["e0", "e1"])
        await made.kill(name)
        await made.serve(name)
    for number in range(10):
        made.players.begin(f"late{number}", SHORT)
    if chance.random() < 0.5:
        for name in chance.sample(sorted(H20S), len(H20S)):
            await made.swap(name, 1)
            await made.go_on(chance.randint(0, 3))
    await made.go_on(75 - int(made.history[-1][0]))
    assert longest_heat(made) < 45, made.said
    assert len(made.said) <= 4 * len(H20S), "a giver rests for 18 s, and has three others to give to"
    check_players(made, twice=dies)
    check_no_way_back(made)
    await check_none_lost(made)


UNEVEN = Link(latency_s=0.001, jitter_s=0.003)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_no_request_is_lost_or_doubled_and_nothing_goes_to_and_fro(seed: int) -> None:
    at_once(lambda made: storm(made, seed), seed=seed, link=UNEVEN)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(100, 140))
def test_whatever_happens_over_many_seeds(seed: int) -> None:
    at_once(lambda made: storm(made, seed), seed=seed, link=UNEVEN)


def test_an_engine_whose_telemetry_stops_neither_gives_nor_receives() -> None:
    async def story(made: Town) -> None:
        await skewed(made)
        await made.go_on(2)
        made.hosts["e0"].telling = made.hosts["e1"].telling = False
        made.watch()
        await made.go_on(25)
        assert made.said == [], "the hot one has not been heard of"
        made.hosts["e0"].telling = True
        await made.go_on(20)
        assert {text.split()[6].rstrip(":") for _, text in made.said} == {"e2", "e3"}

    at_once(story)


# ---- a proxy that only says what the test wants --------------------------------------------------------------------


def engine(name: str, load: float | None, trajectories: int, **more: Any) -> EngineState:
    device = more.pop("device", f"GPU-{name}")
    figure = more.pop("figure", "gpu_utilisation")
    told = EngineLoad(figure=figure, load=load, occupancy=0.5, busy=0.5, devices=(device,))
    state = EngineState(name, "serving", "H800", 1, trajectories, 0, 64, {}, trajectories, told, 0.1)
    return msgspec.structs.replace(state, **more)


class ScriptedProxy(Actor):
    def __init__(self, engines: list[EngineState]) -> None:
        self.engines = engines
        self.orders: list[tuple[str, str, int]] = []
        self.why: list[str] = []

    @handler
    async def describe(self, message: DescribeProxy) -> ProxyState:
        return ProxyState(self.engines, 0, 0, {})

    @handler
    async def move(self, message: MoveTrajectories) -> Moving:
        self.orders.append((message.source, message.target, message.trajectories))
        self.why.append(message.why)
        return Moving(idle=message.trajectories)


class Unsure(Authority):
    epoch = 1

    def leads(self) -> bool:
        return False

    async def certain(self) -> None:
        raise AssertionError("nobody waits")


def ordered(
    engines: list[EngineState], *, seconds: float = 14.0, apart: bool = False, authority: Authority = SOLE
) -> ScriptedProxy:
    """What the watch does about engines that stay as they are."""

    async def main() -> ScriptedProxy:
        async with Node("control", transport=SimulatedNetwork(seed=0).join("control")) as node:
            proxy = ScriptedProxy(engines)
            ref = await node.spawn(lambda: proxy, "proxy")
            engines_of_it = Engines(node, lambda: [ref])
            watch = HotWatch(node, engines_of_it, apart=apart, say=lambda text: None, authority=authority)
            running = node.background(watch.run())
            await asyncio.sleep(seconds)
            running.cancel()
            return proxy

    return run(main())


HOT_ONE = engine("e0", 0.95, 19)
COOL_ONE = engine("e1", 0.25, 5)


def test_a_hot_engine_gives_as_many_as_even_both_out_and_the_reason_names_the_figure() -> None:
    """5% each: after 7 moves both are at 60%."""
    proxy = ordered([HOT_ONE, COOL_ONE])
    assert proxy.orders == [("e0", "e1", 7)]
    assert proxy.why[0].endswith("(gpu utilisation)")
    places = [engine("e0", 0.95, 19, figure="occupancy"), engine("e1", 0.25, 5, figure="occupancy")]
    proxy = ordered(places)
    assert proxy.orders == [("e0", "e1", 7)]
    assert proxy.why[0].endswith("(occupancy)")


def test_who_is_not_certain_to_lead_orders_nothing() -> None:
    assert ordered([HOT_ONE, COOL_ONE], authority=Unsure()).orders == []


def test_a_new_leader_does_not_undo_what_the_last_one_has_done() -> None:
    given = [engine("e0", 0.95, 19, took_s=20.0), engine("e1", 0.25, 5, gave_s=20.0)]
    assert ordered(given, seconds=30.0).orders == []


def test_engines_on_one_gpu_are_one_and_nothing_moves_between_them() -> None:
    """19 trajectories on the hot GPU, 12 of them on e0; of the cool one's engines e3 has fewer requests."""
    shared = [
        engine("e0", 0.95, 12, device="GPU-a"),
        engine("e1", 0.95, 7, device="GPU-a"),
        engine("e2", 0.25, 4, device="GPU-b"),
        engine("e3", 0.25, 1, device="GPU-b"),
    ]
    assert ordered(shared).orders == [("e0", "e3", 7)]
    assert ordered(shared[:2]).orders == []


@pytest.mark.parametrize(
    "cool",
    [
        engine("e1", None, 5),
        engine("e1", 0.25, 5, load_age_s=6.0),
        engine("e1", 0.25, 5, state="suspended"),
        engine("e1", 0.25, 5, state="cold"),
        msgspec.structs.replace(engine("e1", 0.25, 5), load=None),
    ],
    ids=["no figure", "an old one", "it swaps", "no weights", "never told"],
)
def test_an_engine_of_which_nothing_is_known_receives_nothing(cool: EngineState) -> None:
    assert ordered([HOT_ONE, cool]).orders == []


def test_where_tasks_have_classes_each_class_is_evened_out_by_itself() -> None:
    other = engine("e1", 0.25, 5, hardware_class="H20")
    assert ordered([HOT_ONE, other], apart=True).orders == []
    assert len(ordered([HOT_ONE, other], apart=False).orders) == 1
    assert ordered([HOT_ONE, other, engine("e2", 0.25, 5)], apart=True).orders == [("e0", "e2", 7)]


def test_one_engine_has_nowhere_to_give_to_until_another_proxy_brings_more() -> None:
    async def main() -> None:
        async with Node("control", transport=SimulatedNetwork(seed=0).join("control")) as node:
            alone, both = ScriptedProxy([HOT_ONE]), ScriptedProxy([HOT_ONE, COOL_ONE])
            there = [await node.spawn(lambda: alone, "proxy-1")]
            watch = HotWatch(node, Engines(node, lambda: there), apart=False, say=lambda text: None)
            running = node.background(watch.run())
            await asyncio.sleep(14.0)
            there[:] = [await node.spawn(lambda: both, "proxy-2")]
            await asyncio.sleep(14.0)
            running.cancel()
            assert (alone.orders, both.orders) == ([], [("e0", "e1", 7)])

    run(main())
