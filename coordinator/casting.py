"""Who may have which role of a run: what a node that joins gets, and which spare steps in.

Invariant: a role other than env and proxy has one holder; a node that asks for one that somebody has, or is to have, or
whose host is in quarantine, takes part as a spare. One that the leader itself has told its roles, or that follows with
them, has them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from coordinator.hostbook import HostBook
from coordinator.job import Job
from coordinator.messages import SEVERAL, Changed, HostFacts, HostList, Join, Role
from coordinator.muster import fittest, host_of, member_of

log = logging.getLogger(__name__)


class Casting:
    """See the module docstring. ``book`` says what became of the run's hosts."""

    def __init__(self, job: Job, book: HostBook) -> None:
        self.job = job
        self.book = book
        self._awaited: dict[str, Join] = {}  # node -> as it is to join

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
        roles: list[Role] = [role for role in join.roles if role in SEVERAL or role not in held]
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

    # ---- who steps in --------------------------------------------------------------------------------------------

    def spare_for(self, roles: Sequence[Role], joins: Iterable[Join]) -> Join | None:
        """The one that is to have these in place of a node that is gone, by what the first of them needs."""
        spares = self._spares(joins)
        chosen = fittest(roles[0], [member_of(join) for join in spares.values()], self.job)
        if chosen is None:
            return None
        self.book.given(chosen.host, chosen.node, roles)
        return spares[chosen.node]

    def has_spare(self, joins: Iterable[Join]) -> bool:
        """Whether there is any."""
        return bool(self._spares(joins))

    def _spares(self, joins: Iterable[Join]) -> dict[str, Join]:
        barred = self.book.barred()
        return {join.node.name: join for join in joins if not join.roles and host_of(join.node) not in barred}

    # ---- for people ----------------------------------------------------------------------------------------------

    def describe(self, joins: Iterable[Join], why_no_standby: Callable[[Sequence[Join]], str]) -> HostList:
        """Every host that takes part or is left out."""
        barred = self.book.barred()
        nodes: dict[str, list[Join]] = {host: [] for host in barred}
        for join in joins:
            nodes.setdefault(host_of(join.node), []).append(join)
        return HostList(
            [
                self._facts(host, there, barred.get(host, 0.0), why_no_standby(there))
                for host, there in sorted(nodes.items())
            ]
        )

    def _facts(self, host: str, joins: Sequence[Join], barred_s: float, no_standby: str) -> HostFacts:
        roles = sorted({role for join in joins for role in join.roles})
        state: Literal["in use", "spare", "quarantined"] = "quarantined" if barred_s else "in use" if roles else "spare"
        standby = any(join.standby for join in joins)
        names = [join.node.name for join in joins]
        failures = self.book.failures(host)
        return HostFacts(host, state, names, list(roles), standby, failures, barred_s, no_standby)

    def release(self, host: str) -> Changed:
        """Raises ``ValueError`` for a host that is not left out."""
        if not self.book.release(host):
            barred = ", ".join(self.book.barred()) or "none"
            raise ValueError(f"host {host} is not in quarantine; those that are: {barred}")
        return Changed(f"{host} may be given roles again")
