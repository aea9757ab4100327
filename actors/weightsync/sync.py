"""The weight-sync actor: brings every engine to the version that the pipeline publishes, and proves it.

For each engine, side by side and overlapped with its generation as far as the swap:

    Stage (fetch, while it generates) -> SUSPEND -> UPDATE -> receipt verified -> RESUME

Invariants:

- an engine serves only with an accepted receipt. Where the receipt is refused, or the version does not arrive, all of
  it is sent again, once; then the engine goes out of routing, so that none goes on serving an old version for ever.
  In-place reload means that the old version is gone: a refused engine cannot fall back to it;
- an engine that dies holds nobody up: whatever was under way with it ends at once, and its successor joins anew. So it
  is with all engines of a proxy that is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from actors.core import Actor, Ref, handler
from actors.proxy.messages import (
    Acknowledged,
    Done,
    Progress,
    ProxySet,
    Remove,
    Resume,
    Stage,
    Staged,
    Suspend,
    Update,
)
from actors.telemetry import Spans
from actors.weightsync.manifest import Manifest, Receipt, ReceiptRefused, canary_difference, size_bytes, verify
from actors.weightsync.messages import (
    DescribeWeights,
    EngineJoined,
    EngineLeft,
    ProvenVersion,
    Publish,
    Published,
    Refusal,
    WeightsState,
)
from bus.message import BusError

T = TypeVar("T")
log = logging.getLogger(__name__)

ATTEMPTS = 2
RETRY_AFTER_S = 0.5
"""By then the news has come if the engine is the reason."""
STAGE_TIMEOUT_S = 300.0
COMMAND_TIMEOUT_S = 300.0
REFUSALS_KEPT = 20


class EngineGone(RuntimeError):
    """The engine died meanwhile; it will join again or not."""


class _Member:
    """One incarnation of an engine."""

    def __init__(self, name: str, host: Ref, proxy: Ref) -> None:
        self.name = name
        self.host = host
        self.proxy = proxy
        self.lock = asyncio.Lock()
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.proven: tuple[ProvenVersion, float] | None = None  # and when, by the monotonic clock

    def leave(self, reason: str) -> None:
        if not self.gone.done():
            self.gone.set_result(reason)


class _Brought(msgspec.Struct, frozen=True):
    """How it went with one engine."""

    engine: str
    failure: str = ""
    overtaken: bool = False
    swap_seconds: float = 0.0  # for how long it did not serve


class WeightSync(Actor):
    """See the module docstring."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._proxies: list[Ref] = []
        self._members: dict[str, _Member] = {}
        self._current: Publish | None = None
        self._refusals: deque[Refusal] = deque(maxlen=REFUSALS_KEPT)

    @handler(urgent=True)
    async def describe(self, message: DescribeWeights) -> WeightsState:
        now = time.monotonic()
        proven = [member.proven for member in self._members.values() if member.proven is not None]
        return WeightsState(
            ordered=None if self._current is None else self._current.manifest.version,
            proven=[msgspec.structs.replace(version, age_s=now - at) for version, at in proven],
            refusals=list(self._refusals),
        )

    def follow(self, found: ProxySet) -> None:
        """These are the proxies from now on: the engines of others are gone with them."""
        self._proxies = [member.ref for member in found.members]
        for member in list(self._members.values()):
            if member.proxy not in self._proxies:
                self._leave(member.name, "its proxy is gone")

    @handler(concurrent=True)
    async def joined(self, message: EngineJoined) -> None:
        """A cold engine: bring it to the current version, if there is one yet. Raises ``ValueError`` where it is not
        known whose it is."""
        proxy = message.proxy or next(iter(self._proxies), None)
        if proxy is None:
            raise ValueError(f"engine {message.engine}: nobody is known to be its proxy")
        self._leave(message.engine, "a successor joined")
        member = self._members[message.engine] = _Member(message.engine, message.host, proxy)
        if self._current is not None:
            await self._bring(member, self._current)

    @handler(urgent=True)
    async def left(self, message: EngineLeft) -> None:
        self._leave(message.engine, message.reason)

    def _leave(self, engine: str, reason: str) -> None:
        member = self._members.pop(engine, None)
        if member is not None:
            member.leave(reason)

    @handler(concurrent=True, cancellable=False)
    async def publish(self, message: Publish) -> Published:
        """Answered when every engine holds the version, is out of routing, or is to get a newer one."""
        start = time.time()
        self._current = message
        brought = await asyncio.gather(*(self._bring(member, message) for member in list(self._members.values())))
        version = message.manifest.version
        self._spans.add("publish", start, time.time(), version=version)
        engines = [one.engine for one in brought if not one.failure and not one.overtaken]
        return Published(
            version=version,
            engines=engines,
            refused={one.engine: one.failure for one in brought if one.failure},
            seconds=time.time() - start,
            swap_seconds=max((one.swap_seconds for one in brought), default=0.0),
            bytes=_bytes_of(message.manifest) * len(engines),
        )

    async def _bring(self, member: _Member, order: Publish) -> _Brought:
        """Raises nothing that an engine can cause."""
        async with member.lock:
            if self._current is not order:  # the newer version will be brought here next
                return _Brought(member.name, overtaken=True)
            about = f"engine {member.name}, version {order.manifest.version}"
            try:
                return _Brought(member.name, swap_seconds=await self._attempts(member, order))
            except EngineGone as gone:
                reason = f"{about}: {gone}"
                log.warning("%s", reason)
            except ReceiptRefused as refusal:
                reason = str(refusal)
                await self._remove(member, reason)
            except BusError as error:
                reason = f"{about}: {error}"
                await self._remove(member, reason)
            if self._members.get(member.name) is member:
                del self._members[member.name]
            self._refusals.append(Refusal(member.name, order.manifest.version, reason))
            return _Brought(member.name, failure=reason)

    async def _remove(self, member: _Member, reason: str) -> None:
        if member.gone.done():
            return
        try:
            await self.node.ask(member.proxy, Remove(member.name, reason), Acknowledged, timeout_s=COMMAND_TIMEOUT_S)
        except BusError as error:
            log.error("engine %s could not be taken out of routing: %s", member.name, error)

    async def _attempts(self, member: _Member, order: Publish) -> float:
        """Returns how long the engine did not serve. Raises what the last attempt raised, or ``EngineGone``."""
        attempt = 1
        while True:
            try:
                return await self._unless_gone(member, self._swap(member, order))
            except (ReceiptRefused, BusError) as error:
                if attempt == ATTEMPTS:
                    raise
                log.warning("attempt %d of %d failed: %s", attempt, ATTEMPTS, error)
            await self._unless_gone(member, asyncio.sleep(RETRY_AFTER_S))
            attempt += 1

    async def _unless_gone(self, member: _Member, work: Coroutine[Any, Any, T]) -> T:
        """Do something with an engine; its end ends the wait. Raises ``EngineGone``."""
        task = asyncio.ensure_future(work)
        try:
            waiting: set[asyncio.Future[Any]] = {task, member.gone}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EngineGone(f"it left: {member.gone.result()}")
        finally:
            task.cancel()

    async def _swap(self, member: _Member, order: Publish) -> float:
        version = order.manifest.version
        about = f"version {version}"
        stage = Stage(order.manifest, order.source)
        await self.node.ask(member.host, stage, Staged, timeout_s=STAGE_TIMEOUT_S, about=about)
        start = time.time()
        await self._command(member, Suspend(member.name), about)
        done = await self._command(member, Update(member.name, version), about)
        receipt = _receipt(done, member.name)
        verify(order.manifest, receipt)
        await self._command(member, Resume(member.name, version), about)
        seconds = time.time() - start
        member.proven = _proven(order.manifest, receipt, seconds), time.monotonic()
        return seconds

    async def _command(self, member: _Member, command: Suspend | Update | Resume, about: str) -> Done:
        """Both answers of a proxy command; the second one is returned."""
        progress: Any = Progress
        done: Done | None = None
        answers = self.node.stream(member.proxy, command, progress, timeout_s=COMMAND_TIMEOUT_S, about=about)
        async for answer in answers:
            done = answer if isinstance(answer, Done) else done
        if done is None:
            raise EngineGone(f"{type(command).__name__} was accepted but never done")
        return done


def _receipt(done: Done, engine: str) -> Receipt:
    if done.receipt is None:
        raise ReceiptRefused(f"engine {engine} gave no receipt")
    return done.receipt


def _proven(manifest: Manifest, receipt: Receipt, seconds: float) -> ProvenVersion:
    return ProvenVersion(
        engine=receipt.engine,
        version=receipt.version,
        tensors=len(receipt.digests),
        bytes=_bytes_of(manifest),
        canary_nats=canary_difference(manifest, receipt),
        swap_s=seconds,
        age_s=0.0,
    )


def _bytes_of(manifest: Manifest) -> int:
    return sum(size_bytes(fact.dtype, fact.shape) for fact in manifest.tensors.values())
