"""The hosts of a run, as its coordinator has them: which roles a node that joins may have, who is a spare, who is gone.

Invariants:

- a role other than env has one holder; a node that asks for one that somebody has, or is to have, or whose host is in
  quarantine, takes part as a spare. One that the leader itself has told its roles, or that follows with them, has them;
- of the nodes that can have a standby coordinator beside them, one has it at a time, where another process could open
  the metadata store from another host (ZooKeeper);
- a process that is proven to be gone is lost at once; one of which nothing is heard is, once the watch says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

import msgspec

from actors.core import Actor, Node, handler
from coordinator.hostbook import HostBook
from coordinator.job import Job
from coordinator.messages import Announce, Changed, GetHosts, HostFacts, HostList, Join, ReleaseHost, Role, Welcome
from coordinator.muster import fittest, host_of, member_of
from coordinator.pulse import until_gone

log = logging.getLogger(__name__)

OTHERS_CAN_OPEN = "zk://"


class Hands(Protocol):
    """What this needs of the coordinator."""

    node: Node

    @property
    def joins(self) -> list[Join]: ...


class Hosts:
    """See the module docstring."""

    def __init__(self, hands: Hands, welcome: Welcome, book: HostBook) -> None:
        self._hands = hands
        self._welcome = welcome
        self.book = book
        self._awaited: dict[str, Join] = {}  # node -> as it is to join

    @property
    def job(self) -> Job:
        return msgspec.json.decode(self._welcome.job, type=Job)

    # ---- who comes -----------------------------------------------------------------------------------------------

    def roles_for(self, join: Join, others: Sequence[Join]) -> list[Role]:
        """What a node that joins may have of what it asks for."""
        if not join.roles:
            return []
        told = self._awaited.pop(join.node.name, None)
        if told is not None and told.roles == join.roles:
            return list(told.roles)
        held = {role for other in (*others, *self._awaited.values()) for role in other.roles}
        if host_of(join.node) in self.book.barred():
            log.warning("node %s: its host is in quarantine: it takes part as a spare", join.node.name)
            return []
        roles: list[Role] = [role for role in join.roles if role == "env" or role not in held]
        for role in sorted(set(join.roles) - set(roles)):
            log.warning("node %s asks for the role %s, which somebody has: it does without", join.node.name, role)
        return roles

    def expect(self, joins: Iterable[Join]) -> None:
        """These will join, with the roles that are theirs."""
        self._awaited |= {join.node.name: join for join in joins if join.roles}

    def missed(self) -> list[Join]:
        """Those who were expected and have not joined; they are expected no longer."""
        missed, self._awaited = list(self._awaited.values()), {}
        return missed

    def next_standby(self, joins: Iterable[Join]) -> Join | None:
        """The node that is to start a standby coordinator, where there is none."""
        able, barred = [], self.book.barred()
        for join in joins:
            if join.standby and not self._is_this_process(join):
                return None
            if join.standby == 0 and host_of(join.node) not in barred:
                able.append(join)
        if not able or not self.job.coordinator.store.startswith(OTHERS_CAN_OPEN):
            return None
        return min(able, key=lambda join: join.node.name)

    def _is_this_process(self, other: Join) -> bool:
        """Whether what it started as a standby leads by now."""
        return other.standby == os.getpid() and host_of(other.node) == host_of(self._hands.node.address)

    def spare_for_env(self, joins: Iterable[Join]) -> Join | None:
        """The one that is to play in place of a host that is gone."""
        barred = self.book.barred()
        spares = {join.node.name: join for join in joins if not join.roles and host_of(join.node) not in barred}
        chosen = fittest("env", [member_of(join) for join in spares.values()], self.job)
        if chosen is None:
            return None
        self.book.given(chosen.host, chosen.node, ["env"])
        return spares[chosen.node]

    # ---- who goes ------------------------------------------------------------------------------------------------

    async def until_gone(self, join: Join, lost: Callable[[str], None]) -> None:
        """Tell once it is proven that a node's process is no more."""
        await until_gone(join.pulse)
        why = "its process has ended"
        if any(other.node == join.node for other in self._hands.joins):  # not one that has joined since by that name
            self._hands.node.unwatch(join.node.name)
        self._hands.node.lose(join.node, why)
        lost(why)

    def fell(self, how: Literal["lost", "failed"], join: Join, reason: str) -> None:
        self.book.fell(how, host_of(join.node), join.node.name, join.roles, reason)

    def up(self, announce: Announce) -> None:
        self.book.up(host_of(announce.ref.node), announce.ref.node.name, announce.role)

    # ---- for people ----------------------------------------------------------------------------------------------

    def describe(self) -> HostList:
        """Every host that takes part or is left out."""
        barred = self.book.barred()
        nodes: dict[str, list[Join]] = {host: [] for host in barred}
        for join in self._hands.joins:
            nodes.setdefault(host_of(join.node), []).append(join)
        return HostList([self._facts(host, joins, barred.get(host, 0.0)) for host, joins in sorted(nodes.items())])

    def _facts(self, host: str, joins: Sequence[Join], barred_s: float) -> HostFacts:
        roles = sorted({role for join in joins for role in join.roles})
        state: Literal["in use", "spare", "quarantined"] = "quarantined" if barred_s else "in use" if roles else "spare"
        standby = any(join.standby for join in joins)
        names = [join.node.name for join in joins]
        return HostFacts(host, state, names, list(roles), standby, self.book.failures(host), barred_s)

    def release(self, host: str) -> Changed:
        """Raises ``ValueError`` for a host that is not left out."""
        if not self.book.release(host):
            barred = ", ".join(self.book.barred()) or "none"
            raise ValueError(f"host {host} is not in quarantine; those that are: {barred}")
        return Changed(f"{host} may be given roles again")


class HostHandlers(Actor):
    """The coordinator's handlers for these."""

    host_desk: Hosts

    @handler
    async def hosts(self, message: GetHosts) -> HostList:
        return self.host_desk.describe()

    @handler
    async def release_host(self, message: ReleaseHost) -> Changed:
        """Raises ``ValueError``."""
        return self.host_desk.release(message.host)
