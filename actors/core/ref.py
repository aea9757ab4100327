"""A reference to an actor: small, self-sufficient, and fit to travel in messages.

``Ref[Counter]`` says, for people and type checkers, what kind of actor it is; on the wire, and when compared, a ref is
a node and a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import msgspec

from bus.message import NodeAddress

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    A = TypeVar("A", default=Any)
else:
    from typing import TypeVar

    A = TypeVar("A")


class Ref(msgspec.Struct, Generic[A], frozen=True, array_like=True):
    """Which actor on which incarnation of which node."""

    node: NodeAddress
    actor: str

    def __str__(self) -> str:
        return f"{self.actor}@{self.node.name}"
