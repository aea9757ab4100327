"""The proxy, two pools of engines and the rebinder: a task whose pool is full gets its next turns elsewhere."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from actors.core import Actor, Node, handler
from actors.proxy.messages import Acknowledged, DescribeProxy, EngineState, Prefer, ProxyState
from bus import virtual_time
from bus.simulated import SimulatedNetwork
from coordinator.engines import Engines
from coordinator.resources.rebinder import Rebinder
from coordinator.resources.rebinding import Marks
from tests.proxy.support import LIMITS, world
from tests.support.loops import run, until

DECLARED = {"default": "H20", "games": "H800"}
QUICK = Marks(hold_s=0.1, rest_s=60.0)


def test_a_task_moves_to_the_calm_pool_and_its_next_requests_go_there() -> None:
    """Four places an engine: two tasks fill the H20, the H800 rests; the one with fewer requests moves. The other one's
    requests go there only as long as the H20 is full."""

    async def story() -> None:
        said: list[str] = []
        async with world({"e20": "H20", "e800": "H800"}, DECLARED) as made:
            for name in ("e20", "e800"):
                await made.serve(name)
            for number in range(LIMITS.max_sequences - 1):
                assert await made.add(f"m{number}", domain="math") == "e20"
            assert await made.add("w0", domain="web") == "e20"
            rebinder = Rebinder(
                made.node,
                Engines(made.node, lambda: [made.proxy.ref]),
                DECLARED,
                say=said.append,
                marks=QUICK,
                look_every_s=0.02,
            )
            running = asyncio.create_task(rebinder.run())
            await until(lambda: said)
            assert said == ["web goes to H800 instead of H20: H20 is full (load 1.00), H800 is calm (load 0.00)"]
            assert await made.add("w1", domain="web") == "e800"
            assert await made.add("m8", domain="math") == "e800"
            await until(lambda: "m0" in made.hosts["e20"].held)
            made.hosts["e20"].answer("m0")
            await until(lambda: "m0" not in made.proxy._where)
            assert await made.add("m9", domain="math") == "e20"
            counters = (await made.describe()).counters
            assert (counters["rebindings"], counters["affinity_fallbacks_full"]) == (1, 1)
            assert (await made.engine("e20")).by_domain == {"math": 3, "web": 1}
            running.cancel()

    run(story())


def test_where_all_engines_are_alike_nothing_moves_and_it_goes_on_looking() -> None:
    async def story() -> None:
        said: list[str] = []
        async with world({"a": "H20", "b": "H20"}, DECLARED) as made:
            for name in ("a", "b"):
                await made.serve(name)
            rebinder = Rebinder(
                made.node, Engines(made.node, lambda: [made.proxy.ref]), DECLARED, say=said.append, look_every_s=0.02
            )
            running = asyncio.create_task(rebinder.run())
            await asyncio.sleep(0.3)
            assert (running.done(), said) == (False, [])
            running.cancel()

    run(story())


class Described(Actor):
    """A proxy with these engines, which takes orders."""

    def __init__(self, *engines: EngineState) -> None:
        self._engines = list(engines)
        self.orders: list[tuple[str, str]] = []

    @handler
    async def describe(self, message: DescribeProxy) -> ProxyState:
        return ProxyState(self._engines, 0, 0, {})

    @handler
    async def prefer(self, message: Prefer) -> Acknowledged:
        self.orders.append((message.domain, message.hardware_class))
        return Acknowledged()


def _engine(hardware_class: str, **tasks: int) -> EngineState:
    """Four places, and so many requests of tasks that prefer the H20."""
    in_flight = sum(tasks.values())
    return EngineState(f"e-{hardware_class}", "serving", hardware_class, 1, in_flight, 0, places=4, by_domain=tasks)


def _looked_at(*proxies: Described) -> list[str]:
    """What the rebinder says of these, p0 and p1, until it has ordered something once."""
    said: list[str] = []

    async def story() -> None:
        network = SimulatedNetwork(seed=0)
        async with AsyncExitStack() as opened:
            names = ("control", "p0", "p1")
            control, *nodes = [
                await opened.enter_async_context(Node(name, transport=network.join(name))) for name in names
            ]
            refs = [
                await node.spawn(lambda: proxy, "proxy", restarts=0)  # noqa: B023 (called at once)
                for node, proxy in zip(nodes, proxies, strict=True)
            ]
            running = asyncio.create_task(
                Rebinder(control, Engines(control, lambda: refs), DECLARED, say=said.append).run()
            )
            await asyncio.sleep(15.0)
            running.cancel()

    virtual_time.run(story())
    return said


def test_each_proxy_is_evened_out_by_itself() -> None:
    full, calm = (
        Described(_engine("H20", math=3, web=1), _engine("H800")),
        Described(_engine("H20", math=1), _engine("H800")),
    )
    assert _looked_at(full, calm) == [
        "web goes to H800 instead of H20 at p0: H20 is full (load 1.00), H800 is calm (load 0.00)"
    ]
    assert (full.orders, calm.orders) == ([("web", "H800")], [])


def test_nothing_is_ordered_between_classes_of_different_proxies_where_it_would_do_nothing() -> None:
    one, other = Described(_engine("H20", math=3, web=1)), Described(_engine("H800"))
    assert _looked_at(one, other) == []
    assert one.orders == other.orders == []
