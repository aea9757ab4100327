"""Several jobs on one cluster: each keeps to the places that it may use, and what it may use follows what all want.

    ask every run's coordinator -> allot -> bind those that give up places -> bind the others to what is free

Invariant: at every moment the places that runs use or may use sum to no more than there are, once each has been bound
for the first time; and no trajectory is cut: a run gives up places as its trajectories end. All that this needs to know
is asked of the runs, so whoever shares may be stopped and started again; meanwhile every run keeps to its bound.

A run that does not answer keeps what it was last heard to use or be allowed, for ``LEASE_S``; after that it is taken to
be over. (Its env hosts end with its coordinator.)
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from actors.core import Node, Ref
from bus.message import BusError
from coordinator.orders import GetPlaces, Places, SetPlaces
from coordinator.scheduling.jobs import Claim, Quota, allot, bounds, lowered

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0
LEASE_S = 60.0


class Member(msgspec.Struct):
    """One run."""

    node: Node  # of ours; one for each, because coordinators of different runs have one name
    coordinator: Ref
    quota: Quota
    heard_at: float
    last: Places | None = None
    bound: int | None = None  # what it may use at most, for all that is known: an order without an answer may have come


class Sharing:
    """See the module docstring."""

    def __init__(self, places: int) -> None:
        self._places = places
        self.members: dict[str, Member] = {}

    def join(self, name: str, node: Node, coordinator: Ref, quota: Quota) -> None:
        """A run takes part, or is to be found elsewhere from now on."""
        self.members[name] = Member(node, coordinator, quota, asyncio.get_running_loop().time())

    async def round(self) -> dict[str, int | None]:
        """Bind every run that answers to what it may use now; returns the bounds (None: it was not reached yet). Empty
        when all are over."""
        await asyncio.gather(*(self._say(name, GetPlaces()) for name in self.members))
        self._forget_the_silent()
        targets = allot(self._claims(), self._places)
        await asyncio.gather(*(self._lower(claim, targets[claim.job]) for claim in self._claims()))
        if all(member.bound is not None for member in self.members.values()):  # else one may use all that there is
            raised = bounds(self._claims(), targets, self._places)
            await asyncio.gather(*(self._say(name, SetPlaces(bound)) for name, bound in raised.items()))
        return {name: member.bound for name, member in self.members.items()}

    def _claims(self) -> list[Claim]:
        claims = []
        for name, member in self.members.items():
            last = member.last or Places(0, 0, None)
            claims.append(Claim(name, member.quota, last.used, last.wanted, member.bound))
        return claims

    async def _lower(self, claim: Claim, target: int) -> None:
        bound = lowered(claim, target)
        if claim.bound is None or bound < claim.bound:
            await self._say(claim.job, SetPlaces(bound))

    async def _say(self, name: str, message: GetPlaces | SetPlaces) -> None:
        member = self.members[name]
        if isinstance(message, SetPlaces) and member.bound is not None:
            member.bound = max(member.bound, message.bound)
        try:
            member.last = await member.node.ask(
                member.coordinator, message, Places, timeout_s=ANSWER_TIMEOUT_S, retries=2, about=f"run {name}"
            )
        except BusError as error:
            log.info("run %s does not answer: %s", name, error)
        else:
            member.heard_at = asyncio.get_running_loop().time()
            member.bound = member.last.bound

    def _forget_the_silent(self) -> None:
        now = asyncio.get_running_loop().time()
        for name, member in list(self.members.items()):
            if now - member.heard_at > LEASE_S:
                log.warning("run %s has not answered for %.0f s: its places are free", name, now - member.heard_at)
                del self.members[name]
