"""A million messages on a simulated network: ``python -m tests.bus.traffic MESSAGES SEED [bare]``.

Many actors ask and tell each other; or, ``bare``, transports hand messages on without any. Prints what was delivered,
the digest of every arrival, the virtual time that it took, and the real time.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time

import msgspec

from actors.core import Actor, Node, Ref, handler
from bus.message import DeadlineExceeded, Lane
from bus.simulated import Frames, Link, SimulatedNetwork
from bus.virtual_time import run

NODES = 10
ASKERS = 20  # on each node


class Add(msgspec.Struct):
    amount: int


class Note(msgspec.Struct):
    amount: int


class Total(msgspec.Struct):
    value: int


class Counter(Actor):
    def __init__(self) -> None:
        self.total = 0

    @handler
    async def add(self, message: Add) -> Total:
        self.total += message.amount
        return Total(self.total)

    @handler
    async def note(self, message: Note) -> None:
        self.total += message.amount


class Outcome(msgspec.Struct, frozen=True):
    """Of one run."""

    delivered: int
    digest: str
    virtual_s: float
    totals: list[int]


async def traffic(messages: int, seed: int, *, loss: float = 0.001) -> Outcome:
    """Until so many messages were delivered: half of them tells, the others asks and their replies."""
    network = SimulatedNetwork(seed=seed, link=Link(latency_s=0.0002, jitter_s=0.0001, loss=loss))
    nodes = [Node(f"n{number}", transport=network.join(f"n{number}")) for number in range(NODES)]
    actors = [Counter() for _ in nodes]
    refs = [await node.spawn(lambda actor=actor: actor, "counter") for node, actor in zip(nodes, actors, strict=True)]  # type: ignore[misc]

    async def work(node: Node) -> None:
        while network.counters["delivered"] < messages:
            to = _another(network, refs, node)
            node.tell(to, Note(1))
            node.tell(to, Note(2), lane=Lane.BULK)
            try:
                await node.ask(_another(network, refs, node), Add(3), Total, timeout_s=10, retries=3)
            except DeadlineExceeded:
                continue

    await asyncio.gather(*(work(node) for node in nodes for _ in range(ASKERS)))
    for node in nodes:
        await node.close()
    totals = [actor.total for actor in actors]
    return Outcome(network.counters["delivered"], network.digest, network.loop.time(), totals)


async def relay(messages: int, seed: int) -> Outcome:
    """Likewise, of transports without nodes: whoever gets a message sends it to somebody."""
    network = SimulatedNetwork(seed=seed, link=Link(latency_s=0.0002, jitter_s=0.0001))
    transports = [network.join(f"n{number}") for number in range(NODES)]
    received = [0] * NODES
    over = asyncio.Event()

    def receive(number: int, frames: Frames) -> None:
        received[number] += 1
        if network.counters["delivered"] >= messages:
            over.set()
            return
        transports[number].send(transports[network.random.randrange(NODES)].address, Lane.CONTROL, frames)

    for number, transport in enumerate(transports):
        transport.start(lambda lane, routing_id, frames, *, more=False, number=number: receive(number, frames))
    for number in range(NODES * ASKERS):
        transports[number % NODES].send(transports[0].address, Lane.CONTROL, [b"header" * 20, b"body" * 20])
    await over.wait()
    return Outcome(network.counters["delivered"], network.digest, network.loop.time(), received)


def _another(network: SimulatedNetwork, refs: list[Ref], node: Node) -> Ref:
    while True:
        ref = refs[network.random.randrange(NODES)]
        if ref.node != node.address:
            return ref


def main() -> None:
    logging.disable()
    messages, seed = int(sys.argv[1]), int(sys.argv[2])
    start, cpu = time.perf_counter(), time.process_time()
    outcome = run(relay(messages, seed) if sys.argv[3:] == ["bare"] else traffic(messages, seed))
    print(outcome.delivered, outcome.digest, f"{outcome.virtual_s:.6f} s of virtual time", outcome.totals)
    elapsed = f"{time.perf_counter() - start:.1f} s, {time.process_time() - cpu:.1f} s of CPU time"
    print(elapsed, file=sys.stderr)


if __name__ == "__main__":
    main()
