"""Gives requests to engines: chooses one, notes what it takes, and sends what came together in a turn of the loop.

Invariant: a request that was given to an engine is in its books and its outbox, and its trajectory's prefix is there
from then on; an engine that had the prefix before is told that it may go. What is in outboxes travels at the end of the
loop's turn, one message an engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from actors.core import Node
from actors.proxy.costs import Costs
from actors.proxy.engines.protocol import Begun
from actors.proxy.entry import EngineEntry
from actors.proxy.kept import with_begun
from actors.proxy.messages import Add, HostAdd, HostForget
from actors.proxy.mover import Mover
from actors.proxy.pool import Group, Pool
from actors.proxy.prefixes import Prefixes
from actors.proxy.routing import Choice, Need, choose
from actors.proxy.splitting import Splitter

FORGET_WITHIN_S = 0.05
"""How long the news that a trajectory has ended waits for requests to travel with: an engine pays for every message."""


class Hands(Protocol):
    """What this needs of the proxy."""

    node: Node


class Dispatch:
    """See the module docstring. The tables are the proxy's."""

    def __init__(
        self,
        pool: Pool,
        costs: Costs,
        prefixes: Prefixes,
        mover: Mover,
        splitter: Splitter,
        *,
        counters: Counter[str],
        hands: Hands,
    ) -> None:
        self._pool = pool
        self._costs = costs
        self._prefixes = prefixes
        self._mover = mover
        self._splitter = splitter
        self._counters = counters
        self._hands = hands
        self._outgoing: dict[str, EngineEntry] = {}  # that have requests in their outboxes

    def place(self, add: Add, groups: list[Group]) -> tuple[Add, EngineEntry | None]:
        """Give a request to one of these engines. Returns it as it goes, and where to; None where there is none."""
        groups = self._splitter.decoding(groups)
        if add.request.begun is not None:
            add, groups = self._abreast(add, add.request.begun, groups)
        need = self._costs.need(add.domain, add.request)
        choice = self._choose(add, need, groups)
        if choice is None:
            return add, None
        if choice.fallback:
            self._counters["affinity_fallbacks"] += 1
            self._counters[f"affinity_fallbacks_{choice.fallback}"] += 1
        self._give(add, need, choice.engine)
        return add, choice.engine

    def _choose(self, add: Add, need: Need, groups: Sequence[Group]) -> Choice | None:
        trajectory = add.request.trajectory
        holder = self._pool.engines.get(self._prefixes.holder.get(trajectory, ""))
        held_by = None if holder is None else holder.hardware_class
        return choose(
            groups,
            need,
            self._costs.rates,
            preferred=self._costs.preferred(add.domain, held_by, {group.hardware_class for group in groups}),
            holder=holder,
            cached=0 if holder is None else self._prefixes.claimed(trajectory, holder),
            barred=self._mover.barred(trajectory),
        )

    def _abreast(self, add: Add, begun: Begun, groups: list[Group]) -> tuple[Add, list[Group]]:
        """Those that can go on with a request: versions never go back within it. It starts anew where some serve, but
        none that can."""
        newest = int(begun.versions[-1])
        able = [group for group in groups if group.version is not None and group.version >= newest]
        if able or not self._pool.serves:
            return add, able
        self._counters["tokens_dropped"] += len(begun.tokens)
        return with_begun(add, None), groups

    def _give(self, add: Add, need: Need, engine: EngineEntry) -> None:
        """The engine is to have this request, and its trajectory's prefix from now on."""
        request = add.request
        trajectory = request.trajectory
        cached = self._prefixes.cached(trajectory, engine)
        left = self._pool.engines.get(self._prefixes.holder.get(trajectory, engine.name), engine)
        if left is not engine and left.host is not None:
            self.forget(left, trajectory)
        self._counters["prefills_elsewhere"] += self._splitter.give(request, engine, cached)
        engine.give(add, need.claim(self._costs.rates(engine.hardware_class), cached, engine.limits.max_sequences))
        engine.outbox.append(add)
        self._prefixes.put(trajectory, engine, len(request.prompt))
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outgoing[engine.name] = engine

    def flush(self) -> None:
        """Send what was routed in this turn of the loop: one message per engine."""
        outgoing, self._outgoing = self._outgoing, {}
        for engine in outgoing.values():
            if engine.outbox and engine.host is not None:
                batch, engine.outbox = engine.outbox, []
                ended, engine.ended = engine.ended, []
                requests, reply_to = [add.request for add in batch], [add.reply_to for add in batch]
                self._hands.node.tell(engine.host, HostAdd(requests, reply_to, ended, self._splitter.at(requests)))

    def forget(self, engine: EngineEntry, trajectory: str) -> None:
        """Let an engine know, a little later, that it needs a prefix no more."""
        engine.ended.append(trajectory)
        if len(engine.ended) == 1:
            asyncio.get_running_loop().call_later(FORGET_WITHIN_S, self._tell_ended, engine)

    def _tell_ended(self, engine: EngineEntry) -> None:
        """Unless requests have brought the news."""
        ended, engine.ended = engine.ended, []
        if ended and engine.host is not None:
            self._hands.node.tell(engine.host, HostForget(ended))
