"""Watches over other nodes: pings, and what follows from their silence.

Invariant: a node is declared lost only after pings over the whole limit went unanswered; time in which this process
itself stood still is no silence of its peer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from bus.delivery import Courier
from bus.message import NodeAddress

PING_EVERY_S = 1.0

SILENCE_S = 20.0
"""Of a node that is watched only because one of its actors is monitored from here, or monitors one of ours."""

Lost = Callable[[str], None]


class Liveness:
    """One node's watches: one by name for each peer (``watch``), and one for each incarnation that is ``held``."""

    def __init__(self, courier: Courier, background: Callable[[Awaitable[None]], asyncio.Task[Any]]) -> None:
        self._courier = courier
        self._background = background
        self._named: dict[str, tuple[NodeAddress, asyncio.Task[Any]]] = {}
        self._held: dict[NodeAddress, asyncio.Task[Any]] = {}
        self._holders: Counter[NodeAddress] = Counter()

    def watch(self, peer: NodeAddress, *, silence_s: float, on_lost: Lost) -> None:
        """Ping a peer and, once it has been silent for ``silence_s``, declare it lost and say so."""
        self.unwatch(peer.name)

        def lost(why: str) -> None:
            self._named.pop(peer.name, None)
            on_lost(why)

        self._named[peer.name] = peer, self._background(self._watch(peer, silence_s, lost))

    def unwatch(self, name: str) -> None:
        """No longer ping a peer for ``watch``."""
        watched = self._named.pop(name, None)
        if watched is not None:
            watched[1].cancel()

    def watched(self) -> list[NodeAddress]:
        """Whom ``watch`` is told of at the moment."""
        return [peer for peer, _ in self._named.values()]

    def hold(self, peer: NodeAddress) -> None:
        """Watch an incarnation until it is released as often as it was held; its loss is the courier's to tell."""
        self._holders[peer] += 1
        if peer not in self._held:
            self._held[peer] = self._background(self._watch(peer, SILENCE_S, lambda why: None))

    def release(self, peer: NodeAddress) -> None:
        self._holders[peer] -= 1
        if self._holders[peer] <= 0:
            del self._holders[peer]
            self._held.pop(peer).cancel()

    def lost(self, peer: NodeAddress) -> bool:
        """Whether an incarnation is known to be gone."""
        return self._courier.is_gone(peer)

    async def _watch(self, peer: NodeAddress, silence_s: float, on_lost: Lost) -> None:
        unanswered, heard = 0, self._courier.last_heard(peer.name)
        while unanswered * PING_EVERY_S < silence_s:
            self._courier.ping(peer)
            await asyncio.sleep(PING_EVERY_S)
            before, heard = heard, self._courier.last_heard(peer.name)
            unanswered = unanswered + 1 if heard == before else 0
        reason = f"no sign of life for {unanswered * PING_EVERY_S:.1f} s"
        self._courier.lose(peer, reason)
        on_lost(reason)
