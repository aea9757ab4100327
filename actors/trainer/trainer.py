"""The trainer actor: keeps the trajectories, starts the ranks, and turns groups into the next version of the weights.

Invariant: one step or checkpoint runs at a time, a step leads from version n to n + 1 on whole groups that are in the
store; a rank that dies fails what waits for it with its last words and ends the run resumably (``gave_up``), never in a
hang.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from actors.core import Actor, Ref, handler
from actors.core.hosting import ChildSpec
from actors.core.process import Child, start_child
from actors.settings import TrainSettings
from actors.trainer.batching import make_batch
from actors.trainer.messages import (
    Discard,
    Discarded,
    GetWeights,
    RankReady,
    RankSaved,
    RunStep,
    SaveCheckpoint,
    Saved,
    SaveRank,
    StepResult,
    Store,
    Stored,
    Train,
    Trained,
    Weights,
    Welcomed,
)
from actors.trainer.store import TrajectoryStore, write_records
from bus.message import Lane

log = logging.getLogger(__name__)

SILENCE_S = 30.0
START_TIMEOUT_S = 300.0
SAVE_TIMEOUT_S = 300.0
BUFFER_FILE = "trajectories.log"


class TrainerDied(RuntimeError):
    """A rank's process ended or went silent; the message has its last words."""


class Trainer(Actor):
    """See the module docstring."""

    def __init__(
        self,
        settings: TrainSettings,
        store: TrajectoryStore,
        specs: Sequence[ChildSpec],
        environment: Mapping[str, str],
        gave_up: Callable[[BaseException], None],
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._settings = settings
        self._store = store
        self._specs = specs
        self._environment = environment
        self._gave_up = gave_up
        self._silence_s = silence_s
        self._children: list[Child] = []
        self._ranks: list[asyncio.Future[RankReady]] = []
        self._busy = asyncio.Lock()  # every rank must see the same calls in the same order
        self._stopping = False

    async def on_start(self) -> None:
        loop = asyncio.get_running_loop()
        for spec in self._specs:
            self._ranks.append(loop.create_future())
            text = msgspec.json.encode(spec).decode()
            log_path = Path(spec.log_directory) / f"{spec.name}.out"
            child = await start_child(
                spec.name, "actors.trainer.rank", [text], log_path=log_path, environment=self._environment
            )
            self._children.append(child)
            self.node.background(child.watch(self._on_death))

    async def on_stop(self) -> None:
        self._stopping = True
        for child in self._children:
            self.node.unwatch(child.name)
            child.terminate()
        for child in self._children:
            await child.stop()
        for future in self._ranks:
            future.cancel()
        self._store.close()

    def _on_death(self, reason: str) -> None:
        if self._stopping:
            return
        self._stopping = True
        log.error("%s", reason)
        error = TrainerDied(reason)
        for future in self._ranks:
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: whoever waits gets it, and nobody has to
            elif not future.cancelled() and future.exception() is None:
                self.node.lose(future.result().ref.node, reason)
        self._gave_up(error)

    @handler
    async def rank_ready(self, message: RankReady) -> Welcomed:
        future = self._ranks[message.rank]
        if not future.done():
            future.set_result(message)
        child = self._children[message.rank]
        self.node.watch(message.ref.node, silence_s=self._silence_s, on_lost=lambda why: self._on_silence(child, why))
        return Welcomed()

    def _on_silence(self, child: Child, why: str) -> None:
        log.error("trainer rank %s: %s; killing it", child.name, why)
        child.kill()

    async def _ready(self) -> list[RankReady]:
        """All ranks, in order. Raises ``TrainerDied``."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return list(await asyncio.gather(*(asyncio.shield(future) for future in self._ranks)))
        except TimeoutError:
            late = [spec.name for spec, future in zip(self._specs, self._ranks, strict=True) if not future.done()]
            raise TrainerDied(f"not ready within {START_TIMEOUT_S:g} s: {', '.join(late)}") from None

    @handler(concurrent=True)
    async def get_weights(self, message: GetWeights) -> Weights:
        ready = await self._ready()
        if ready[0].weights is None:
            raise TrainerDied("rank 0 reported no weights")
        return ready[0].weights

    # ---- trajectories --------------------------------------------------------------------------------------------

    @handler
    async def store(self, message: Store) -> Stored:
        self._store.put(message.trajectory)
        return Stored()

    @handler
    async def discard(self, message: Discard) -> Discarded:
        self._store.drop(message.tickets)
        return Discarded()

    # ---- steps ---------------------------------------------------------------------------------------------------

    @handler(concurrent=True)
    async def train(self, message: Train) -> Trained:
        """Raises what the backend raises (``NotFinite`` names the trajectories) or ``PeerLost``."""
        async with self._busy:
            groups = [[self._store.get(ticket) for ticket in group] for group in message.groups]
            step = RunStep(
                message.version + 1, make_batch(groups, self._settings), self._learning_rate(message.version)
            )
            ranks = [ready.ref for ready in await self._ready()]
            about = f"version {message.version + 1}"
            results = await asyncio.gather(*(self._step(rank, step, about) for rank in ranks))
        self._store.drop(ticket for group in message.groups for ticket in group)
        if results[0].weights is None:
            raise TrainerDied("rank 0 returned no weights")
        return Trained(results[0].weights, results[0].statistics | {"learning_rate": step.learning_rate})

    async def _step(self, rank: Ref, step: RunStep, about: str) -> StepResult:
        timeout_s = self._settings.step_timeout_s
        return await self.node.ask(rank, step, StepResult, timeout_s=timeout_s, lane=Lane.BULK, about=about)

    def _learning_rate(self, version: int) -> float:
        """Linear warm-up, then constant."""
        return self._settings.learning_rate * min(1.0, (version + 1) / max(self._settings.warmup_steps, 1))

    @handler(concurrent=True)
    async def save(self, message: SaveCheckpoint) -> Saved:
        start = time.monotonic()
        order = SaveRank(message.directory)
        async with self._busy:
            await asyncio.to_thread(write_records, Path(message.directory) / BUFFER_FILE, self._store.held())
            ranks = [ready.ref for ready in await self._ready()]
            await asyncio.gather(
                *(self.node.ask(rank, order, RankSaved, timeout_s=SAVE_TIMEOUT_S, about="checkpoint") for rank in ranks)
            )
        return Saved(time.monotonic() - start)
