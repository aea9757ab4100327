"""All processes of a run, asked at once what they are doing.

Invariant: whoever asks has an answer within ``ANSWER_S`` for each generation of processes (nodes that joined, then
those that they started), whatever hangs: a process that is known and silent is in the answer, with how it was silent.

Nobody keeps a list of all processes; it is found by asking. The coordinator knows who joined, and a node that starts
others watches them, so its own description names them. Of a node that does not answer, those that it named last are
still asked: a parent that hangs must not hide its children.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from actors.core import Node
from actors.core.metrics import Description
from bus.message import BusError, NodeAddress
from coordinator.desk.messages import SeenNode, Survey
from coordinator.messages import Join
from hwprobe import decode

ANSWER_S = 3.0


class Surveyor:
    """See the module docstring. One survey is under way at a time: who asks meanwhile shares it."""

    def __init__(self, node: Node, joins: Callable[[], Iterable[Join]]) -> None:
        self._node = node
        self._joins = joins
        self._children: dict[str, list[NodeAddress]] = {}  # as their parent named them last
        self._under_way: asyncio.Task[Survey] | None = None

    async def take(self) -> Survey:
        """Ask everybody."""
        if self._under_way is None or self._under_way.done():
            self._under_way = self._node.background(self._take())
        return await asyncio.shield(self._under_way)

    async def _take(self) -> Survey:
        seen: dict[str, SeenNode] = {}
        joined = {join.node.name: join for join in self._joins()}
        found = [_joined(join) for join in joined.values()]
        addresses = {name: join.node for name, join in joined.items()}
        while found:
            answers = await asyncio.gather(*(self._ask(one, addresses[one.name]) for one in found))
            seen |= {one.name: one for one in answers}
            found = []
            for parent in answers:
                for child in self._children_of(parent):
                    if child.name not in seen and child.name not in addresses:
                        addresses[child.name] = child
                        found.append(_started(child, parent.name))
        self._children = {name: children for name, children in self._children.items() if name in seen}
        return Survey(list(seen.values()))

    async def _ask(self, one: SeenNode, address: NodeAddress) -> SeenNode:
        try:
            description = await self._describe(address)
        except BusError as error:
            return msgspec.structs.replace(one, silence=str(error))
        pid = one.pid if description.process is None else description.process.pid
        return msgspec.structs.replace(one, description=description, pid=pid)

    async def _describe(self, address: NodeAddress) -> Description:
        if address == self._node.address:
            return self._node.description()
        return await self._node.description_of(address, timeout_s=ANSWER_S)

    def _children_of(self, parent: SeenNode) -> list[NodeAddress]:
        if parent.description is not None:
            self._children[parent.name] = parent.description.watched
        return self._children.get(parent.name, [])


def _joined(join: Join) -> SeenNode:
    return SeenNode(join.node.name, "", list(join.roles), join.pid, join.node.control, hardware(join.affinity), None)


def _started(address: NodeAddress, parent: str) -> SeenNode:
    return SeenNode(address.name, parent, [], 0, address.control, "", None)


def hardware(affinity: bytes) -> str:
    """One phrase on a node's pools: "CPU x1" or "H800 x8"."""
    pools = decode(affinity).pools
    return ", ".join(f"{pool.hardware_class} x{len(pool.devices)}" for pool in pools) or "unknown"
