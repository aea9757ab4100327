"""The thread that runs an engine, and how the event loop beside it gives it orders.

Invariants:

- only the thread touches the engine, and it looks for orders between any two steps (loop and thread take turns:
  ``actors.proxy.engines.turns``);
- a suspended or weightless engine makes no step, and only a suspended one is given weights;
- a request that is for a later version than the engine has waits here, and joins the engine with that version; one
  that may not be sampled under what the engine has, or is about to have, ends here, with the tokens that it has;
- an engine that raises from anything but a question ends the process, with that error as its last word.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import msgspec

from actors.proxy.engines.load import LoadMeter
from actors.proxy.engines.progress import ProgressMeter
from actors.proxy.engines.protocol import (
    Completion,
    Engine,
    EngineRefusal,
    GenerateRequest,
    LateRefusal,
    nothing_sampled,
)
from actors.proxy.engines.turns import Turns
from actors.telemetry import Spans

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")

IDLE_WAIT_S = 1.0
"""How long the thread sleeps at a time with nothing to do; orders wake it at once."""


class NotServable(RuntimeError):
    """The engine is not in the state that an order asks for; the message says in which it is."""


class EngineThread:
    """Runs one engine; see the module docstring."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[Completion]], None],
        refuse: Callable[[str, str], None],
        failed: Callable[[BaseException], None],
        *,
        news: Callable[[], bool],
        spans: Spans,
    ) -> None:
        """``news``: asked in the thread, whether messages have come that the loop has not taken yet."""
        self._engine = engine
        self._deliver = deliver
        self._refuse = refuse
        self._failed = failed
        self._spans = spans
        self._loop = asyncio.get_running_loop()
        self._orders: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._early: dict[str, GenerateRequest] = {}  # whose version is yet to come
        self._bounds: dict[str, int] = {}  # of requests with the engine: the newest version that they may have
        self._serving = False
        self._has_weights = False
        self._version = -1
        self._stopping = False
        self.meter = LoadMeter(engine.limits.max_sequences)
        self.progress = ProgressMeter()
        self.turns = Turns(deliver, news)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def order(self, action: Callable[[], None]) -> None:
        """Run something between two steps; its failure is fatal for the engine."""
        with self._wake:
            self._orders.append(action)
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run something between two steps and get its result (or exception) back on the loop."""
        result: Future[T] = Future()

        def action() -> None:
            if not result.set_running_or_notify_cancel():
                return  # whoever asked no longer waits
            try:
                result.set_result(function())
            except Exception as error:  # it belongs to whoever asked
                result.set_exception(error)

        self.order(action)
        return asyncio.wrap_future(result)

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        """Run something on the loop; once that is closed nobody is left to be told."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def add(self, request: GenerateRequest) -> None:
        self.order(lambda: self._add(request))

    def _add(self, request: GenerateRequest) -> None:
        if request.to_version is not None and request.to_version < self._version:
            self._post(self._deliver, [nothing_sampled(request, "superseded")])
            return
        if request.from_version > self._version:
            self._early[request.request_id] = request
            return
        try:
            self._engine.add(request)
        except EngineRefusal as refusal:
            self._post(self._refuse, request.request_id, str(refusal))
        else:
            if request.to_version is not None:
                self._bounds[request.request_id] = request.to_version

    def abort(self, request_id: str) -> None:
        def action() -> None:
            completion = self._take_out(request_id)
            if completion is not None:
                self._post(self._deliver, [completion])

        self.order(action)

    def _take_out(self, request_id: str) -> Completion | None:
        early = self._early.pop(request_id, None)
        self._bounds.pop(request_id, None)
        return self._engine.abort(request_id) if early is None else nothing_sampled(early)

    def release(self, request_ids: Sequence[str]) -> asyncio.Future[list[Completion]]:
        """What those that are still here have by now; they are here no more, and nobody was told."""

        def action() -> list[Completion]:
            found = (self._take_out(id_) for id_ in request_ids)
            return [completion for completion in found if completion is not None]

        return self.call(action)

    def suspend(self) -> asyncio.Future[None]:
        """Done once no step is running, nor will be before ``resume``."""
        return self.call(lambda: self._set_serving(False))

    def resume(self) -> asyncio.Future[None]:
        """Raises ``NotServable`` for an engine without weights."""
        return self.call(lambda: self._set_serving(True))

    def _set_serving(self, serving: bool) -> None:
        if serving and not self._has_weights:
            raise NotServable("the engine has no weights: it cannot serve")
        self._serving = serving

    def load(self, version: int, tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> dict[str, str]:
        """In the thread, through ``call``: take weights, return their digests. Raises ``NotServable`` unless the
        engine is suspended, and what the engine raises."""
        if self._serving:
            raise NotServable(f"version {version} is for a suspended engine, and this one serves")
        self._supersede(version)
        self._has_weights = False  # the old ones are gone once a load begins
        self.progress.at("loading")
        digests = self._engine.load_weights(version, tensors())
        self._has_weights = True
        self._version = version
        early, self._early = self._early, {}
        for request in early.values():
            self._add(request)
        return digests

    def _supersede(self, version: int) -> None:
        """End what may not be sampled under this version."""
        passed = [id_ for id_, bound in self._bounds.items() if bound < version]
        cut = [completion for completion in map(self._take_out, passed) if completion is not None]
        if cut:
            self._post(self._deliver, [msgspec.structs.replace(each, finish_reason="superseded") for each in cut])

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """In the thread, through ``call``. Raises what the engine raises."""
        self.progress.at("scoring")
        return self._engine.score(tokens)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # the process cannot go on without its engine: say so and let it end
            self._post(self._failed, error)

    def _turn(self) -> bool:
        with self._wake:
            busy = self._serving and self._engine.unfinished() > 0
            if not self._orders and not busy and not self._stopping:
                self.turns.idle()
                self._wake.wait(IDLE_WAIT_S)
            orders = list(self._orders)
            self._orders.clear()
        for action in orders:
            action()
        if self._stopping:
            self._engine.close()
            return False
        unfinished = self._engine.unfinished()
        steps = self._serving and unfinished > 0
        self.meter.note(unfinished, stepping=steps)
        self.progress.at("steps" if steps else "nothing")
        if steps:
            start = time.time()
            completions = self._step()
            for completion in completions if self._bounds else ():
                self._bounds.pop(completion.request_id, None)
            unfinished = self._engine.unfinished()
            self.meter.note(unfinished)
            end = time.time()
            if self._engine.work.step(end - start) or completions:
                self.progress.progressed()
            self._spans.busy("generate", start, end)
            self.turns.ended(list(completions), nothing=not completions and not orders)
        if not unfinished:
            self._engine.work.rest()
            self.progress.rest()
        return True

    def _step(self) -> Sequence[Completion]:
        try:
            return self._engine.step()
        except LateRefusal as refusal:
            self._bounds.pop(refusal.request_id, None)
            self._post(self._refuse, refusal.request_id, str(refusal))
            return ()

    async def stop(self, timeout_s: float) -> None:
        """End the thread; a step that does not come back in time is left to die with the process."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, timeout_s)
