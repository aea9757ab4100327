"""The same actors on a simulated network, in virtual time: what docs/actors.md shows."""

import asyncio
from contextlib import suppress

import pytest

from actors.core import Actor, Node, Ref, handler
from bus.message import DeadlineExceeded, PeerRestarted
from bus.simulated import Link, SimulatedNetwork
from bus.virtual_time import run
from tests.actors.support import Add, Example, Total


def now() -> float:
    return asyncio.get_running_loop().time()


async def add(node: Node, to: Ref, *, timeout_s: float = 10.0, retries: int = 0) -> int:
    return (await node.ask(to, Add(1), Total, timeout_s=timeout_s, retries=retries)).value


def test_an_ask_into_a_partition_ends_at_its_deadline_and_one_that_is_repeated_outlives_it() -> None:
    async def main() -> None:
        network = SimulatedNetwork(seed=7, link=Link(latency_s=0.05))
        async with Node("a", transport=network.join("a")) as a, Node("b", transport=network.join("b")) as b:
            counter = await b.spawn(Example, "counter")
            assert await add(a, counter) == 1
            network.partition({"a"}, {"b"}, cut=True)
            began = now()
            with pytest.raises(DeadlineExceeded):
                await add(a, counter, timeout_s=30.0)
            assert now() - began == pytest.approx(30.0)
            asyncio.get_running_loop().call_later(60.0, network.heal)
            assert await add(a, counter, timeout_s=100.0, retries=50) == 3, "the first one arrived late, and once"

    run(main(), seed=7)


def test_an_asker_learns_that_the_node_it_asked_was_killed_and_started_again() -> None:
    async def main() -> None:
        network = SimulatedNetwork(seed=7, link=Link(latency_s=0.05))
        first_life = network.join("b", port=7000)
        async with Node("a", transport=network.join("a")) as a:
            async with Node("b", transport=first_life) as b:
                counter = await b.spawn(Example, "counter")
                assert await add(a, counter) == 1
                first_life.crash()
            async with Node("b", transport=network.join("b", port=7000)):
                with pytest.raises(PeerRestarted):
                    await add(a, counter, retries=3)

    run(main(), seed=7)


def test_an_ask_within_a_node_ends_at_its_deadline_though_the_node_closed_and_the_handler_does_not_end() -> None:
    class Stubborn(Actor):
        @handler
        async def add(self, message: Add) -> Total:
            until = now() + 100.0
            while now() < until:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(until - now())
            return Total(message.amount)

    async def main() -> None:
        node = Node("a", transport=SimulatedNetwork(seed=7).join("a"))
        ref = await node.spawn(Stubborn, "stubborn")
        asking = asyncio.create_task(add(node, ref, timeout_s=30.0))
        await asyncio.sleep(1.0)
        await node.close()  # waits a while for the handler, and gives it up
        with pytest.raises(DeadlineExceeded):
            await asking
        assert now() == pytest.approx(30.0)
        await asyncio.sleep(100.0)  # the handler ends, too

    run(main(), seed=7)
