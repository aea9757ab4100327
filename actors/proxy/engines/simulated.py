"""An engine's host on virtual time: the messages of ``actors.proxy.engines.host``, the times of the roofline.

Invariants:

- it says what the real host says, in the same order: requests are answered once or given back once, orders take effect
  between two steps, a suspended engine makes none;
- a token depends on the request's seed and its place alone (``actors.proxy.engines.simulated_row``), so that what was
  moved can be compared with what was not;
- events, not tokens, cost time: steps that are alike are taken at once, and cut at the next boundary when an order
  comes.

An engine does one thing at a time: a prefill that waits goes first, and gives one token; else a step for all that
decode. What of a trajectory's prefix it has computed before is not computed again.
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
    ) -> None:
        """``tokens_every_s``: None, and it does not say what running requests have sampled, which cuts steps."""
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
        self._waiting: dict[str, Row] = {}
        self._fresh: dict[str, Row] = {}  # have a place, and are to be prefilled
        self._decoding: dict[str, Row] = {}
        self._cached: dict[str, int] = {}  # trajectory -> tokens
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
            row = self._waiting[request.request_id] = Row(request, reply_to, derive(0, self._taken))
            if not self._may_be_sampled(row):
                self._end_superseded()
        for trajectory in message.ended:
            self._cached.pop(trajectory, None)
        self._order(lambda: None)

    @handler
    async def abort(self, message: HostAbort) -> None:
        def action() -> None:
            row = self._take_out(message.request_id)
            if row is not None:
                self._answer([row], "aborted")

        self._order(action)

    @handler(concurrent=True, cancellable=False)
    async def release(self, message: HostRelease) -> Released:
        rows = await self._between_steps(lambda: [self._take_out(id_) for id_ in message.request_ids])
        here = [row for row in rows if row is not None]
        self._account([], here)
        done = [row.sampled.completion("aborted") for row in here]
        return Released([Unfinished(each.request_id, each.begun()) for each in done])

    @handler
    async def forget(self, message: HostForget) -> None:
        for trajectory in message.trajectories:
            self._cached.pop(trajectory, None)

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
        self._cached.clear()
        self._fresh |= self._decoding
        self._decoding.clear()
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
        here = self._waiting | self._fresh | self._decoding
        due = self._reports.due(here, {id_: row.brought for id_, row in here.items()})
        parts = await self._between_steps(lambda: self._sampled_since(due)) if due else []
        if parts:
            with contextlib.suppress(BusError):  # the next report makes up for it
                await self.node.ask(self._proxy, pack(self._name, parts), Acknowledged, timeout_s=TOKENS_TIMEOUT_S)
                self._reports.told(parts)

    def _sampled_since(self, due: list[tuple[str, int]]) -> list[Part]:
        here = self._waiting | self._fresh | self._decoding
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
        unfinished = sum(map(self._may_start, self._waiting.values())) + len(self._fresh) + len(self._decoding)
        self.meter.note(unfinished, stepping=self._step is not None)

    def _may_be_sampled(self, row: Row) -> bool:
        bound = row.request.to_version
        return bound is None or self.version is None or self.version <= bound

    def _end_superseded(self) -> None:
        rows = [row for place in (self._waiting, self._fresh, self._decoding) for row in place.values()]
        passed = [row for row in rows if not self._may_be_sampled(row)]
        for row in passed:
            self._take_out(row.request.request_id)
        self._answer(passed, "superseded")

    def _may_start(self, row: Row) -> bool:
        return row.request.from_version <= (self.version or 0)

    def _begin_step(self) -> None:
        for id_, row in sorted(self._waiting.items(), key=_by_urgency):
            if len(self._fresh) + len(self._decoding) >= self.limits.max_sequences:
                break
            if self._may_start(row):
                self._fresh[id_] = self._waiting.pop(id_)
        if self._fresh:
            id_, row = next(iter(self._fresh.items()))
            known = min(self._cached.get(row.request.trajectory, 0), row.length - 1)
            takes_s = self._cost.prefill_s(self._model, row.length - known)
            self.work.prefilled(row.length - known)
            self._step = self._loop.call_later(takes_s, self._prefilled, id_, takes_s)
        elif self._decoding:
            rows = self._decoding.values()
            context = sum(row.length for row in rows) / len(rows)
            self._steps = min(row.left for row in rows)
            self._step_s = self._cost.step_s(self._model, len(rows), context + self._steps / 2)
            self._step = self._loop.call_at(self._since + self._steps * self._step_s, self._decoded)

    def _prefilled(self, id_: str, took_s: float) -> None:
        self.work.step(took_s)
        row = self._decoding[id_] = self._fresh.pop(id_)
        self._sampled([row], 1)

    def _decoded(self) -> None:
        count, lengths = self._steps, sum(row.length for row in self._decoding.values())
        batch = len(self._decoding)
        self.work.decoded(count * batch, round(count * (lengths + batch * (count - 1) / 2)))
        self.work.step(count * self._step_s, count)
        self._sampled(list(self._decoding.values()), self._steps)

    def _sampled(self, rows: list[Row], count: int) -> None:
        self.progress.progressed()
        for row in rows:
            row.sample(self.version or 0, count)
            self._cached[row.request.trajectory] = row.length
        done = [row for row in rows if not row.left]
        for row in done:
            del self._decoding[row.request.request_id]
        for reason in ENDS:
            self._answer([row for row in done if row.sampled.end() == reason], reason)
        self._go_on()

    def _take_out(self, id_: str) -> Row | None:
        found = (place.pop(id_, None) for place in (self._waiting, self._fresh, self._decoding))
        return next((row for row in found if row is not None), None)

    def _answer(self, rows: Sequence[Row], reason: FinishReason) -> None:
        for row in rows:
            self.node.tell(row.reply_to, Finished(self._name, [row.sampled.completion(reason)]))
        if rows:
            self._account([row.request.request_id for row in rows], rows, whole=reason not in CUT)

    def _account(self, ids: list[str], rows: Sequence[Row], *, whole: bool = True) -> None:
        tokens = sum(len(row.sampled) - row.brought for row in rows)
        sampled = [len(row.sampled) * whole for row in rows] if ids else []
        self.node.tell(self._proxy, Served(self._name, ids, tokens, sampled=sampled))


def _by_urgency(waiting: tuple[str, Row]) -> bool:
    """Sorts urgent ones first, each kind in the order in which it came."""
    return not waiting[1].request.urgent
