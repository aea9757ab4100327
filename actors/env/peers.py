"""Whom an env host talks to.

Invariant: each of them may be one after the other, and proxies several at once; who asks need not know which it is.
"""

from __future__ import annotations

from typing import Protocol

from actors.core import Node, Ref
from actors.core.leader import Leader
from actors.env.proxies import Proxies


class Peers:
    """See the module docstring."""

    def __init__(
        self, *, coordinator: Ref | Leader, proxies: Ref | Proxies, reward: Ref | Leader, store: Ref | Leader
    ) -> None:
        self.leader, self.reward, self.store = (
            each if isinstance(each, Leader) else Leader(each) for each in (coordinator, reward, store)
        )
        self.proxies = proxies if isinstance(proxies, Proxies) else Proxies.only(proxies)


class Hands(Protocol):
    """What the parts of an env host need of its actor."""

    node: Node
    ref: Ref


class Workers(Protocol):
    """The processes that run environments; see ``actors.core.pool.WorkerPool``."""

    def pick(self) -> str: ...

    async def worker(self, name: str) -> Ref: ...

    def kill(self, name: str) -> None: ...
