"""Who has a role from now on, told to every node of a run until it knows.

Invariant: a node that does not answer in time keeps nobody else waiting. It is told again, the newest there is by then,
until it answers or takes no part any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from actors.core import Node, Ref
from bus.message import BusError, NodeAddress
from coordinator.messages import MEMBER, Known, Moved, Role

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Less than an actor waits for the answer to its announcement."""
AGAIN_S = 2.0


class Hands(Protocol):
    """What this needs of the coordinator."""

    node: Node


class Tidings:
    """See the module docstring. ``others``: the nodes that take part, but for this one."""

    def __init__(self, hands: Hands, others: Callable[[], Iterable[NodeAddress]]) -> None:
        self._hands = hands
        self._others = others
        self._newest: dict[Role, Moved] = {}
        self._deaf: set[tuple[NodeAddress, Role]] = set()  # nodes that are told again

    @property
    def deaf(self) -> list[str]:
        """Nodes that do not know it all yet."""
        return sorted({other.name for other, _ in self._deaf})

    async def tell(self, message: Moved) -> None:
        """Everybody has been asked once by then."""
        self._newest[message.role] = message
        others = list(self._others())
        for other, knows in zip(
            others, await asyncio.gather(*(self._ask(one, message) for one in others)), strict=True
        ):
            if not knows and (other, message.role) not in self._deaf:
                self._deaf.add((other, message.role))
                self._hands.node.background(self._until_known(other, message.role))

    async def _until_known(self, other: NodeAddress, role: Role) -> None:
        try:
            while other in self._others():
                message = self._newest[role]
                if await self._ask(other, message) and message is self._newest[role]:
                    return
                await asyncio.sleep(AGAIN_S)
        finally:
            self._deaf.discard((other, role))

    async def _ask(self, other: NodeAddress, message: Moved) -> bool:
        try:
            await self._hands.node.ask(Ref(other, MEMBER), message, Known, timeout_s=TIMEOUT_S, retries=3)
        except BusError as error:
            log.warning("node %s does not know who is the %s now: %s", other.name, message.role, error)
            return False
        return True
