"""Who stands by to lead a run on: a coordinator process beside one of the spares.

    a node that can have one --StandBy--> has one --gone for good (or it cannot be there)--> has none: the next node

Invariant: of the nodes that can have a standby coordinator beside them, one has it at a time, where another process
could open the metadata store from another host (ZooKeeper). One that is gone for good is told to people, with the
reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import msgspec

from actors.core import Node, Ref
from bus.message import BusError, NodeAddress
from coordinator.hostbook import HostBook
from coordinator.messages import MEMBER, Join, Obeyed, StandBy
from coordinator.muster import host_of

OTHERS_CAN_OPEN = "zk://"

ORDERED = -1
"""Process id of a standby that is about to start."""

STAND_BY_S = 60.0
STAND_BY_RETRIES = 10


class Hands(Protocol):
    """What this needs of the coordinator."""

    node: Node


class Standbys:
    """See the module docstring. ``joins``: who takes part, by name, kept by whoever made this; ``store``: the metadata
    store's address; ``warn`` tells a person."""

    def __init__(
        self,
        hands: Hands,
        joins: dict[str, Join],
        book: HostBook,
        *,
        store: str,
        run_directory: str,
        warn: Callable[[str], None],
    ) -> None:
        self._hands = hands
        self._joins = joins
        self._book = book
        self._possible = store.startswith(OTHERS_CAN_OPEN)
        self._run_directory = run_directory
        self._warn = warn
        self._gone: dict[NodeAddress, str] = {}  # why it has none any more, and will not

    def see_to_one(self) -> Join | None:
        """Have one started where there is none; returns the node that is to have it."""
        able = None
        if self._possible:
            barred = self._book.barred()
            able = next_standby(self._joins.values(), self._hands.node.address, barred, self._gone)
        if able is not None:
            self._joins[able.node.name] = msgspec.structs.replace(able, standby=ORDERED)
            self._hands.node.background(self._order(able.node))
        return able

    async def _order(self, at: NodeAddress) -> None:
        member, order = Ref(at, MEMBER), StandBy(self._run_directory)
        try:
            await self._hands.node.ask(member, order, Obeyed, timeout_s=STAND_BY_S, retries=STAND_BY_RETRIES)
        except BusError as error:
            self.lost(at, f"it cannot be there: {error}")

    def lost(self, at: NodeAddress, why: str) -> None:
        """A node has none, and will not have one: another one is to start it."""
        join = self._joins.get(at.name)
        if join is None or join.node != at:
            return
        self._joins[at.name] = msgspec.structs.replace(join, standby=0)
        self._gone[at] = why
        self._book.lost_standby(host_of(at), at.name, why)
        following = self.see_to_one()
        then = "no other spare can have one" if following is None else f"{following.node.name} is to have one"
        self._warn(f"no standby coordinator beside {at.name}: {why}; {then}")

    def why_none(self, joins: Iterable[Join]) -> str:
        """Why these have none, where one of them was to have it."""
        return "; ".join(self._gone[join.node] for join in joins if join.node in self._gone)


def next_standby(
    joins: Iterable[Join], here: NodeAddress, barred: Collection[str], gone: Collection[NodeAddress] = ()
) -> Join | None:
    """The node that is to start one, where there is none. ``here``: where this process is, which may be a standby's;
    ``gone``: nodes whose own is gone for good."""
    able = []
    for join in joins:
        if join.standby and not (join.standby == os.getpid() and host_of(join.node) == host_of(here)):
            return None
        if join.standby == 0 and join.node not in gone and host_of(join.node) not in barred:
            able.append(join)
    return min(able, key=lambda join: join.node.name, default=None)
