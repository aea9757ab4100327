"""A role's side of leadership: whom its node follows, and what it tells a new leader.

    joins -> FOLLOWS --the leader is silent--> ORPHANED --a new one says Follow--> FOLLOWS
                |                                  |
                +-- RunOver --> the end            +-- nobody has, within the time --> the end
                +-- LetGo ---> the end, while the run goes on
                +-- BeginAgain --> joins, with the roles that it is told

Invariant: a node follows the newest leader that it has heard of (an older one's words are refused by the bus), and
ends by name where there is none.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable

import msgspec

from actors.core import Actor, Ref, handler
from actors.core.leader import Leader
from actors.env.messages import Noted
from actors.telemetry import SpansTaken
from bus.message import BusError, NodeAddress
from coordinator.messages import (
    Announce,
    BeginAgain,
    Ending,
    Follow,
    Following,
    GetHostReading,
    Join,
    Known,
    LetGo,
    Moved,
    Obeyed,
    Role,
    RoleFailed,
    RunOver,
    StandBy,
    StandbyGone,
    Take,
)
from coordinator.proxies import ProxyNews
from hwprobe.host_usage import HostReading, read_host_usage

log = logging.getLogger(__name__)

ANSWER_LEAVES_S = 0.05
"""Before a node ends what it does: by then whoever ordered it has been answered."""

TOLD_S = 60.0
TOLD_RETRIES = 10

NOBODY = Ref(NodeAddress("nobody", "", "", 0), "nobody")
"""Followed by a node that has not joined yet."""


class Spare:
    """What a node does that is one; here nothing."""

    def take(self, roles: list[Role]) -> None:
        """Have these roles."""

    def stand_by(self, run_directory: str) -> None:
        """Have a standby coordinator beside it. Raises ``ValueError`` where there can be none."""

    def standby_pid(self) -> int | None:
        """See ``Join``."""
        return None


class Allegiance(Actor):
    """See the module docstring. ``end`` is told why the node is to end, or to begin again; ``spare`` what it is to
    take over."""

    def __init__(self, end: Callable[[str | BeginAgain], None], spare: Spare | None = None) -> None:
        self._end = end
        self._spare = spare or Spare()
        self.leader = Leader(NOBODY)
        self._join: Join | None = None
        self._announced: list[Announce] = []
        self._failures: list[RoleFailed] = []
        self._silence_s = 0.0
        self._takeover_s = 0.0
        self._orphaned: asyncio.TimerHandle | None = None
        self._watched = NOBODY
        self._moved: dict[Role, Ref] = {}
        self._followers: defaultdict[Role, list[Callable[[Ref], object]]] = defaultdict(list)
        self._early: list[Role] = []
        self.proxies = ProxyNews()

    async def on_stop(self) -> None:
        if self._orphaned is not None:
            self._orphaned.cancel()

    def joined(self, join: Join, leader: Ref, *, silence_s: float, takeover_s: float) -> Leader:
        """The node takes part: returns whom it follows, from now on."""
        self._join, self._silence_s, self._takeover_s = join, silence_s, takeover_s
        self.leader = Leader(leader, patience_s=takeover_s)
        self._watch(leader)
        if self._early and not join.roles:
            self.has(self._early)
            asyncio.get_running_loop().call_soon(self._spare.take, self._early)
        return self.leader

    def has(self, roles: list[Role]) -> None:
        """What the node does from now on, for every leader to know."""
        if self._join is not None:
            self._join = msgspec.structs.replace(self._join, roles=roles)

    def hardware(self, affinity: bytes) -> None:
        """The node's map from now on: part of what the next leader hears of this node (see ``coordinator.vigil``)."""
        if self._join is not None:
            self._join = msgspec.structs.replace(self._join, affinity=affinity)

    def announces(self, announce: Announce) -> None:
        """To be said to every leader, instead of what was said of that actor before."""
        self._announced = [each for each in self._announced if each.ref != announce.ref]
        self._announced.append(announce)

    def fails(self, failure: RoleFailed) -> None:
        """A role cannot go on: whoever leads, or leads next, is told."""
        self._failures.append(failure)
        self.leader.tell(self.node, failure)

    def lost_standby(self, reason: str) -> None:
        """The standby coordinator beside this node is gone for good. Whoever leads next sees that for itself."""
        if self._join is not None:
            self.node.background(self._tell_of_standby(StandbyGone(self.node.address, reason)))

    async def _tell_of_standby(self, gone: StandbyGone) -> None:
        try:
            await self.node.ask(self.leader.ref, gone, Noted, timeout_s=TOLD_S, retries=TOLD_RETRIES)
        except BusError as error:
            log.warning("the leader does not know that there is no standby here (%s): %s", gone.reason, error)

    @handler(urgent=True)
    async def follow(self, message: Follow) -> Following:
        """Raises ``ValueError`` where this node has not joined yet: it finds the leader by itself."""
        if self._join is None:
            raise ValueError(f"node {self.node.address.name} has not joined yet")
        leader = message.leader
        if leader != self._watched:
            self._watch(leader)
        if message.begun and leader != self.leader.ref:
            log.warning("node %s leads from now on (epoch %d)", leader.node.name, leader.node.epoch)
            self.leader.follow(leader)
            for failure in self._failures:
                self.leader.tell(self.node, failure)
        join = msgspec.structs.replace(self._join, standby=self._spare.standby_pid())
        return Following(join, list(self._announced))

    @handler(urgent=True)
    async def begin_again(self, message: BeginAgain) -> Obeyed:
        asyncio.get_running_loop().call_later(ANSWER_LEAVES_S, self._end, message)
        return Obeyed()

    @handler(urgent=True)
    async def take(self, message: Take) -> Obeyed:
        """Said again, it has no further effect; said before the node knows that it takes part, it waits for that."""
        if self._join is None:
            self._early = message.roles
        elif self._join.roles != message.roles:
            self.has(message.roles)
            self._spare.take(message.roles)
        return Obeyed()

    @handler(urgent=True)
    async def stand_by(self, message: StandBy) -> Obeyed:
        """Raises ``ValueError``."""
        self._spare.stand_by(message.run_directory)
        return Obeyed()

    def on_moved(self, role: Role, follow: Callable[[Ref], object]) -> None:
        """``follow`` is told whenever another actor has the role."""
        self._followers[role].append(follow)
        if role in self._moved:
            follow(self._moved[role])

    @handler(urgent=True)
    async def moved(self, message: Moved) -> Known:
        if message.proxies is not None:
            self.proxies.hear(message.proxies)
            return Known()
        if message.role == "proxy":
            self.proxies.hear_of_one(message.ref)
        self._moved[message.role] = message.ref
        for follow in self._followers[message.role]:
            follow(message.ref)
        return Known()

    @handler(concurrent=True)
    async def host_reading(self, message: GetHostReading) -> HostReading:
        """Files that the kernel keeps in memory: a fraction of a millisecond."""
        return read_host_usage()

    @handler
    async def let_go(self, message: LetGo) -> Ending:
        asyncio.get_running_loop().call_later(ANSWER_LEAVES_S, self._end, message.why)
        return Ending()

    @handler
    async def run_over(self, message: RunOver) -> None:
        self._end(message.outcome)

    @handler
    async def spans(self, message: SpansTaken) -> None:
        """From this node and its children: they need not know who leads."""
        self.leader.tell(self.node, message)

    def _watch(self, leader: Ref) -> None:
        if self._orphaned is not None:
            self._orphaned.cancel()
            self._orphaned = None
        self._watched = leader
        self.node.watch(leader.node, silence_s=self._silence_s, on_lost=self._leaderless)

    def _leaderless(self, why: str) -> None:
        log.warning("lost the coordinator (%s): waiting %g s for another one to lead", why, self._takeover_s)
        text = f"lost the coordinator: {why}; no other one led within {self._takeover_s:g} s"
        self._orphaned = asyncio.get_running_loop().call_later(self._takeover_s, self._end, text)
