"""An env host among several real proxies, whose engines answer after a while: which of them a trajectory is with, and
that none is lost or played twice when proxies are."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from actors.core import Actor, Node, Ref, handler
from actors.core.ring import Ring
from actors.env.proxies import Proxies
from actors.proxy.engines.protocol import Completion, EngineLimits
from actors.proxy.messages import (
    Acknowledged,
    Done,
    EngineReady,
    Finished,
    HostAdd,
    HostForget,
    HostResume,
    Progress,
    ProxySet,
    Resume,
    Served,
    ServingProxy,
)
from actors.proxy.proxy import LLMProxy
from bus import virtual_time
from bus.message import NodeAddress
from bus.simulated import Link, SimulatedNetwork
from tests.env_manager.support import RIGHT, World, world
from tests.proxy.support import ScriptedFleet
from tests.support.loops import until

PLACES = 32


class Engine(Actor):
    """Answers each request with one token, after up to four seconds."""

    def __init__(self, name: str, proxy: Ref, chance: random.Random) -> None:
        self._name = name
        self._proxy = proxy
        self._chance = chance
        self.answered: list[str] = []
        self.dead = False

    @handler
    async def add(self, message: HostAdd) -> None:
        for request, reply_to in zip(message.requests, message.reply_to, strict=True):
            delay_s = self._chance.uniform(0.1, 4.0)
            asyncio.get_running_loop().call_later(delay_s, self._answer, request.request_id, reply_to)

    def _answer(self, id_: str, reply_to: Ref) -> None:
        if self.dead:
            return
        tokens, versions = np.full(1, RIGHT, np.int32), np.zeros(1, np.int32)
        completion = Completion(id_, tokens, np.full(1, -0.5, np.float32), versions, "length")
        self.answered.append(id_)
        self.node.tell(reply_to, Finished(self._name, [completion]))
        self.node.tell(self._proxy, Served(self._name, [id_], 1, sampled=[1]))

    @handler
    async def forget(self, message: HostForget) -> None:
        """It keeps nothing."""

    @handler
    async def resume(self, message: HostResume) -> Acknowledged:
        return Acknowledged()


class Stand:
    """A proxy with two engines, on a node of its own."""

    def __init__(self, network: SimulatedNetwork, name: str, chance: random.Random) -> None:
        self._transport = network.join(name)
        self.node = Node(name, transport=self._transport)
        self._chance = chance
        self.ref: Ref
        self.proxy: LLMProxy
        self.engines: list[Engine] = []

    async def open(self, hardware_class: str = "CPU", failed: Callable[[BaseException], None] | None = None) -> Stand:
        await self.node.__aenter__()
        names = [f"{self.node.address.name}.engine-{index}" for index in range(2)]
        self.proxy = LLMProxy(dict.fromkeys(names, hardware_class), {}, failed=failed or _unexpected)
        self.proxy.fleet = ScriptedFleet()
        self.ref = await self.node.spawn(lambda: self.proxy, "proxy", restarts=0)
        for name in names:
            engine = Engine(name, self.ref, self._chance)
            host = await self.node.spawn(lambda engine=engine: engine, name, restarts=0)  # type: ignore[misc]
            ready = EngineReady(name, host, EngineLimits(PLACES // 2, 64), 0.0)
            await self.node.ask(self.ref, ready, Acknowledged, timeout_s=5.0)
            progress: Any = Progress
            async for answer in self.node.stream(self.ref, Resume(name, 0), progress, timeout_s=5.0):
                assert not isinstance(answer, Done) or answer.version == 0
            self.engines.append(engine)
        return self

    def serving(self, hardware_class: str = "CPU", places: int = PLACES) -> ServingProxy:
        return ServingProxy(self.ref, {hardware_class: places})

    @property
    def trajectories(self) -> set[str]:
        """That were answered here."""
        return {id_.partition("/")[0] for engine in self.engines for id_ in engine.answered}

    async def crash(self) -> None:
        self._transport.crash()
        await self.node.close()


def _unexpected(error: BaseException) -> None:
    raise error


def _check(made: World, count: int) -> None:
    """Each was played to its end, once."""
    assert Counter(each.ticket for each in made.outcomes) == Counter(f"t{number}" for number in range(count))
    assert {(each.state, each.reason) for each in made.outcomes} == {("stored", "")}
    assert {each.turns for each in made.outcomes} == {3}
    assert set(made.store.kept) == {f"t{number}" for number in range(count)}


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(3, 30))])
def test_whatever_becomes_of_the_proxies_every_trajectory_is_played_once_while_one_serves(seed: int) -> None:
    """Others come, and others crash or are cut off, which is known a while later."""
    count, chance = 100, random.Random(seed)

    async def story() -> None:
        network = SimulatedNetwork(seed=seed, link=Link(latency_s=0.005, jitter_s=0.02))
        proxies = Proxies(patience_s=60.0, late_s=40.0)
        stands = {name: await Stand(network, name, chance).open() for name in ("p0", "p1")}
        gone: list[Stand] = []

        def tell() -> None:
            order[0] += 1
            proxies.follow(ProxySet([stand.serving() for stand in stands.values()], (1, order[0])))

        order = [0]
        tell()
        async with world(network=network, proxies=proxies, concurrent=32, turn_timeout_s=60.0) as made:
            made.start(*(f"t{number}" for number in range(count)))
            for event in range(6):
                await asyncio.sleep(chance.uniform(0.5, 3.0))
                if len(stands) > 1 and chance.random() < 0.6:
                    name = chance.choice(sorted(stands))
                    stand = stands.pop(name)
                    gone.append(stand)
                    if chance.random() < 0.5:
                        await stand.crash()
                        await asyncio.sleep(chance.uniform(0.05, 1.0))
                    else:
                        network.partition({name}, {"control"}, cut=True)
                        await asyncio.sleep(chance.uniform(4.0, 20.0))
                        network.heal()
                else:
                    name = f"p{event + 2}"
                    stands[name] = await Stand(network, name, chance).open()
                tell()
            await until(lambda: len(made.outcomes) >= count)
            _check(made, count)
            assert proxies.trajectories == 0
            counters = (await made.describe()).counters
            assert counters.get("requests_of_an_earlier_proxy", 0) > 0 or not gone
            for stand in (*stands.values(), *gone):
                await stand.node.close()

    virtual_time.run(story())


def test_only_the_trajectories_of_a_proxy_that_is_gone_move_and_a_new_one_gets_new_ones() -> None:
    chance = random.Random(0)

    async def story() -> None:
        network = SimulatedNetwork(seed=0, link=Link(latency_s=0.005))
        first, second, third = [await Stand(network, name, chance).open() for name in ("p0", "p1", "p2")]
        proxies = Proxies(ProxySet([first.serving(), second.serving()]), patience_s=60.0)
        async with world(network=network, proxies=proxies, concurrent=100, turn_timeout_s=60.0) as made:
            made.worker.length = 20
            made.start(*(f"t{number}" for number in range(60)))
            await asyncio.sleep(5.0)
            of_first, of_second = first.trajectories, second.trajectories
            assert of_first | of_second == {f"t{number}" for number in range(60)}
            assert not of_first & of_second
            assert 15 <= len(of_first) <= 45
            proxies.follow(ProxySet([first.serving(), second.serving(), third.serving()]))
            await asyncio.sleep(5.0)
            assert (first.trajectories, second.trajectories, third.trajectories) == (of_first, of_second, set())
            await second.crash()
            proxies.follow(ProxySet([first.serving(), third.serving()]))
            made.start(*(f"t{number}" for number in range(60, 90)))
            await until(lambda: len(made.outcomes) == 90)
            moved = (first.trajectories | third.trajectories) & of_second
            assert moved == of_second  # none of them had ended, and each goes on at one of the two
            assert not third.trajectories & of_first
            assert not first.trajectories & third.trajectories
            assert len(third.trajectories & {f"t{number}" for number in range(60, 90)}) > 5
            for stand in (first, third):
                await stand.node.close()

    virtual_time.run(story())


def test_a_proxy_that_serves_nothing_is_given_nothing_while_another_serves() -> None:
    chance = random.Random(0)

    async def story() -> None:
        network = SimulatedNetwork(seed=0, link=Link(latency_s=0.005))
        first, second = [await Stand(network, name, chance).open() for name in ("p0", "p1")]
        proxies = Proxies(ProxySet([first.serving(), second.serving(places=0)]))
        async with world(network=network, proxies=proxies, concurrent=100, turn_timeout_s=60.0) as made:
            made.start(*(f"t{number}" for number in range(40)))
            await until(lambda: len(made.outcomes) == 40)
            assert second.trajectories == set()
            for stand in (first, second):
                await stand.node.close()

    virtual_time.run(story())


def test_when_a_proxy_loses_its_last_engine_another_one_goes_on_with_what_it_was_asked() -> None:
    chance = random.Random(0)

    async def story() -> None:
        network = SimulatedNetwork(seed=0, link=Link(latency_s=0.005))
        told: list[BaseException] = []
        first = await Stand(network, "p0", chance).open(failed=told.append)
        second = await Stand(network, "p1", chance).open()
        proxies = Proxies(ProxySet([first.serving(), second.serving()]), patience_s=60.0)
        async with world(network=network, proxies=proxies, concurrent=100, turn_timeout_s=60.0) as made:
            made.start(*(f"t{number}" for number in range(40)))
            await asyncio.sleep(0.05)
            for engine in range(2):
                first.proxy.engine_died(f"p0.engine-{engine}", "killed", restarting=False)
            assert len(told) == 1
            await asyncio.sleep(1.0)  # until the leader has let it go, and says so
            proxies.follow(ProxySet([second.serving()]))
            await until(lambda: len(made.outcomes) == 40)
            _check(made, 40)
            for stand in (first, second):
                await stand.node.close()

    virtual_time.run(story())


def test_what_waits_at_a_proxy_whose_engines_restart_goes_on_at_one_that_serves() -> None:
    chance = random.Random(0)

    async def story() -> None:
        network = SimulatedNetwork(seed=0, link=Link(latency_s=0.005))
        first, second = [await Stand(network, name, chance).open() for name in ("p0", "p1")]
        proxies = Proxies(ProxySet([first.serving(), second.serving()]), patience_s=60.0)
        async with world(network=network, proxies=proxies, concurrent=100, turn_timeout_s=60.0) as made:
            made.start(*(f"t{number}" for number in range(20)))
            await until(lambda: len(first.proxy._where) > 5)
            for index, engine in enumerate(first.engines):
                engine.dead = True
                first.proxy.engine_died(f"p0.engine-{index}", "killed", restarting=True)
            proxies.follow(ProxySet([first.serving(places=0), second.serving()]))
            await until(lambda: len(made.outcomes) == 20)
            _check(made, 20)
            assert (first.proxy._queued, first.proxy._where, proxies.trajectories) == ({}, {}, 0)
            for stand in (first, second):
                await stand.node.close()

    virtual_time.run(story())


def test_what_was_asked_before_any_served_waits_where_it_is_until_that_one_serves() -> None:
    chance = random.Random(0)

    async def story() -> None:
        network = SimulatedNetwork(seed=0, link=Link(latency_s=0.005))
        first, second = [await Stand(network, name, chance).open() for name in ("p0", "p1")]
        proxies = Proxies(ProxySet([first.serving(places=0), second.serving(places=0)]))
        async with world(network=network, proxies=proxies, concurrent=100, turn_timeout_s=60.0) as made:
            made.start(*(f"t{number}" for number in range(20)))
            await until(lambda: len(first.proxy._where) > 5)
            proxies.follow(ProxySet([first.serving(places=0), second.serving()]))
            await until(lambda: len(made.outcomes) == 20)
            assert "requests_of_an_earlier_proxy" not in (await made.describe()).counters
            for stand in (first, second):
                await stand.node.close()

    virtual_time.run(story())


# ---- placement alone ------------------------------------------------------------------------------------------------


def proxy(name: str, **places: int) -> ServingProxy:
    return ServingProxy(Ref(NodeAddress(name, f"tcp://{name}:1", "", 1), "proxy"), places)


def placed(proxies: Proxies, task: str = "default", *, since: int = 0) -> Iterator[str]:
    """Where new trajectories of a task go."""
    for number in range(since, since + 2_000):
        found = proxies.of(f"{task}-{number}", task)
        assert found is not None
        yield found.node.name


def test_new_trajectories_are_shared_out_by_places() -> None:
    shares = Counter(placed(Proxies(ProxySet([proxy("small", CPU=16), proxy("large", CPU=48)]))))
    assert 0.8 * 1_500 < shares["large"] < 1.2 * 1_500


def test_a_task_with_a_declared_class_goes_to_proxies_that_have_places_of_it() -> None:
    proxies = Proxies(
        ProxySet([proxy("a", H800=16), proxy("b", H20=48), proxy("c", H20=16, H800=16)]),
        affinity={"games": "H800", "math": "H20"},
    )
    games, math, other = (Counter(placed(proxies, task)) for task in ("games", "math", "other"))
    assert (set(games), set(math), set(other)) == ({"a", "c"}, {"b", "c"}, {"a", "b", "c"})
    assert 0.8 * 1_500 < math["b"] < 1.2 * 1_500
    proxies.follow(ProxySet([proxy("a", H800=0), proxy("b", H20=48)]))
    assert set(placed(proxies, "games", since=5_000)) == {"b"}  # better another class than none


def test_every_env_host_places_alike() -> None:
    members = [proxy(name, CPU=places) for name, places in (("a", 8), ("b", 16), ("c", 8))]
    one, other = Proxies(ProxySet(members)), Proxies(ProxySet(members[::-1]))
    assert list(placed(one)) == list(placed(other))


def test_while_none_serves_each_proxy_queues_its_share() -> None:
    shares = Counter(placed(Proxies(ProxySet([proxy("a"), proxy("b", CPU=0)]))))
    assert 0.8 * 1_000 < shares["a"] < 1.2 * 1_000


def test_only_the_rings_of_classes_whose_places_have_changed_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []

    def ring(shards: list[str], **settings: Any) -> Ring:
        made.append(shards)
        return Ring(shards, **settings)

    monkeypatch.setattr("actors.env.proxies.Ring", ring)
    proxies = Proxies(ProxySet([proxy("a", H800=16), proxy("b", H20=48)]), affinity={"games": "H800", "math": "H20"})
    for task in ("games", "math"):
        assert list(placed(proxies, task))
    assert made == [["a"], ["b"]]
    proxies.follow(ProxySet([proxy("a", H800=16), proxy("b", H20=48), proxy("c", H20=16)]))
    for task in ("games", "math"):
        assert list(placed(proxies, task, since=3_000))
    assert made == [["a"], ["b"], ["b", "c"]]
