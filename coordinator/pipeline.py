"""The training loop.

    take batch -> train step -> publish version n+1 (while rollouts go on) -> each engine swaps when it has it
         ^                                                                                     |
         +------------------------- engines generate, env managers play <---------------------+

With ``scheduling.order: paper`` the swap of the version before happens between taking a batch and training on it,
instead of beside the next rollouts. alpha = 0 is the same loop: the scheduler then has no place free from a batch taken
until it is trained on, and what it admits waits at the engines for the new version. Evaluations and checkpoints happen
between two steps, at a version that is fully published.

Invariant: the learner's version is the number of optimiser steps done; versions are published in order, one at a time;
a step that is done is in the ledger and on record before anything can be saved.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from actors.core import Node, Ref
from actors.env.messages import Outcome, Ticket
from actors.telemetry import Spans
from actors.trainer.messages import (
    GetWeights,
    SaveCheckpoint,
    Saved,
    Train,
    Trained,
    Weights,
)
from bus.message import RemoteError
from coordinator.admin import RunState
from coordinator.checkpoints import FORMAT, Checkpoints, RunCheckpoint
from coordinator.coordinator import Coordinator
from coordinator.evaluation import Evaluation
from coordinator.job import Job
from coordinator.leadership import SOLE, Authority
from coordinator.losses import LossWatch
from coordinator.messages import Role
from coordinator.observe.recorder import Recorder, Sampled, StepFacts, evaluation_record
from coordinator.publication import Publication
from coordinator.scheduling.rolling import RollingScheduler, Taken
from coordinator.steadiness import NONE, AlphaMonitor
from coordinator.takeover import Resumption

log = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 600.0
DESCRIBE_TIMEOUT_S = 10.0


class PipelineStuck(RuntimeError):
    """A wait of the loop passed its deadline; the message says what was there and what was missing."""


class Peers(msgspec.Struct, frozen=True):
    """The actors that the loop talks to."""

    trainer: Ref
    weightsync: Ref


class Pipeline:
    """See the module docstring."""

    def __init__(
        self,
        job: Job,
        node: Node,
        peers: Peers,
        *,
        coordinator: Coordinator,
        scheduler: RollingScheduler,
        checkpoints: Checkpoints,
        recorder: Recorder,
        state: RunState,
        spans: Spans,
        losses: LossWatch,
        best_success: float | None,
        served: Callable[[int], object],
        authority: Authority = SOLE,
        evaluated: int = -1,
    ) -> None:
        """``evaluated``: the newest version that was, in earlier sittings."""
        self._authority = authority
        self._job = job
        self._node = node
        self._peers = peers
        self._coordinator = coordinator
        self._scheduler = scheduler
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._state = state
        self._spans = spans
        self._losses = losses
        self._best = best_success
        self._batch_ready = asyncio.Event()
        self._publication = Publication(
            node,
            peers.weightsync,
            authority=authority,
            served=served,
            over=self._batch_ready.set,
            warn=recorder.progress.warn,
        )
        self._evaluation = Evaluation(job, coordinator, spans, epoch=authority.epoch)
        self._evaluated = evaluated
        self._monitor = AlphaMonitor(job.scheduling, recorder.evaluations())
        self._between_steps = asyncio.Event()  # clear while the ranks are between two versions
        self._between_steps.set()
        self._turn = asyncio.Lock()  # held from a batch taken until what follows from its step is done
        self._in_doubt = False
        self._trainer_up = False

    def changed(self) -> None:
        """Called by the scheduler whenever a batch may have become ready."""
        self._batch_ready.set()

    # ---- the loop ------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Train to the last step, or until the target is reached; returns how it ended."""
        async with self._turn:
            version = await self._begin()
            if await self._evaluate(version):
                return f"evaluation target {self._job.evaluation.target:g} is reached"
        return await self._to_the_end(version)

    async def go_on(self, left: Resumption) -> str:
        """Lead a run on that another process led; returns how it ended."""
        version = self._scheduler.version
        self._trainer_up = True
        self._coordinator.learner_version(version, self._scheduler.rules.alpha)
        self._state.phase, self._state.step = "running", version
        self._recorder.generation_starts()
        if left.paused:
            self._state.going.clear()
        else:
            self._scheduler.open()
        self._coordinator.flush()
        if left.weights.manifest.version == version and left.served < version:
            self._publication.begin(left.weights)
        reached = False
        await self._state.going.wait()
        async with self._turn:
            if left.taken is not None:
                version, reached = await self._step_on(left.taken, version, 0.0)
            elif self._evaluated < version and self._due(version)[0]:
                reached = await self._evaluate(version)
        if reached:
            return f"evaluation target {self._job.evaluation.target:g} is reached"
        return await self._to_the_end(version)

    async def _to_the_end(self, version: int) -> str:
        outcome = f"all {self._job.train.steps} steps are done"
        while version < self._job.train.steps:
            await self._state.going.wait()
            version, reached = await self._step(version)
            if reached:
                outcome = f"evaluation target {self._job.evaluation.target:g} is reached"
                break
        async with self._turn:
            await self._publication.finished()
            if self._evaluated != version:
                await self._evaluate(version, always=True)
        return outcome

    async def held_out(self, tickets: list[Ticket], told: Callable[[Outcome], None] | None = None) -> list[Outcome]:
        """Only play: bring the weights to the engines and run these tickets to their outcomes, each ``told``."""
        await self._ready_engines()
        return await self._evaluation.play(tickets, told)

    async def ready(self) -> int:
        """Only bring the weights to the engines; returns their version."""
        return await self._ready_engines()

    async def _begin(self) -> int:
        """Bring the first version to all engines, then let rollouts start."""
        version = await self._ready_engines()
        self._keep_lowered()
        self._coordinator.learner_version(version, self._scheduler.rules.alpha)
        self._state.phase = "running"
        self._recorder.generation_starts()
        self._scheduler.open()
        self._coordinator.flush()
        return version

    async def _ready_engines(self) -> int:
        """Wait for trainer and engines; every engine then holds the trainer's version, which is returned."""
        about = "the trainer's first weights"
        timeout_s = self._job.coordinator.start_timeout_s
        progress = self._recorder.progress
        with progress.phase(f"starting the trainer ({self._job.train.backend})"):
            weights = await self._node.ask(self._peers.trainer, GetWeights(), Weights, timeout_s=timeout_s, about=about)
        self._trainer_up = True
        version = weights.manifest.version
        with progress.phase(f"starting engines ({self._job.rollout.engine})"):
            await self._wait_for_engines(timeout_s)
        with progress.phase("bringing the first weights to the engines"):
            await self._publication.publish(weights)
        return version

    async def _wait_for_engines(self, timeout_s: float) -> None:
        """All engines are up, or have been given up. Start-up waits for all, so that placement is as planned."""
        deadline = time.monotonic() + timeout_s
        while True:
            state = await self._coordinator.engines.describe(DESCRIBE_TIMEOUT_S)
            starting = [engine.name for engine in state.engines if engine.state in ("starting", "dead")]
            if not starting:
                return
            if time.monotonic() > deadline:
                raise PipelineStuck(f"engines not ready within {timeout_s:g} s: {', '.join(starting)}")
            await asyncio.sleep(0.05)

    async def _step(self, version: int) -> tuple[int, bool]:
        """One turn of the loop: from ``version`` to the next."""
        start, waiting_since = time.monotonic(), time.time()
        while True:
            await self._ready()
            async with self._turn:
                if not self._is_ready():  # any more
                    continue
                taken = await self._take(waiting_since)
                waited = time.monotonic() - start
                if self._job.scheduling.order == "paper":
                    await self._publication.finished()
                return await self._step_on(taken, version, waited)

    async def _step_on(self, taken: Taken, version: int, waited: float) -> tuple[int, bool]:
        """The step on a batch, and what follows from it."""
        trained = await self._train(taken, version, waited)
        version += 1
        await self._publication.finished()  # versions are published one at a time
        self._publication.begin(trained.weights)
        evaluate, save = self._due(version)
        reached = await self._evaluate(version) if evaluate else False
        if save:
            await self.checkpoint()
        return version, reached

    def _due(self, version: int) -> tuple[bool, bool]:
        every, save = self._job.evaluation.every, self._job.checkpoint.every
        return bool(every and version % every == 0), bool(save and version % save == 0)

    def _is_ready(self) -> bool:
        return self._scheduler.ready() and self._state.going.is_set()

    async def _ready(self) -> None:
        """Wait for B complete groups that are fresh enough. Raises ``PipelineStuck`` saying what there is."""
        while not self._is_ready():
            await self._state.going.wait()  # as long as a person likes
            pauses = self._state.pauses
            try:
                async with asyncio.timeout(self._job.scheduling.batch_timeout_s):
                    await self._batch()
            except TimeoutError:
                if self._state.pauses == pauses:
                    raise self._stuck() from None

    async def _take(self, since: float) -> Taken:
        """The batch that is ready."""
        await self._authority.certain()
        taken = self._scheduler.take()
        self._coordinator.flush()
        self._spans.add("wait batch", since, time.time(), version=self._scheduler.version)
        return taken

    async def _batch(self) -> None:
        while not self._scheduler.ready():
            self._batch_ready.clear()
            self._publication.check()  # a publication that failed ends the wait for what it would bring
            await self._batch_ready.wait()

    def _stuck(self) -> PipelineStuck:
        scheduler = self._scheduler
        in_flight, buffered = scheduler.counts()
        losses = "".join(f"; {reason}: {detail}" for reason, detail in self._losses.details.items())
        return PipelineStuck(
            f"no batch within {self._job.scheduling.batch_timeout_s:g} s: {scheduler.complete_groups} of "
            f"{scheduler.rules.groups_per_step} groups are complete, {in_flight} trajectories in flight, {buffered} "
            f"buffered; ledger: {scheduler.ledger.balance()}{losses}"
        )

    async def _train(self, taken: Taken, version: int, waited_s: float) -> Trained:
        """One step on the batch: from ``version`` to the next, which is on record when this returns."""
        proxy = await self._coordinator.engines.describe(DESCRIBE_TIMEOUT_S)
        start = time.monotonic()
        timeout_s = self._job.train.step_timeout_s + self._job.coordinator.start_timeout_s
        about = f"version {version + 1}"
        self._between_steps.clear()
        self._in_doubt = True  # whether the ranks have stepped, until they say so
        try:
            trained = await self._node.ask(
                self._peers.trainer, Train(version, taken.groups), Trained, timeout_s=timeout_s, about=about
            )
            await self._authority.certain()
            # From here to the record nothing is waited for: an interruption finds the step not begun, or done.
            self._scheduler.trained(version + 1)
            seconds = {"wait_batch": waited_s, "train": time.monotonic() - start, "publish": self._publication.waited_s}
            self._record(version + 1, taken, trained, seconds, Sampled(proxy.tokens, start))
            self._in_doubt = False
        except RemoteError:  # the ranks live and have not stepped: the batch is as good as before
            self._scheduler.put_back()
            self._in_doubt = False
            raise
        finally:
            self._between_steps.set()
        self._coordinator.learner_version(version + 1, self._scheduler.rules.alpha)
        self._coordinator.flush()
        return trained

    def _record(
        self, version: int, taken: Taken, trained: Trained, seconds: dict[str, float], sampled: Sampled
    ) -> None:
        in_flight, buffered = self._scheduler.counts()
        facts = StepFacts(
            version=version,
            outcomes=taken.outcomes,
            statistics=trained.statistics,
            seconds=seconds,
            in_flight=in_flight,
            buffered=buffered,
            lost=self._scheduler.ledger.ended(),
            sampled=sampled,
        )
        record = self._recorder.step(facts)
        self._state.step = version
        self._state.reward, self._state.success = record.reward_mean, record.success_rate

    # ---- evaluation and checkpoints ------------------------------------------------------------------------------

    async def _evaluate(self, version: int, *, always: bool = False) -> bool:
        """Greedy, held out, under exactly this version. Returns whether the target is reached."""
        if not self._evaluation.due(always=always):
            return False
        await self._publication.finished()
        outcomes = await self._evaluation.of(version)
        self._evaluated = version
        record, alpha, said = self._monitor.judge(evaluation_record(version, outcomes), self._scheduler.rules.alpha)
        self._recorder.evaluation(record)
        self._lower(alpha, said)
        self._state.fluctuation = record.fluctuation
        self._state.evaluation = record.success
        for outcome in outcomes[:1]:
            self._recorder.sample(outcome)
        if version > 0 and (self._best is None or record.success > self._best):
            self._best = record.success
            await self.checkpoint()
            self._checkpoints.mark_best(version)
        target = self._job.evaluation.target
        return target is not None and record.success >= target

    def _keep_lowered(self) -> None:
        """What earlier sittings have brought alpha down to, a resumed run does not take back."""
        lowered, alpha = self._monitor.lowered_to, self._scheduler.rules.alpha
        if self._job.scheduling.watch_alpha and NONE != lowered < alpha:
            self._lower(lowered, f"alpha stays at {lowered}, to which evaluations lowered it; the job says {alpha}")

    def _lower(self, alpha: int, said: str) -> None:
        """What the monitor of alpha has found."""
        if said:
            self._state.steadiness = said
            self._recorder.progress.warn(said)
            log.info("%s", said)
        if alpha < self._scheduler.rules.alpha:
            self._scheduler.set_rules(msgspec.structs.replace(self._scheduler.rules, alpha=alpha), why=said)
            self._coordinator.learner_version(self._scheduler.version, alpha)
            self._coordinator.flush()

    async def checkpoint(self) -> Path:
        """Write the state between two steps."""
        state = RunCheckpoint(
            FORMAT, self._scheduler.version, self._scheduler.state(), self._best, self._recorder.elapsed_s
        )

        async def write_ranks(directory: Path) -> Saved:
            order = SaveCheckpoint(str(directory))
            return await self._node.ask(self._peers.trainer, order, Saved, timeout_s=SAVE_TIMEOUT_S, about="checkpoint")

        start = time.time()
        path = await self._checkpoints.write(state, write_ranks)
        self._spans.add("checkpoint", start, time.time(), version=state.version)
        return path

    # ---- while parts of the run are replaced -----------------------------------------------------------------------

    @asynccontextmanager
    async def between_steps(self) -> AsyncIterator[None]:
        """Within it nothing is trained, published or evaluated, and nothing of that is under way."""
        async with self._turn:
            await self._publication.settled()
            yield

    async def succeeded(self, role: Role, ref: Ref) -> None:
        """Between two steps: another actor has a role. Engines get the version once more where that one is their source
        now, or brings it to them."""
        match role:
            case "proxy":
                await self._wait_for_engines(self._job.coordinator.start_timeout_s)
            case "weightsync":
                self._publication.weightsync = ref
                await self._publish_again()
            case "trainer":
                self._peers = msgspec.structs.replace(self._peers, trainer=ref)
                await self._publish_again()
            case _:
                pass  # the loop has no business with it

    async def _publish_again(self) -> None:
        timeout_s, about = self._job.coordinator.start_timeout_s, "the trainer's weights"
        await self._publication.publish(
            await self._node.ask(self._peers.trainer, GetWeights(), Weights, timeout_s=timeout_s, about=about)
        )

    @property
    def can_save(self) -> bool:
        """Whether there are ranks that can write a checkpoint."""
        return self._trainer_up

    @property
    def in_step(self) -> bool:
        """Whether the ranks are between two versions."""
        return not self._between_steps.is_set()

    async def leave_step(self, timeout_s: float) -> bool:
        """Wait until the ranks are not between two versions. Whether it is known at which one they are, so that a
        checkpoint can be written."""
        try:
            await asyncio.wait_for(self._between_steps.wait(), timeout_s)
        except TimeoutError:
            return False
        return not self._in_doubt

    async def stop(self) -> None:
        """Leave nothing running."""
        await self._publication.stop()
