"""A node keeps an eye on its hardware, and lets whoever leads know its map as the hardware is.

    hwprobe's watch --look, every LOOK_S--> the map under all that holds --HardwareChanged--> the leader's roster, and
                                                                         <----- Noted ------  by it people and the store

Invariant: once a change has lasted for a look, the leader is told the whole map again and again until it has answered;
so is the next one, once it leads. Nothing is sent while the map that was last answered for, by whoever leads now, is
the map that holds. What people hear of it they hear at least once: twice where an answer was lost and asked for anew.

The first map to be answered for is the one with which the node joined, so what the probe found and is over before the
first look is a change like any other. A map that does not fit is told to people, once, instead of being sent; then the
one before it stands, until one fits again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from actors.core import Ref
from actors.core.exchange import Exchange
from actors.core.leader import Leader
from actors.env.messages import Noted
from bus.message import BusError, NodeAddress
from coordinator.messages import HardwareChanged
from hwprobe import AffinityMap, Finding, MapTooLarge, encode
from hwprobe.watching import Changes, Watch

log = logging.getLogger(__name__)

LOOK_S = 5.0
ANSWER_S = 10.0
ANSWER_RETRIES = 5
LINES_KEPT = 100
"""For people, of either kind, while nobody answers: older ones go to the log alone, where all of them are."""


class Watching(Protocol):
    """Of this host's hardware."""

    def look(self) -> Changes: ...

    def stop(self, timeout_s: float) -> None: ...


class Vigil:
    """See the module docstring. ``affinity``: of this host, as it was probed, and as ``leader`` has heard of it;
    ``keep`` is given each map before it is sent, for whoever else asks this node what it has."""

    def __init__(
        self,
        node: NodeAddress,
        leader: Leader,
        affinity: AffinityMap,
        *,
        keep: Callable[[bytes], None] = lambda encoded: None,
        watch: Callable[[], Watching] = Watch,
    ) -> None:
        self._node = node
        self._leader = leader
        self._affinity = affinity
        self._keep = keep
        self._watch = watch
        self._holds = self._answered = encode(affinity)
        self._answered_by: Ref = leader.ref
        self._gpus_seen: bool | None = None  # None before the first look
        self._too_large = ""
        self._begun: list[str] = []
        self._ended: list[str] = []

    async def run(self, exchange: Exchange) -> None:
        """Until it is cancelled."""
        watching = self._watch()
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                self._take_in(watching.look())
                if self._owes():
                    await self._tell(exchange)
        finally:
            watching.stop(0.0)  # its thread ends by itself: nobody waits for a driver here

    def _take_in(self, changes: Changes) -> None:
        """Figures of a condition that lasts may move from look to look; that is no change of the map."""
        if not changes and changes.gpus_seen is self._gpus_seen:
            return
        self._gpus_seen = changes.gpus_seen
        self._begun = _kept(self._begun, map(_line, changes.begun), "begun")
        self._ended = _kept(self._ended, map(_line, changes.ended), "over")
        try:
            self._holds, too_large = encode(self._affinity.under(changes.present, gpus_seen=changes.gpus_seen)), ""
        except MapTooLarge as error:
            too_large = f"{error}; what was told before it stands"
        if too_large and not self._too_large:
            self._begun = _kept(self._begun, [too_large], "begun")
        self._too_large = too_large
        self._keep(self._holds)

    def _owes(self) -> bool:
        """Whether whoever leads now may not know what there is to know."""
        told = self._holds == self._answered and self._leader.ref == self._answered_by
        return not told or bool(self._begun or self._ended)

    async def _tell(self, exchange: Exchange) -> None:
        """What is not answered is said again after the next look, to whoever leads then."""
        to, message = self._leader.ref, HardwareChanged(self._node, self._holds, self._begun, self._ended)
        try:
            await exchange.ask(
                to, message, Noted, timeout_s=ANSWER_S, retries=ANSWER_RETRIES, about="the hardware that changed"
            )
        except BusError as error:
            log.info("the leader does not know the hardware as it is: %s", error)
            return
        self._answered, self._answered_by = message.affinity, to
        self._begun, self._ended = [], []


def _line(finding: Finding) -> str:
    return f"{', '.join(finding.subjects)}: {finding.detail}"


def _kept(lines: list[str], more: Iterable[str], what: str) -> list[str]:
    """All of them, or the newest."""
    new = list(more)
    for line in new:
        log.info("hardware, %s: %s", what, line)
    return [*lines, *new][-LINES_KEPT:]
