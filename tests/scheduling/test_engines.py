"""The engines of several proxies, looked at as one, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from actors.core import Actor, Node, Ref, handler
from actors.proxy.messages import (
    Acknowledged,
    CostsState,
    DescribeProxy,
    EngineState,
    MappingOrder,
    Prefer,
    ProxyState,
)
from bus.message import BusError, PeerLost
from bus.simulated import SimulatedNetwork
from bus.virtual_time import run
from coordinator.engines import Engines
from coordinator.resources.mapper import merged
from hwprobe.cost import ModelSize
from hwprobe.costmodel import CostState
from hwprobe.demand import TaskFit


class Proxy(Actor):
    def __init__(self, name: str, tokens: int) -> None:
        self._engine = EngineState(f"{name}.engine-0", "serving", "CPU", 3, 2, 0)
        self.tokens = tokens
        self.hangs = False
        self.preferred: list[str] = []

    @handler(concurrent=True)
    async def describe(self, message: DescribeProxy) -> ProxyState:
        if self.hangs:
            await asyncio.Event().wait()
        return ProxyState([self._engine], 1, self.tokens, {"requests_moved": 2})

    @handler
    async def prefer(self, message: Prefer) -> Acknowledged:
        self.preferred.append(message.hardware_class)
        return Acknowledged()


def test_all_proxies_are_looked_at_and_ordered_as_one_and_what_one_had_sampled_counts_on() -> None:
    async def story() -> None:
        network = SimulatedNetwork(seed=0)
        async with (
            Node("control", transport=network.join("control")) as node,
            Node("a", transport=network.join("a")) as node_a,
            Node("b", transport=network.join("b")) as node_b,
        ):
            a, b = Proxy("a", 100), Proxy("b", 40)
            there: list[Ref] = []
            engines = Engines(node, lambda: there)
            with pytest.raises(PeerLost, match="there is no proxy yet"):
                await engines.describe(5.0)
            there += [await node_a.spawn(lambda: a, "proxy"), await node_b.spawn(lambda: b, "proxy")]
            state = await engines.describe(5.0)
            assert [(engine.name, engine.proxy) for engine in state.engines] == [
                ("a.engine-0", "a"),
                ("b.engine-0", "b"),
            ]
            assert (state.tokens, state.queued, state.counters) == (140, 2, {"requests_moved": 4})
            assert engines.proxy_of(state.engines[1]) == there[1]
            assert set(await engines.ask_each(Prefer("math", "CPU"), Acknowledged, timeout_s=5.0)) == {"a", "b"}
            assert (a.preferred, b.preferred) == (["CPU"], ["CPU"])

            b.hangs = True  # what the other one says is worth an answer
            assert [engine.proxy for engine in (await engines.describe(5.0)).engines] == ["a"]
            a.tokens = 110
            lost = there.pop()
            assert (await engines.describe(5.0)).tokens == 150
            with pytest.raises(PeerLost, match=r"engine b\.engine-0: its proxy b is gone"):
                engines.proxy_of(state.engines[1])
            there[:] = [lost]
            with pytest.raises(BusError):
                await engines.describe(5.0)

    run(story())


def costs(tasks: dict[str, int], *, number: int = 0) -> CostsState:
    """Of a proxy that has seen so many answers of each task, and had so many orders."""
    fits = {name: TaskFit(responses=count) for name, count in tasks.items()}
    shares = {"math": {"CPU": 1.0 / max(1, number)}}
    order = MappingOrder(number=number, by="learned", why="", before={}, after=shares, at_s=1.0)
    return CostsState(
        state=CostState(model=ModelSize(), classes={}, tasks=fits),
        shares=shares,
        orders=[order] if number else [],
        in_flight=5,
        held_s=0.0,
        now_s=2.0,
        number=number,
    )


def test_what_several_proxies_know_is_of_each_task_what_the_one_knows_that_has_seen_most_of_it() -> None:
    both = merged([costs({"math": 10, "games": 3}), costs({"math": 4, "web": 2}, number=2)])
    assert {name: fit.responses for name, fit in both.state.tasks.items()} == {"math": 10, "games": 3, "web": 2}
    assert (both.in_flight, both.number, both.shares) == (10, 2, {"math": {"CPU": 0.5}})
    with pytest.raises(ValueError, match="the costs of one proxy at least, found none"):
        merged([])
