"""Hosts are asked by any of their nodes, and a silent one is named."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import msgspec

from actors.core import Node
from bus.simulated import SimulatedNetwork
from bus.virtual_time import run
from coordinator.allegiance import Allegiance
from coordinator.desk.hostlooks import ANSWER_S, look_at_hosts
from coordinator.messages import MEMBER, Join
from coordinator.muster import host_of
from hwprobe.host_usage import HostReading


def test_any_node_of_a_host_will_do_and_a_host_of_which_none_answers_has_no_figures() -> None:
    async def scenario() -> tuple[dict[str, HostReading | None], list[str]]:
        network = SimulatedNetwork(seed=1)
        async with AsyncExitStack() as stack:
            nodes = {}
            for name in ("control", "proxy", "env", "hung"):
                nodes[name] = await stack.enter_async_context(Node(name, transport=network.join(name)))
                await nodes[name].spawn(lambda: Allegiance(lambda outcome: None), MEMBER, restarts=0)
            network.partition({"env", "hung"}, {"control", "proxy"}, cut=True)
            # "hung" listens where "proxy" does, as two processes of one host would.
            hung = msgspec.structs.replace(nodes["hung"].address, control=f"{nodes['proxy'].address.control[:-1]}9")
            addresses = [nodes["control"].address, nodes["proxy"].address, hung, nodes["env"].address]
            began = asyncio.get_running_loop().time()
            found = await look_at_hosts(nodes["control"], [Join(one, ["env"], 1, b"{}") for one in addresses])
            assert asyncio.get_running_loop().time() - began <= ANSWER_S
            return found, [host_of(nodes[name].address) for name in ("control", "proxy", "env")]

    found, (control, proxy, env) = run(scenario())
    assert set(found) == {control, proxy, env}
    assert found[env] is None
    for host in (control, proxy):
        reading = found[host]
        assert reading is not None
        assert reading.memory_total is not None
        assert reading.memory_total > 0
