"""The weight-sync actor: brings every engine to the version that the pipeline publishes, and proves it.

For each engine, side by side and overlapped with its generation as far as the swap:

    Stage (fetch, while it generates) -> SUSPEND -> UPDATE -> receipt verified -> RESUME

Invariant: an engine serves only with an accepted receipt. A refused one is staged again, whole, once; then the engine
goes out of routing. In-place reload means that the old version is gone: a refused engine cannot fall back to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from actors.core import Actor, Ref, handler
from actors.proxy.messages import (
    Acknowledged,
    Done,
    Progress,
    Remove,
    Resume,
    Stage,
    Staged,
    Suspend,
    Update,
)
from actors.telemetry import Spans
from actors.weightsync.manifest import Manifest, Receipt, ReceiptRefused, size_bytes, verify
from actors.weightsync.messages import EngineJoined, EngineLeft, Publish, Published
from bus.message import BusError

log = logging.getLogger(__name__)

ATTEMPTS = 2
STAGE_TIMEOUT_S = 300.0
COMMAND_TIMEOUT_S = 300.0


class EngineGone(RuntimeError):
    """The engine died meanwhile; it will join again or not."""


class WeightSync(Actor):
    """See the module docstring."""

    def __init__(self, proxy: Ref, spans: Spans) -> None:
        self._proxy = proxy
        self._spans = spans
        self._engines: dict[str, Ref] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._current: Publish | None = None

    @handler(concurrent=True)
    async def joined(self, message: EngineJoined) -> None:
        """A cold engine: bring it to the current version, if there is one yet."""
        self._engines[message.engine] = message.host
        self._locks.setdefault(message.engine, asyncio.Lock())
        if self._current is not None:
            await self._bring(message.engine, self._current)

    @handler
    async def left(self, message: EngineLeft) -> None:
        self._engines.pop(message.engine, None)

    @handler(concurrent=True)
    async def publish(self, message: Publish) -> Published:
        """Answered when every engine holds the version or is out of routing."""
        start = time.time()
        self._current = message
        engines = list(self._engines)
        outcomes = await asyncio.gather(*(self._bring(engine, message) for engine in engines))
        refused = {engine: why for engine, (why, _) in zip(engines, outcomes, strict=True) if why}
        self._spans.add("publish", start, time.time(), version=message.manifest.version)
        return Published(
            version=message.manifest.version,
            engines=[engine for engine in engines if engine not in refused],
            refused=refused,
            seconds=time.time() - start,
            swap_seconds=max((seconds for _, seconds in outcomes), default=0.0),
            bytes=sum(_bytes_of(message.manifest) for _ in engines),
        )

    async def _bring(self, engine: str, order: Publish) -> tuple[str, float]:
        """Returns why it failed ("" for success) and for how long the engine did not serve."""
        async with self._locks[engine]:
            if self._current is not order:
                return "", 0.0  # overtaken by a newer version, which will be brought here next
            try:
                return "", await self._attempts(engine, order)
            except ReceiptRefused as refusal:
                reason = str(refusal)
                await self.node.ask(self._proxy, Remove(engine, reason), Acknowledged, timeout_s=COMMAND_TIMEOUT_S)
            except (BusError, EngineGone) as error:
                reason = f"engine {engine}, version {order.manifest.version}: {error}"
                log.warning("weights did not arrive: %s", reason)
            self._engines.pop(engine, None)
            return reason, 0.0

    async def _attempts(self, engine: str, order: Publish) -> float:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._swap(engine, order)
            except ReceiptRefused as refusal:
                log.warning("receipt refused (attempt %d of %d): %s", attempt, ATTEMPTS, refusal)
                if attempt == ATTEMPTS:
                    raise
        raise EngineGone(engine)

    async def _swap(self, engine: str, order: Publish) -> float:
        host = self._engines.get(engine)
        if host is None:
            raise EngineGone(f"engine {engine} left")
        version = order.manifest.version
        about = f"version {version}"
        await self.node.ask(host, Stage(order.manifest, order.source), Staged, timeout_s=STAGE_TIMEOUT_S, about=about)
        start = time.time()
        await self._command(Suspend(engine), about)
        done = await self._command(Update(engine, version), about)
        verify(order.manifest, _receipt(done, engine))
        await self._command(Resume(engine, version), about)
        return time.time() - start

    async def _command(self, command: Suspend | Update | Resume, about: str) -> Done:
        """Both answers of a proxy command; the second one is returned."""
        progress: Any = Progress
        answers = self.node.stream(self._proxy, command, progress, timeout_s=COMMAND_TIMEOUT_S, about=about)
        async for answer in answers:
            if isinstance(answer, Done):
                return answer
        raise EngineGone(f"{type(command).__name__} was accepted but never done")


def _receipt(done: Done, engine: str) -> Receipt:
    if done.receipt is None:
        raise ReceiptRefused(f"engine {engine} gave no receipt")
    return done.receipt


def _bytes_of(manifest: Manifest) -> int:
    return sum(size_bytes(fact.dtype, fact.shape) for fact in manifest.tensors.values())
