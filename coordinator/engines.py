"""All engines of a run, whichever proxies have them, to be looked at and ordered as one.

Invariant: what is described is what the proxies that answer say, and the tokens that a proxy had sampled count on when
it is gone. An order to all reaches all, or raises.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from actors.core import Node, Ref
from actors.proxy.messages import DescribeProxy, EngineState, ProxyState
from bus.message import BusError, PeerLost

T = TypeVar("T")
log = logging.getLogger(__name__)


class Engines:
    """See the module docstring. ``proxies``: those that there are just now."""

    def __init__(self, node: Node, proxies: Callable[[], Sequence[Ref]]) -> None:
        self._node = node
        self._proxies = proxies
        self._tokens: dict[Ref, int] = {}

    @property
    def proxies(self) -> dict[str, Ref]:
        """By the name of their node."""
        return {ref.node.name: ref for ref in self._proxies()}

    async def describe(self, timeout_s: float) -> ProxyState:
        """Every engine says whose it is. Raises ``BusError`` where no proxy answers."""
        asked = self.proxies
        answers = await asyncio.gather(
            *(self._node.ask(ref, DescribeProxy(), ProxyState, timeout_s=timeout_s) for ref in asked.values()),
            return_exceptions=True,
        )
        engines: list[EngineState] = []
        counters: Counter[str] = Counter()
        queued = 0
        failure: BusError | None = None if asked else PeerLost("there is no proxy yet")
        for (name, ref), answer in zip(asked.items(), answers, strict=True):
            if isinstance(answer, ProxyState):
                engines += [msgspec.structs.replace(engine, proxy=name) for engine in answer.engines]
                counters.update(answer.counters)
                queued += answer.queued
                self._tokens[ref] = answer.tokens
            elif isinstance(answer, BusError):
                log.info("proxy %s: %s", name, answer)
                failure = answer
            else:
                raise answer
        if failure is not None and not any(isinstance(answer, ProxyState) for answer in answers):
            raise failure
        return ProxyState(engines, queued, sum(self._tokens.values()), dict(counters))

    async def ask_each(self, message: object, reply: type[T], *, timeout_s: float, retries: int = 0) -> dict[str, T]:
        """Every proxy, by the name of its node. Raises ``BusError`` where one does not answer, or there is none."""
        asked = self.proxies
        if not asked:
            raise PeerLost("there is no proxy yet")
        answers = await asyncio.gather(
            *(self._node.ask(ref, message, reply, timeout_s=timeout_s, retries=retries) for ref in asked.values())
        )
        return dict(zip(asked, answers, strict=True))

    def proxy_of(self, engine: EngineState) -> Ref:
        """Raises ``PeerLost`` where it is gone by now."""
        ref = self.proxies.get(engine.proxy)
        if ref is None:
            raise PeerLost(f"engine {engine.name}: its proxy {engine.proxy} is gone")
        return ref
