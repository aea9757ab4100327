"""A reference to an actor: small, self-sufficient, and fit to travel in messages."""

from __future__ import annotations

import msgspec

from bus.message import NodeAddress


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """Which actor on which incarnation of which node."""

    node: NodeAddress
    actor: str

    def __str__(self) -> str:
        return f"{self.actor}@{self.node.name}"
