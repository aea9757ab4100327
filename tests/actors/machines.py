"""Nodes on a simulated network, on machines on which they share memory."""

from __future__ import annotations

from typing import Any

from actors.core import Node
from bus.objects import ObjectStore
from bus.objects.simulated import SimulatedDisk, SimulatedMachine, SimulatedMemory
from bus.simulated import Link, SimulatedNetwork


class Host:
    """Nodes on one network, each on a machine."""

    def __init__(self, seed: int = 7) -> None:
        self.network = SimulatedNetwork(seed=seed, link=Link(latency_s=0.001))
        self.machines = {name: SimulatedMachine(name) for name in ("m1", "m2")}

    def node(self, name: str, machine: str, **store: Any) -> Node:
        store.setdefault("disk", SimulatedDisk())
        objects = ObjectStore(memory=self.machines[machine].memory(), **store)
        return Node(name, transport=self.network.join(name), objects=objects)


def crash(node: Node) -> None:
    memory = node._objects.store.memory
    assert isinstance(memory, SimulatedMemory)
    memory.crash()
    node._transport.crash()  # type: ignore[attr-defined]
