"""Env hosts: how many trajectories each has room for, and which one gets the next ticket.

Invariant: a host is given no more tickets than it has places, and a few that wait there so that a place is taken again
at once (``AHEAD``); what has left its place and is only scored and stored does not count. Among hosts with room the
least used one is chosen (then the one that came first), in time that grows only with the logarithm of their number. No
more tickets than ``bound`` are in places or about to be, on all hosts together, but for what was there before. A host
that is being drained is given nothing new; a host that never said how many places it has takes everything.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from actors.core.ref import Ref
from coordinator.orders import HostState

AHEAD = 0.25
LEAST_AHEAD = 2
"""Tickets that a host holds beyond its places, as a share of them and at least."""

MOST_GONE = 64


class EnvHost:
    """One of them, as the coordinator sees it."""

    def __init__(self, ref: Ref, places: int, number: int) -> None:
        self.ref = ref
        self.places = places  # 0: it did not say
        self.number = number  # in the order in which they came
        self.draining = False
        self.tickets: dict[str, None] = {}
        self.settling: set[str] = set()  # of those, what has left its place
        self.limit = places + max(LEAST_AHEAD, math.ceil(AHEAD * places)) if places else math.inf

    @property
    def name(self) -> str:
        return self.ref.node.name

    @property
    def used(self) -> int:
        return len(self.tickets) - len(self.settling)

    @property
    def has_room(self) -> bool:
        return not self.draining and self.used < self.limit

    @property
    def load(self) -> float:
        return self.used / (self.places or 1)


class EnvHosts:
    """See the module docstring."""

    def __init__(self) -> None:
        self._hosts: dict[Ref, EnvHost] = {}
        self._where: dict[str, EnvHost] = {}
        self._numbered: dict[int, EnvHost] = {}
        self._with_room: list[tuple[float, int]] = []  # heap of load and number; some entries hold no longer
        self._joined = 0
        self.bound: int | None = None
        self.used = 0  # on hosts that are there

    def __len__(self) -> int:
        return len(self._hosts)

    def refs(self) -> list[Ref]:
        return list(self._hosts)

    def all(self) -> list[EnvHost]:
        return list(self._hosts.values())

    @property
    def accepting(self) -> bool:
        """Whether any host is given new tickets."""
        return self.bound != 0 and any(not host.draining for host in self._hosts.values())

    @property
    def places(self) -> int | None:
        """Of hosts that are given new tickets; None where one of them did not say."""
        accepting = [host.places for host in self._hosts.values() if not host.draining]
        if 0 in accepting:
            return self.bound
        return sum(accepting) if self.bound is None else min(self.bound, sum(accepting))

    def join(self, ref: Ref, places: int) -> None:
        """One that announces itself again keeps its tickets."""
        if ref in self._hosts:
            return
        host = self._hosts[ref] = EnvHost(ref, places, self._joined)
        self._numbered[self._joined] = host
        self._joined += 1
        self._changed(host)

    def leave(self, node: str) -> list[str]:
        """The hosts of a node are gone; returns the tickets that they had."""
        gone = [host for host in self._hosts.values() if host.name == node]
        for host in gone:
            del self._hosts[host.ref], self._numbered[host.number]
            self.used -= host.used
        return [ticket for host in gone for ticket in host.tickets]

    def choose(self) -> EnvHost | None:
        """The one to give the next ticket to; None where none has room."""
        if self.bound is not None and self.used >= self.bound:
            return None
        while self._with_room:
            load, number = self._with_room[0]
            host = self._numbered.get(number)
            if host is not None and host.has_room and host.load == load:
                return host
            heapq.heappop(self._with_room)
        return None

    def give(self, ticket: str, host: EnvHost) -> None:
        """One that is on a host already stays there."""
        if ticket in self._where:
            return
        self._where[ticket] = host
        host.tickets[ticket] = None
        self.used += 1
        self._changed(host)

    def adopt(self, ref: Ref, tickets: Iterable[str]) -> None:
        """What a host that has joined runs already."""
        for ticket in tickets:
            self.give(ticket, self._hosts[ref])

    def host_of(self, ticket: str) -> EnvHost | None:
        return self._where.get(ticket)

    def left_place(self, ticket: str) -> None:
        """It is only scored and stored from now on."""
        host = self._where.get(ticket)
        if host is not None and ticket not in host.settling:
            host.settling.add(ticket)
            self._freed(host)

    def ended(self, ticket: str) -> EnvHost | None:
        """It is on no host any more; returns the one that had it."""
        host = self._where.pop(ticket, None)
        if host is not None:
            del host.tickets[ticket]
            if ticket in host.settling:
                host.settling.discard(ticket)
            else:
                self._freed(host)
        return host

    def _freed(self, host: EnvHost) -> None:
        """One ticket less is in its place, or about to be."""
        if host.number in self._numbered:
            self.used -= 1
            self._changed(host)

    def drain(self, node: str, *, draining: bool) -> int:
        """Give a node's hosts nothing new, or tickets again. Returns how many trajectories are there. Raises
        ``ValueError`` for a node without env hosts."""
        meant = [host for host in self._hosts.values() if host.name == node]
        if not meant:
            names = ", ".join(host.name for host in self._hosts.values()) or "none"
            raise ValueError(f"no env host on node {node!r}; there are: {names}")
        for host in meant:
            host.draining = draining
            self._changed(host)
        return sum(len(host.tickets) for host in meant)

    def states(self) -> list[HostState]:
        return [
            HostState(host.name, host.places, host.used, len(host.settling), host.draining)
            for host in self._hosts.values()
        ]

    def _changed(self, host: EnvHost) -> None:
        if not host.has_room:
            return
        heapq.heappush(self._with_room, (host.load, host.number))
        if len(self._with_room) > 2 * len(self._hosts) + MOST_GONE:
            self._with_room = [(other.load, other.number) for other in self._hosts.values() if other.has_room]
            heapq.heapify(self._with_room)
