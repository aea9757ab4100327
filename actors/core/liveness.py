"""Watches over other nodes: pings, and what follows from their silence.

Invariants:

- a node is declared lost only after pings over the whole limit went unanswered; time in which this process itself stood
  still is no silence of its peer: what is counted are pings, each once, however late this process comes to look;
- between ``least_s`` and ``silence_s`` the limit follows the peer: ``MARGIN`` times the longest silence that it broke
  within the last ``WINDOW`` pings. A peer that always answers is missed soon, one that is starved of the processor is
  given the time that it has been seen to need.

The longest silence, not a mean with a deviation (phi accrual): starvation comes in bursts, between which a mean forgets
that there are any.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

from bus.delivery import Courier
from bus.message import NodeAddress

PING_EVERY_S = 1.0

SILENCE_S = 20.0
"""Of a node that is watched only because one of its actors is monitored from here, or monitors one of ours."""

MARGIN = 3.0
WINDOW = 600
"""Pings for which a silence is remembered: ten minutes."""

Lost = Callable[[str], None]


class Patience:
    """How long one peer may be silent, in pings; see the module docstring."""

    def __init__(self, *, least: float, most: float) -> None:
        self._least = min(least, most)
        self._most = most
        self._pings = 0
        self._broken: deque[tuple[int, int]] = deque()  # when a silence was broken, and its length, falling
        self.unanswered = 0

    @property
    def limit(self) -> float:
        longest = self._broken[0][1] if self._broken else 0
        return min(self._most, max(self._least, MARGIN * longest))

    def looked(self, *, heard: bool) -> bool:
        """One ping later: whether anything came meanwhile. Returns whether the peer is to be given up."""
        self._pings += 1
        while self._broken and self._broken[0][0] <= self._pings - WINDOW:
            self._broken.popleft()
        if not heard:
            self.unanswered += 1
            return self.unanswered >= self.limit
        silence, self.unanswered = self.unanswered, 0
        if silence:
            while self._broken and self._broken[-1][1] <= silence:
                self._broken.pop()
            self._broken.append((self._pings, silence))
        return False


class Liveness:
    """One node's watches: one by name for each peer (``watch``), and one for each incarnation that is ``held``."""

    def __init__(self, courier: Courier, background: Callable[[Awaitable[None]], asyncio.Task[Any]]) -> None:
        self._courier = courier
        self._background = background
        self._named: dict[str, tuple[NodeAddress, asyncio.Task[Any]]] = {}
        self._held: dict[NodeAddress, asyncio.Task[Any]] = {}
        self._holders: Counter[NodeAddress] = Counter()

    def watch(self, peer: NodeAddress, *, silence_s: float, on_lost: Lost, least_s: float | None = None) -> None:
        """Ping a peer and, once it has been silent for ``silence_s``, declare it lost and say so. With ``least_s`` a
        peer that has never been silent for long is missed as soon as that."""
        self.unwatch(peer.name)

        def lost(why: str) -> None:
            self._named.pop(peer.name, None)
            on_lost(why)

        least = (silence_s if least_s is None else least_s) / PING_EVERY_S
        patience = Patience(least=least, most=silence_s / PING_EVERY_S)
        self._named[peer.name] = peer, self._background(self._watch(peer, patience, lost))

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
            patience = Patience(least=SILENCE_S / PING_EVERY_S, most=SILENCE_S / PING_EVERY_S)
            self._held[peer] = self._background(self._watch(peer, patience, lambda why: None))

    def release(self, peer: NodeAddress) -> None:
        self._holders[peer] -= 1
        if self._holders[peer] <= 0:
            del self._holders[peer]
            self._held.pop(peer).cancel()

    def lost(self, peer: NodeAddress) -> bool:
        """Whether an incarnation is known to be gone."""
        return self._courier.is_gone(peer)

    async def _watch(self, peer: NodeAddress, patience: Patience, on_lost: Lost) -> None:
        heard, over = self._courier.last_heard(peer.name), False
        while not over:
            self._courier.ping(peer)
            await asyncio.sleep(PING_EVERY_S)
            before, heard = heard, self._courier.last_heard(peer.name)
            over = patience.looked(heard=heard != before)
        reason = f"no sign of life for {patience.unanswered * PING_EVERY_S:.1f} s"
        self._courier.lose(peer, reason)
        on_lost(reason)
