"""The trainer actor: keeps the trajectories, starts the ranks, and turns groups into the next version of the weights.

Invariant: one step or checkpoint runs at a time, a step leads from version n to n + 1 on whole groups that are in the
store; a rank that dies fails what waits for it with its last words and ends the run resumably (``gave_up``), never in a
hang. The same order for a step, given again (by a leader that has taken over), is carried out once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from actors.core import Actor, handler
from actors.core.hosting import ChildSpec
from actors.core.process import Child, start_child
from actors.env.messages import stored_outcome
from actors.settings import TrainSettings
from actors.trainer.backends.protocol import Inspection
from actors.trainer.batches import BatchFiles
from actors.trainer.batching import imitation_batch, make_batch
from actors.trainer.messages import (
    DescribeTrainer,
    Discard,
    Discarded,
    GetWeights,
    Imitate,
    Imitated,
    InspectBatch,
    InspectedGroups,
    InspectGroups,
    LastStep,
    LogProbabilities,
    RankReady,
    RankSaved,
    RunStep,
    SaveCheckpoint,
    Saved,
    SaveRank,
    ScoreBatch,
    ScoreTrajectories,
    StepResult,
    Store,
    Stored,
    Train,
    Trained,
    TrainerState,
    Weights,
    Welcomed,
    WriteModel,
)
from actors.trainer.stability import clip_threshold
from actors.trainer.store import TrajectoryStore
from actors.trajectory import Trajectory
from bus.message import Lane

R = TypeVar("R")
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
        environments: Sequence[Mapping[str, str]],
        gave_up: Callable[[BaseException], None],
        *,
        batches: BatchFiles | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """``specs``, ``environments``: each rank's command line and environment variables."""
        self._settings = settings
        self._store = store
        self._specs = specs
        self._environments = environments
        self._gave_up = gave_up
        self._batches = batches if batches is not None else BatchFiles(None)
        self._silence_s = silence_s
        self._children: list[Child] = []
        self._ranks: list[asyncio.Future[RankReady]] = []
        self._busy = asyncio.Lock()  # every rank must see the same calls in the same order
        self._kept = {each.ticket: stored_outcome(each, {}) for each in store.held()}
        self._stepping: Train | None = None
        self._last: LastStep | None = None
        self._stopping = False

    async def on_start(self) -> None:
        loop = asyncio.get_running_loop()
        for spec, environment in zip(self._specs, self._environments, strict=True):
            self._ranks.append(loop.create_future())
            text = msgspec.json.encode(spec).decode()
            log_path = Path(spec.log_directory) / f"{spec.name}.out"
            child = await start_child(
                spec.name, "actors.trainer.rank", [text], log_path=log_path, environment=environment
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
        weights = ready[0].weights if self._last is None else self._last.trained.weights
        if weights is None:
            raise TrainerDied("rank 0 reported no weights")
        return weights

    # ---- trajectories --------------------------------------------------------------------------------------------

    @handler
    async def store(self, message: Store) -> Stored:
        self._store.put(message.trajectory)
        self._kept.setdefault(message.trajectory.ticket, stored_outcome(message.trajectory, message.metrics))
        return Stored()

    @handler
    async def discard(self, message: Discard) -> Discarded:
        self._drop(message.tickets)
        return Discarded()

    # ---- steps ---------------------------------------------------------------------------------------------------

    @handler(concurrent=True, cancellable=False)
    async def train(self, message: Train) -> Trained:
        """Raises what the backend raises (``NotFinite`` names the trajectories) or ``PeerLost``."""
        async with self._busy:
            if self._last is not None and self._last.order == message:
                return self._last.trained
            self._stepping = message
            try:
                return await self._train(message)
            finally:
                self._stepping = None

    async def _train(self, message: Train) -> Trained:
        version, rate = message.version + 1, self._learning_rate(message.version)
        clip = clip_threshold(self._settings, message.version)
        groups = await asyncio.to_thread(self._fetch, message.groups)
        async with self._batches.guarded(version, groups, rate):
            results = await self._step(RunStep(version, make_batch(groups, self._settings), rate, clip=clip))
        if results[0].weights is None:
            raise TrainerDied("rank 0 returned no weights")
        trained = Trained(results[0].weights, results[0].statistics | {"learning_rate": rate, "clip_norm": clip})
        self._last = LastStep(message, trained, [self._kept[ticket] for group in message.groups for ticket in group])
        await self._batches.trained(version, groups)
        self._drop([ticket for group in message.groups for ticket in group])
        return trained

    def _drop(self, tickets: Sequence[str]) -> None:
        for ticket in tickets:
            self._kept.pop(ticket, None)
        self._store.drop(tickets)

    def _fetch(self, groups: Sequence[Sequence[str]]) -> list[list[Trajectory]]:
        return [[self._store.get(ticket) for ticket in group] for group in groups]

    @handler(urgent=True)
    async def describe(self, message: DescribeTrainer) -> TrainerState:
        rank = self._ranks[0] if self._ranks else None
        up = rank is not None and rank.done() and not rank.cancelled() and rank.exception() is None
        first = rank.result().weights if rank is not None and up else None
        weights = first if self._last is None else self._last.trained.weights
        return TrainerState(weights, self._stepping, self._last, list(self._kept.values()), lives=not self._stopping)

    @handler(concurrent=True, cancellable=False)
    async def imitate(self, message: Imitate) -> Imitated:
        """Raises like ``train``."""
        version, rate = message.version + 1, message.learning_rate
        async with self._busy, self._batches.guarded(version, [message.trajectories], rate, imitate=True):
            clip = clip_threshold(self._settings, message.version)
            step = RunStep(version, imitation_batch(message.trajectories), rate, publish=False, clip=clip)
            results = await self._step(step)
        return Imitated(results[0].statistics | {"learning_rate": rate})

    async def _step(self, step: RunStep) -> list[StepResult]:
        return await self._of_all(step, StepResult, self._settings.step_timeout_s, f"version {step.version}")

    async def _of_all(self, order: Any, reply: type[R], timeout_s: float, about: str) -> list[R]:
        """What every rank answers, in order."""
        ranks = [ready.ref for ready in await self._ready()]
        asked = (self.node.ask(rank, order, reply, timeout_s=timeout_s, lane=Lane.BULK, about=about) for rank in ranks)
        return list(await asyncio.gather(*asked))

    @handler(concurrent=True)
    async def score(self, message: ScoreTrajectories) -> LogProbabilities:
        order = ScoreBatch(imitation_batch(message.trajectories))
        async with self._busy:
            return (await self._of_all(order, LogProbabilities, self._settings.step_timeout_s, "scoring"))[0]

    @handler(concurrent=True)
    async def inspect(self, message: InspectGroups) -> InspectedGroups:
        """Raises ``BadGroup`` or what the backend raises for a batch that contradicts itself."""
        if message.imitate:
            batch = imitation_batch([trajectory for group in message.groups for trajectory in group])
        else:
            batch = make_batch(message.groups, self._settings, strict=False)
        async with self._busy:
            results = await self._of_all(InspectBatch(batch), Inspection, self._settings.step_timeout_s, "inspection")
        return InspectedGroups(batch, results[0])

    @handler(concurrent=True, cancellable=False)
    async def write_model(self, message: WriteModel) -> Saved:
        start = time.monotonic()
        async with self._busy:
            await self._of_all(message, RankSaved, SAVE_TIMEOUT_S, "model")
        return Saved(time.monotonic() - start)

    def _learning_rate(self, version: int) -> float:
        """Linear warm-up, then constant."""
        return self._settings.learning_rate * min(1.0, (version + 1) / max(self._settings.warmup_steps, 1))

    @handler(concurrent=True, cancellable=False)
    async def save(self, message: SaveCheckpoint) -> Saved:
        start = time.monotonic()
        order = SaveRank(message.directory)
        async with self._busy:
            await asyncio.to_thread(self._store.copy, Path(message.directory) / BUFFER_FILE)
            await self._of_all(order, RankSaved, SAVE_TIMEOUT_S, "checkpoint")
        return Saved(time.monotonic() - start)
