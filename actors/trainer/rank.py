"""The process of one trainer rank: ``python -m actors.trainer.rank SPEC``.

The backend runs in one thread of its own, in the order of the messages; the event loop stays free to serve weights to
engines while the next step runs. Every rank gets the same messages in the same order (the calls are collective);
rank 0 publishes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from actors.core import Actor, Ref, handler
from actors.core.hosting import ChildContext, read_settings, run_child
from actors.settings import TrainSettings
from actors.telemetry import Spans, report_spans
from actors.trainer.backends import make_backend
from actors.trainer.backends.protocol import Backend, Inspection
from actors.trainer.export import write_weights
from actors.trainer.messages import (
    InspectBatch,
    LogProbabilities,
    RankReady,
    RankSaved,
    RunStep,
    SaveRank,
    ScoreBatch,
    StepResult,
    Weights,
    Welcomed,
    WriteModel,
)
from actors.weightsync.manifest import Manifest
from actors.weightsync.publisher import Snapshot, WeightPublisher

T = TypeVar("T")

READY_TIMEOUT_S = 30.0
CANARY_TOKENS = 48


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told."""

    train: TrainSettings
    policy_directory: str
    from_scratch: bool
    dtype: str
    vocab_size: int
    seed: int
    rank: int
    world_size: int
    rendezvous: str  # a file, fresh for every start of the group
    resume_from: str | None = None
    version: int = 0
    trainer_actor: str = "trainer"


def canary(vocab_size: int, seed: int) -> np.ndarray:
    """int32 [CANARY_TOKENS]: the fixed sequence on which engines prove that they compute what the trainer does."""
    return np.random.default_rng(seed).integers(0, vocab_size, CANARY_TOKENS, dtype=np.int32)


class RankActor(Actor):
    """See the module docstring."""

    def __init__(
        self,
        settings: RankSettings,
        backend: Backend,
        thread: ThreadPoolExecutor,
        spans: Spans,
        publisher: Callable[[], tuple[WeightPublisher, Ref]],
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._thread = thread
        self._spans = spans
        self._publisher = publisher
        self._canary = canary(settings.vocab_size, settings.seed)

    async def on_stop(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @handler(concurrent=True, cancellable=False)
    async def step(self, message: RunStep) -> StepResult:
        """Train, then snapshot what came out."""

        def work() -> dict[str, float]:
            start = time.time()
            statistics = self._backend.forward_backward(message.batch)
            statistics |= self._backend.optim_step(message.learning_rate, message.clip)
            self._spans.add("train", start, time.time(), version=message.version)
            return statistics

        statistics = await self._run(work)
        return StepResult(statistics, await self.publish(message.version) if message.publish else None)

    @handler(concurrent=True)
    async def score(self, message: ScoreBatch) -> LogProbabilities:
        return LogProbabilities(await self._run(lambda: self._backend.logprobs(message.batch)))

    @handler(concurrent=True)
    async def inspect(self, message: InspectBatch) -> Inspection:
        return await self._run(lambda: self._backend.inspect(message.batch))

    @handler(concurrent=True, cancellable=False)
    async def write_model(self, message: WriteModel) -> RankSaved:
        """Collective, as every export; rank 0 writes."""
        start = time.time()

        def work() -> None:
            tensors = self._backend.export()
            if self._settings.rank == 0:
                write_weights(Path(message.directory), tensors)
            else:
                deque(tensors, maxlen=0)

        await self._run(work)
        return RankSaved(time.time() - start)

    async def publish(self, version: int) -> Weights | None:
        """Snapshot the weights as ``version`` (collective); rank 0 returns where to fetch them."""

        def work() -> tuple[Snapshot, np.ndarray]:
            start = time.time()
            self._backend.keep(version)
            snapshot = Snapshot(self._backend.export())
            logprobs = self._backend.score(self._canary)
            self._spans.add("export", start, time.time(), version=version)
            return snapshot, logprobs

        snapshot, logprobs = await self._run(work)
        if self._settings.rank != 0:
            return None
        manifest = Manifest(version, self._settings.dtype, snapshot.facts, self._canary, logprobs)
        publisher, source = self._publisher()
        publisher.publish(manifest, snapshot)
        return Weights(manifest, source)

    @handler(concurrent=True, cancellable=False)
    async def save(self, message: SaveRank) -> RankSaved:
        start = time.time()
        await self._run(lambda: self._backend.save(Path(message.directory)))
        self._spans.add("checkpoint", start, time.time())
        return RankSaved(time.time() - start)


async def work(context: ChildContext) -> Callable[[], Awaitable[None]]:
    settings = read_settings(context.spec, RankSettings)
    thread = ThreadPoolExecutor(1, "backend")
    loop = asyncio.get_running_loop()
    backend = await loop.run_in_executor(thread, _build, settings)
    publisher = WeightPublisher()
    published = await context.node.spawn(lambda: publisher, "publisher", restarts=0)
    spans = Spans("trainer" if settings.rank == 0 else context.spec.name)
    actor = RankActor(settings, backend, thread, spans, lambda: (publisher, published))
    ref = await context.node.spawn(lambda: actor, "rank", restarts=0)
    ready = RankReady(settings.rank, ref, await actor.publish(settings.version))
    trainer = context.parent(settings.trainer_actor)
    await context.node.ask(trainer, ready, Welcomed, timeout_s=READY_TIMEOUT_S, retries=3)
    context.node.background(report_spans(context.node, context.spec.telemetry, spans))

    async def finish() -> None:
        thread.shutdown(wait=False, cancel_futures=True)

    return finish


def _build(settings: RankSettings) -> Backend:
    backend = make_backend(
        Path(settings.policy_directory),
        seed=settings.seed,
        settings=settings.train,
        dtype=settings.dtype,
        from_scratch=settings.from_scratch,
        rank=settings.rank,
        world_size=settings.world_size,
        rendezvous=Path(settings.rendezvous),
    )
    if settings.resume_from is not None:
        backend.load(Path(settings.resume_from))
    return backend


if __name__ == "__main__":
    run_child(work)
