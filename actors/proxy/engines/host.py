"""The process around one engine: its actor takes messages, its thread runs the engine.

    loop (actor):   HostAdd, HostAbort, Stage ...  --orders-->  thread: take orders, else one engine step, else wait
    thread:         completions, results           --turns--->  loop: reply straight to who asked

Invariants:

- a command is taken in no time by the actor and takes effect after at most one step of the thread
  (``actors.proxy.engines.thread``);
- every request that was taken is answered once, or given back once (``HostRelease``), never both;
- what is staged is complete, and loaded once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
import numpy as np

from actors.core import Actor, Ref, handler
from actors.proxy.engines.load import engine_load
from actors.proxy.engines.prefilling import AwaitedPrefills, GivenPrefills
from actors.proxy.engines.protocol import CUT, Completion, Engine, nothing_sampled
from actors.proxy.engines.thread import EngineThread
from actors.proxy.kept import Part, Reports, pack
from actors.proxy.messages import (
    Acknowledged,
    Finished,
    HostAbort,
    HostAdd,
    HostForget,
    HostPrefill,
    HostRelease,
    HostResume,
    HostScore,
    HostSuspend,
    HostUpdate,
    Released,
    RequestFailed,
    Scored,
    Served,
    Stage,
    Staged,
    Unfinished,
)
from actors.telemetry import Spans
from actors.weightsync.manifest import Receipt
from actors.weightsync.receiver import StagedVersion, fetch
from bus.message import BusError

if TYPE_CHECKING:
    from hwprobe.telemetry import GpuFigures

T = TypeVar("T")
log = logging.getLogger(__name__)

SERVED_EVERY_S = 0.05
"""How often the proxy hears which requests were answered. An engine that dies within it has them answered twice."""


LOAD_EVERY_S = 1.0
"""How often the proxy hears how loaded the engine is."""


TOKENS_EVERY_S = 1.0
"""How often the proxy hears what requests have sampled that go on."""
TOKENS_TIMEOUT_S = 10.0


class TellLoad(msgspec.Struct, frozen=True):
    """From the host to itself."""


class TellTokens(msgspec.Struct, frozen=True):
    """From the host to itself."""


class Gpus(Protocol):
    """What measures the GPUs of this process: ``hwprobe.telemetry``."""

    def take(self) -> GpuFigures: ...

    def stop(self) -> None: ...


class StagingOvertaken(RuntimeError):
    """Another version was ordered while this one was fetched."""


class EngineHost(Actor):
    """See the module docstring."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        proxy: Ref,
        spans: Spans,
        failed: Callable[[BaseException], None],
        *,
        gpus: Gpus | None = None,
        load_every_s: float = LOAD_EVERY_S,
        tokens_every_s: float = TOKENS_EVERY_S,
    ) -> None:
        """``gpus``: what measures those of this process, and ends with this actor."""
        self._name = name
        self._engine = engine
        self._proxy = proxy
        self._spans = spans
        self._gpus = gpus
        self._load_every_s = load_every_s
        self._tokens_every_s = tokens_every_s
        self._reports = Reports()
        self._reply_to: dict[str, Ref] = {}
        self._brought: dict[str, int] = {}  # tokens that requests had when they came
        self._served: list[str] = []
        self._sampled: list[int] = []
        self._served_tokens = 0
        self._telling: asyncio.TimerHandle | None = None
        self._staging: Stage | None = None
        self._staged: StagedVersion | None = None
        self._thread = EngineThread(engine, self._deliver, self._refuse, failed, news=self._news, spans=spans)
        self._awaited = AwaitedPrefills(name, self._thread.add)
        self._given = GivenPrefills()

    def _news(self) -> bool:
        return self.node.news()  # which an actor has once it was spawned

    async def on_start(self) -> None:
        self.every(self._load_every_s, TellLoad())
        self.every(self._tokens_every_s, TellTokens())

    async def on_stop(self) -> None:
        await self._thread.stop(2.0)
        if self._gpus is not None:
            self._gpus.stop()
        if self._telling is not None:
            self._telling.cancel()
            self._tell_served()

    # ---- requests ------------------------------------------------------------------------------------------------

    @handler
    async def add(self, message: HostAdd) -> None:
        for place, (request, reply_to) in enumerate(zip(message.requests, message.reply_to, strict=True)):
            self._reply_to[request.request_id] = reply_to
            if request.begun is not None:
                self._brought[request.request_id] = len(request.begun.tokens)
                self._reports.comes(request.request_id)
            at = message.prefill_at[place] if message.prefill_at else None
            if at is None:
                self._thread.add(request)
            else:
                self._awaited.begin(self.node, request, at)
        self._forget(message.ended)

    @handler(concurrent=True)
    async def prefill(self, message: HostPrefill) -> Acknowledged:
        """Raises ``ValueError`` for a prompt that the engine cannot take."""
        computed = self._given.begin(message.request.request_id)
        self._thread.add(message.request)
        await computed
        return Acknowledged()

    @handler
    async def abort(self, message: HostAbort) -> None:
        awaited = self._awaited.take_out(message.request_id)
        if awaited is None:
            self._thread.abort(message.request_id)
        else:
            self._deliver([nothing_sampled(awaited)])

    @handler(concurrent=True, cancellable=False)
    async def release(self, message: HostRelease) -> Released:
        awaited = [self._awaited.take_out(id_) for id_ in message.request_ids]
        completions = [nothing_sampled(request) for request in awaited if request is not None]
        completions += await self._thread.release(message.request_ids)
        for completion in completions:
            self._reply_to.pop(completion.request_id, None)
        self._account([], self._sampled_here(completions))
        return Released([Unfinished(completion.request_id, completion.begun()) for completion in completions])

    @handler
    async def forget(self, message: HostForget) -> None:
        self._forget(message.trajectories)

    def _forget(self, trajectories: list[str]) -> None:
        for trajectory in trajectories:
            self._thread.order(lambda trajectory=trajectory: self._engine.forget(trajectory))  # type: ignore[misc]

    def _deliver(self, completions: Sequence[Completion]) -> None:
        """On the loop: one message per asker, and one to the proxy."""
        completions = [completion for completion in completions if not self._given.completed(completion)]
        if not completions:
            return
        by_asker: dict[Ref, list[Completion]] = {}
        for completion in completions:
            reply_to = self._reply_to.pop(completion.request_id, None)
            if reply_to is not None:
                by_asker.setdefault(reply_to, []).append(completion)
        for asker, batch in by_asker.items():
            self.node.tell(asker, Finished(self._name, batch))
        tokens = self._sampled_here(completions)
        sampled = [0 if c.finish_reason in CUT else len(c.tokens) for c in completions]
        self._account([c.request_id for c in completions], tokens, sampled)

    def _sampled_here(self, completions: Sequence[Completion]) -> int:
        """Tokens that these requests did not bring with them."""
        return sum(len(each.tokens) - self._brought.pop(each.request_id, 0) for each in completions)

    def _account(self, request_ids: Sequence[str], tokens: int, sampled: Sequence[int] = ()) -> None:
        """Tell the proxy, which only counts what is under way, a little later: one message for several steps."""
        self._served.extend(request_ids)
        self._sampled.extend(sampled)
        self._served_tokens += tokens
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(SERVED_EVERY_S, self._tell_served)

    def _tell_served(self) -> None:
        self._telling = None
        served, self._served = self._served, []
        sampled, self._sampled = self._sampled, []
        tokens, self._served_tokens = self._served_tokens, 0
        self.node.tell(self._proxy, Served(self._name, served, tokens, sampled=sampled))

    @handler
    async def tell_load(self, message: TellLoad) -> None:
        occupancy, busy = self._thread.meter.take()
        load = engine_load(occupancy, busy, None if self._gpus is None else self._gpus.take())
        effort, work = self._thread.progress.read(), self._engine.work.take()
        self.node.tell(self._proxy, Served(self._name, [], 0, load, work=work, effort=effort))

    @handler(concurrent=True)
    async def tell_tokens(self, message: TellTokens) -> None:
        """What a report that was lost has told comes with the next."""
        due = self._reports.due(self._reply_to, self._brought)
        parts = await self._thread.call(lambda: self._sampled_since(due)) if due else []
        if not parts:
            return
        try:
            await self.node.ask(self._proxy, pack(self._name, parts), Acknowledged, timeout_s=TOKENS_TIMEOUT_S)
            self._reports.told(parts)
        except BusError as error:
            log.info("what running requests have sampled was not taken: %s", error)

    def _sampled_since(self, due: list[tuple[str, int]]) -> list[Part]:
        """In the thread."""
        found = ((id_, since, self._engine.sampled(id_, since)) for id_, since in due)
        return [(id_, since, part) for id_, since, part in found if part is not None]

    def _refuse(self, request_id: str, reason: str) -> None:
        if self._given.refused(request_id, reason):
            return
        self._brought.pop(request_id, None)
        reply_to = self._reply_to.pop(request_id, None)
        if reply_to is not None:
            self.node.tell(reply_to, RequestFailed(request_id, f"refused by engine {self._name}: {reason}"))
        self._account([request_id], 0, [0])

    # ---- weights -------------------------------------------------------------------------------------------------

    @handler(concurrent=True)
    async def stage(self, message: Stage) -> Staged:
        """Fetch a version beside the running engine. One version is kept at a time: the last that was ordered."""
        start = time.time()
        version = message.manifest.version
        self._staging, self._staged = message, None
        with self._thread.turns.undisturbed():
            staged = await fetch(self.node, message.source, message.manifest)
        if self._staging is not message:
            raise StagingOvertaken(f"version {version} was overtaken by version {self._staging.manifest.version}")
        self._staged = staged
        self._spans.add("stage", start, time.time(), version=version)
        return Staged(version, staged.bytes, time.time() - start)

    @handler(concurrent=True, cancellable=False)
    async def suspend(self, message: HostSuspend) -> Acknowledged:
        await self._thread.suspend()
        return Acknowledged()

    @handler(concurrent=True, cancellable=False)
    async def update(self, message: HostUpdate) -> Receipt:
        """Load what is staged, and prove it."""
        start = time.time()
        staged, self._staged = self._staged, None
        if staged is None or staged.manifest.version != message.version:
            found = "nothing" if staged is None else f"version {staged.manifest.version}"
            raise ValueError(f"version {message.version} is not staged at engine {self._name}, {found} is")

        def load() -> Receipt:
            digests = self._thread.load(message.version, staged.tensors)
            return Receipt(message.version, self._name, digests, self._thread.score(staged.manifest.canary))

        receipt = await self._thread.call(load)
        self._spans.add("swap", start, time.time(), version=message.version)
        return receipt

    @handler(concurrent=True, cancellable=False)
    async def resume(self, message: HostResume) -> Acknowledged:
        await self._thread.resume()
        return Acknowledged()

    @handler(concurrent=True)
    async def score(self, message: HostScore) -> Scored:
        tokens = np.asarray(message.tokens)
        return Scored(await self._thread.call(lambda: self._thread.score(tokens)))
