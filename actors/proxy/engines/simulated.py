"""An engine's host on virtual time: the messages of ``actors.proxy.engines.host``, the times of the roofline.

Invariants:

- it says what the real host says, in the same order: requests are answered once or given back once, orders take effect
  between two steps, a suspended engine makes none;
- a token depends on the request's seed and its place alone (``actors.proxy.engines.simulated_row``), so that what was
  moved can be compared with what was not;
- events, not tokens, cost time: steps that are alike are taken at once, and cut at the next boundary when an order
  comes.

An engine does one thing at a time: prefills that wait go first, some together, and give one token each; else a step for
all that decode (``simulated_batch``). What of a trajectory's prefix is still in its memory (``simulated_cache``) is not
computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from actors.core import Actor, Ref, handler
from actors.proxy.engines.load import LoadMeter, engine_load
from actors.proxy.engines.progress import ProgressMeter
from actors.proxy.engines.protocol import CUT, EngineLimits, EngineRefusal, FinishReason
from actors.proxy.engines.seeds import derive
from actors.proxy.engines.simulated_batch import SimulatedBatch
from actors.proxy.engines.simulated_cache import SimulatedCache
from actors.proxy.engines.simulated_row import VOCABULARY, Row
from actors.proxy.engines.validation import check
from actors.proxy.engines.work import WorkMeter
from actors.proxy.kept import Part, Reports, pack
from actors.proxy.messages import (
    Acknowledged,
    Finished,
    HostAbort,
    HostAdd,
    HostForget,
    HostRelease,
    HostResume,
    HostSuspend,
    HostUpdate,
    Released,
    RequestFailed,
    Served,
    Unfinished,
)
from actors.weightsync.manifest import Receipt
from bus.message import BusError
from hwprobe.cost import DeviceCost, ModelSize
from hwprobe.telemetry import GpuFigures

T = TypeVar("T")

LOAD_EVERY_S = 1.0
TOKENS_TIMEOUT_S = 10.0
ENDS: tuple[FinishReason, ...] = ("stop", "length")


class TellLoad(msgspec.Struct, frozen=True):
    """From the host to itself."""


class TellTokens(msgspec.Struct, frozen=True):
    """From the host to itself."""


class SimulatedHost(Actor):
    """See the module docstring. Weights are taken from nowhere: an ``HostUpdate`` is a version, nothing else."""

    def __init__(
        self,
        name: str,
        proxy: Ref,
        cost: DeviceCost,
        *,
        limits: EngineLimits,
        model: ModelSize | None = None,
        load_every_s: float = LOAD_EVERY_S,
        tokens_every_s: float | None = None,
        cache_tokens: int | None = None,
        overhead_s: float = 0.0,
    ) -> None:
        """``tokens_every_s``: None, and it does not say what running requests have sampled, which cuts steps.
        ``cache_tokens``: whose keys and values its memory holds; default: what the model and the reserve leave.
        ``overhead_s``: what a step takes besides the device's work (scheduling, launches)."""
        self._name = name
        self._proxy = proxy
        self._cost = cost
        self._model = model or ModelSize()
        self.limits = msgspec.structs.replace(limits, vocabulary=VOCABULARY, texts=True)
        self._load_every_s = load_every_s
        self._tokens_every_s = tokens_every_s
        self._reports = Reports()
        self._loop = asyncio.get_running_loop()
        self.meter = LoadMeter(limits.max_sequences, self._loop.time)
        self.progress = ProgressMeter(self._loop.time)
        self.work = WorkMeter()
        self.version: int | None = None
        self._serving = False
        self._taken = 0  # requests, ever
        cache = SimulatedCache(cost.cache_tokens(self._model) if cache_tokens is None else cache_tokens)
        self.batch = SimulatedBatch(limits.max_sequences, cache)
        self._overhead_s = overhead_s
        self._orders: list[Callable[[], None]] = []
        self._step: asyncio.TimerHandle | None = None
        self._since = 0.0
        self._step_s = 0.0  # of the decoding under way; 0 while it prefills or rests
        self._steps = 0  # taken at once
        self.telling = True  # whether its telemetry works
        self.hanging = False  # whether steps that begin from now on never end

    async def on_start(self) -> None:
        self.every(self._load_every_s, TellLoad())
        if self._tokens_every_s is not None:
            self.every(self._tokens_every_s, TellTokens())

    async def on_stop(self) -> None:
        if self._step is not None:
            self._step.cancel()

    # ---- messages ------------------------------------------------------------------------------------------------

    @handler
    async def add(self, message: HostAdd) -> None:
        for request, reply_to in zip(message.requests, message.reply_to, strict=True):
            try:
                check(request, self.limits)
            except EngineRefusal as refusal:
                reason = f"refused by engine {self._name}: {refusal}"
                self.node.tell(reply_to, RequestFailed(request.request_id, reason))
                self.node.tell(self._proxy, Served(self._name, [request.request_id], 0, sampled=[0]))
                continue
            self._taken += 1
            self._reports.comes(request.request_id)
            row = self.batch.waiting[request.request_id] = Row(request, reply_to, derive(0, self._taken))
            if not self._may_be_sampled(row):
                self._end_superseded()
        for trajectory in message.ended:
            self.batch.cache.forget(trajectory)
        self._order(lambda: None)

    @handler
    async def abort(self, message: HostAbort) -> None:
        def action() -> None:
            row = self.batch.take_out(message.request_id)
            if row is not None:
                self._answer([row], "aborted")

        self._order(action)

    @handler(concurrent=True, cancellable=False)
    async def release(self, message: HostRelease) -> Released:
        rows = await self._between_steps(lambda: [self.batch.take_out(id_) for id_ in message.request_ids])
        here = [row for row in rows if row is not None]
        self._account([], here)
        done = [row.sampled.completion("aborted") for row in here]
        return Released([Unfinished(each.request_id, each.begun()) for each in done])

    @handler
    async def forget(self, message: HostForget) -> None:
        for trajectory in message.trajectories:
            self.batch.cache.forget(trajectory)

    @handler(concurrent=True, cancellable=False)
    async def suspend(self, message: HostSuspend) -> Acknowledged:
        await self._between_steps(lambda: self._serve(False))
        return Acknowledged()

    @handler(cancellable=False)
    async def update(self, message: HostUpdate) -> Receipt:
        """Raises ``ValueError`` for an engine that serves."""
        if self._serving:
            raise ValueError(f"version {message.version} is for a suspended engine, and {self._name} serves")
        self.version = message.version
        self._end_superseded()
        self.batch.begin_anew()
        return Receipt(message.version, self._name, {}, np.zeros(1, np.float32))

    @handler(concurrent=True, cancellable=False)
    async def resume(self, message: HostResume) -> Acknowledged:
        await self._between_steps(lambda: self._serve(True))
        return Acknowledged()

    def _serve(self, serving: bool) -> None:
        self._serving = serving

    @handler
    async def tell_load(self, message: TellLoad) -> None:
        occupancy, busy = self.meter.take()
        if self.telling:
            figures = GpuFigures(
                state="measuring",
                samples=1,
                utilisation=busy,
                memory_used=0,
                memory_total=0,
                devices=(f"GPU-{self._name}",),
                errors={},
            )
            load = engine_load(occupancy, busy, figures)
            if self._step_s:  # several steps are taken at once: some of them are over
                self.progress.progressed()
            effort = self.progress.read()
            self.node.tell(self._proxy, Served(self._name, [], 0, load, work=self.work.take(), effort=effort))

    @handler(concurrent=True)
    async def tell_tokens(self, message: TellTokens) -> None:
        here = self.batch.here()
        due = self._reports.due(here, {id_: row.brought for id_, row in here.items()})
        parts = await self._between_steps(lambda: self._sampled_since(due)) if due else []
        if parts:
            with contextlib.suppress(BusError):  # the next report makes up for it
                await self.node.ask(self._proxy, pack(self._name, parts), Acknowledged, timeout_s=TOKENS_TIMEOUT_S)
                self._reports.told(parts)

    def _sampled_since(self, due: list[tuple[str, int]]) -> list[Part]:
        here = self.batch.here()
        found = ((id_, since, here[id_].sampled.since(since)) for id_, since in due if id_ in here)
        return [(id_, since, part) for id_, since, part in found if part is not None]

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _between_steps(self, action: Callable[[], T]) -> asyncio.Future[T]:
        result: asyncio.Future[T] = self._loop.create_future()
        self._order(lambda: result.set_result(action()))
        return result

    def _order(self, action: Callable[[], None]) -> None:
        """Between two steps: now, or at the end of the one that runs."""
        self._orders.append(action)
        if self._step is None:
            self._go_on()
        elif self._step_s:  # several are taken at once: the last of them is the one that runs now
            self._steps = min(self._steps, math.floor((self._loop.time() - self._since) / self._step_s) + 1)
            self._step.cancel()
            self._step = self._loop.call_at(self._since + self._steps * self._step_s, self._decoded)

    def _go_on(self) -> None:
        """Carry out what was ordered, take in what there is room for, then prefill or decode."""
        orders, self._orders = self._orders, []
        for action in orders:
            action()
        self._step, self._step_s, self._since = None, 0.0, self._loop.time()
        if self._serving:
            self._begin_step()
        self.progress.at("nothing" if self._step is None else "steps")
        if self._step is not None and self.hanging:
            self._step.cancel()
            self._step_s = 0.0
        unfinished = sum(map(self._may_start, self.batch.waiting.values())) + self.batch.running
        self.meter.note(unfinished, stepping=self._step is not None)

    def _may_be_sampled(self, row: Row) -> bool:
        bound = row.request.to_version
        return bound is None or self.version is None or self.version <= bound

    def _end_superseded(self) -> None:
        passed = [row for row in self.batch.here().values() if not self._may_be_sampled(row)]
        for row in passed:
            self.batch.take_out(row.request.request_id)
        self._answer(passed, "superseded")

    def _may_start(self, row: Row) -> bool:
        return row.request.from_version <= (self.version or 0)

    def _begin_step(self) -> None:
        self.batch.admit(self._may_start)
        if self.batch.fresh:
            self._prefill(self.batch.prefills())
        elif self.batch.decoding:
            self._decode()

    def _prefill(self, rows: list[Row]) -> None:
        tokens = sum(row.missing for row in rows)
        reading_s = self._cost.step_s(self._model, 0, 0)  # the weights, however few the tokens
        takes_s = max(self._cost.prefill_s(self._model, tokens), reading_s) + self._overhead_s
        self.work.prefilled(tokens)
        self._step = self._loop.call_later(takes_s, self._prefilled, rows, takes_s)

    def _prefilled(self, rows: list[Row], took_s: float) -> None:
        self.work.step(took_s)
        self._sampled(rows, 1)

    def _decode(self) -> None:
        self._steps = self.batch.steps()
        rows = self.batch.decoding.values()
        context = sum(row.length for row in rows) / len(rows)
        self._step_s = self._cost.step_s(self._model, len(rows), context + self._steps / 2) + self._overhead_s
        self._step = self._loop.call_at(self._since + self._steps * self._step_s, self._decoded)

    def _decoded(self) -> None:
        rows = list(self.batch.decoding.values())
        count, batch, lengths = self._steps, len(rows), sum(row.length for row in rows)
        self.work.decoded(count * batch, round(count * (lengths + batch * (count - 1) / 2)))
        self.work.step(count * self._step_s, count)
        self._sampled(rows, count)

    def _sampled(self, rows: list[Row], count: int) -> None:
        self.progress.progressed()
        done = self.batch.sampled(rows, count, self.version or 0)
        for reason in ENDS:
            self._answer([row for row in done if row.sampled.end() == reason], reason)
        self._go_on()

    def _answer(self, rows: Sequence[Row], reason: FinishReason) -> None:
        for row in rows:
            self.node.tell(row.reply_to, Finished(self._name, [row.sampled.completion(reason)]))
        if rows:
            self._account([row.request.request_id for row in rows], rows, whole=reason not in CUT)

    def _account(self, ids: list[str], rows: Sequence[Row], *, whole: bool = True) -> None:
        tokens = sum(len(row.sampled) - row.brought for row in rows)
        sampled = [len(row.sampled) * whole for row in rows] if ids else []
        self.node.tell(self._proxy, Served(self._name, ids, tokens, sampled=sampled))
