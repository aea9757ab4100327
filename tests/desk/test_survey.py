"""Every process of a run is found by asking, and a silent one is named."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from actors.core import Node
from bus.simulated import SimulatedNetwork
from bus.virtual_time import run
from coordinator.desk.messages import SeenNode
from coordinator.desk.survey import ANSWER_S, Surveyor
from coordinator.messages import Join
from hwprobe import build_affinity_map, encode, probe

AFFINITY = encode(build_affinity_map(probe()))


def lost(why: str) -> None:
    """Nobody here minds."""


class Town:
    """A coordinator, a proxy node that joined it, and two engines that the proxy's node watches."""

    def __init__(self, stack: AsyncExitStack, network: SimulatedNetwork) -> None:
        self.network = network
        self._stack = stack
        self.nodes: dict[str, Node] = {}

    async def build(self) -> Surveyor:
        for name in ("control", "proxy", "engine-0", "engine-1"):
            self.nodes[name] = await self._stack.enter_async_context(Node(name, transport=self.network.join(name)))
        control, proxy = self.nodes["control"], self.nodes["proxy"]
        control.watch(proxy.address, silence_s=1000.0, on_lost=lost)
        for engine in ("engine-0", "engine-1"):
            proxy.watch(self.nodes[engine].address, silence_s=1000.0, on_lost=lost)
            self.nodes[engine].watch(proxy.address, silence_s=1000.0, on_lost=lost)
        joins = [
            Join(control.address, ["coordinator"], 1, AFFINITY),
            Join(proxy.address, ["proxy"], 2, AFFINITY),
        ]
        return Surveyor(control, lambda: joins)


def surveys(*, before: tuple[str, ...], cut: str) -> list[dict[str, SeenNode]]:
    """What is seen with all connected (where asked for first), then with one node cut off."""

    async def main() -> list[dict[str, SeenNode]]:
        async with AsyncExitStack() as stack:
            network = SimulatedNetwork(seed=3)
            surveyor = await Town(stack, network).build()
            found = []
            for stage in (*before, cut):
                if stage:
                    network.partition({stage}, {"control", "proxy", "engine-0", "engine-1"} - {stage}, cut=True)
                began = asyncio.get_running_loop().time()
                found.append({node.name: node for node in (await surveyor.take()).nodes})
                assert asyncio.get_running_loop().time() - began <= 3 * ANSWER_S
            return found

    return run(main(), seed=3)


def test_children_are_found_through_the_node_that_watches_them() -> None:
    (found,) = surveys(before=(), cut="")
    assert {name: node.parent for name, node in found.items()} == {
        "control": "",
        "proxy": "",
        "engine-0": "proxy",
        "engine-1": "proxy",
    }
    assert all(node.description is not None for node in found.values())
    assert (found["proxy"].roles, found["proxy"].pid) == (["proxy"], 2)


def test_a_silent_child_is_named_with_how_long_it_was_waited_for() -> None:
    (found,) = surveys(before=(), cut="engine-1")
    assert found["engine-1"].description is None
    assert "no answer within 3 s" in found["engine-1"].silence
    assert found["engine-0"].description is not None


def test_a_silent_parent_does_not_hide_the_children_it_named_before() -> None:
    _, found = surveys(before=("",), cut="proxy")
    assert found["proxy"].description is None
    assert set(found) == {"control", "proxy", "engine-0", "engine-1"}
    assert found["engine-0"].description is not None
