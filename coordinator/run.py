"""One run from start to end, in the control process: prepare, start the roles, train, and leave everything in order.

Invariant: however a run ends (done, interrupted, failed) its child processes are gone, its run directory holds a
report, the conservation of trajectories has been checked, and a checkpoint was written unless there is no trainer to
write one or the user insisted. Why it failed is one line on stderr; the traceback is in the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from actors.core import Node, Ref
from actors.core.leader import Leader
from actors.policy import write_config
from actors.telemetry import Spans, SpansTaken, report_spans
from actors.version import VERSION
from bus.message import BusError
from bus.security import read_key
from coordinator.admin import AdminDesk, RunState
from coordinator.books import Books, rules_of
from coordinator.checkpoints import Checkpoints, RunCheckpoint
from coordinator.coordinator import Coordinator, RoleLost
from coordinator.desk.desk import Desk
from coordinator.desk.messages import DESK
from coordinator.dispatch import Terms
from coordinator.facts import Facts
from coordinator.interruption import Interrupted, Interruption
from coordinator.job import Job
from coordinator.launching.readiness import keep_telling, tell_ready, tell_stopping
from coordinator.leadership import SOLE, Deposed
from coordinator.losses import LossWatch
from coordinator.messages import ROLES, Join, Role, Welcome
from coordinator.metadata import credentials, open_store
from coordinator.metadata.measured import Shard
from coordinator.metadata.protocol import StoreError
from coordinator.observe.progress import Progress
from coordinator.observe.recorder import Recorder
from coordinator.observe.rundir import RunDirectory
from coordinator.pipeline import Peers, Pipeline
from coordinator.resources.binder import Binder
from coordinator.resources.rebinder import Rebinder
from coordinator.resources.resolve import Placement
from coordinator.roles import START, RoleContext
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.mix import Mix
from coordinator.scheduling.rolling import RollingScheduler
from coordinator.scheduling.succession import Found
from coordinator.takeover import Led, Takeover, take_over
from hwprobe import AffinityMap, encode

T = TypeVar("T")
log = logging.getLogger(__name__)

STEP_GRACE_S = 3.0
"""How long a run that ends waits for the step under way: its end is the next moment that can be saved."""

WHOLE_STEP_GRACE_S = 300.0
"""How long it waits once it has said so, if it was interrupted by a person who may end the wait."""

CLOSE_GRACE_S = 2.0
"""How long a run waits for its metadata store to be closed, be it gone."""

CERTAIN_GRACE_S = 5.0
"""How long a run that fails waits to know whether it is still led from here."""

CAUSE_GRACE_S = 2.0
"""How long a run whose messages fail waits for the word of who has died."""

CONTROL = "control"
ADDRESS_FILE = "coordinator.address"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is started with beside its job."""

    job: Job
    placement: Placement
    affinity: AffinityMap
    job_directory: Path
    local_roles: Sequence[Role]
    resume: RunCheckpoint | None = None
    resume_directory: Path | None = None  # of that checkpoint
    host: str = "127.0.0.1"
    port: int = 0
    key_file: Path | None = None
    written: Job | None = None  # before it was resolved: for nodes on other hosts, which do that for themselves


class Ending(msgspec.Struct, frozen=True):
    """How a sitting ended."""

    status: int
    outcome: str
    trainer_died: bool = False
    trainer_was_up: bool = False


Program = Callable[[Pipeline], Coroutine[Any, Any, str]]
"""What a run does once every part is up; returns how it ended."""


class Run:
    """See the module docstring."""

    def __init__(
        self,
        launch: Launch,
        directory: RunDirectory,
        progress: Progress,
        *,
        program: Program = Pipeline.run,
        saves: bool = True,
        interruption: Interruption | None = None,
        led: Led | None = None,
    ) -> None:
        """``saves``: whether what the program leads to is worth a checkpoint; ``led``: of a run that other processes
        may lead on. Raises ``OSError``."""
        self._led = led
        self._found: Found | None = None
        self._launch = launch
        self._program = program
        self._saves = saves
        self._directory = directory
        self._progress = progress
        self._name = directory.path.name
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._interruption = interruption or Interruption(progress)
        self._trainer_was_up = False
        self._checkpoints = Checkpoints(directory.checkpoints, launch.job.checkpoint.keep)
        resume = launch.resume
        self._version = resume.version if resume is not None else 0
        self._books = self._open_books() if saves else None
        self._scheduler = (
            self._books.scheduler
            if self._books is not None
            else RollingScheduler(rules_of(launch.job), Ledger(), Mix(launch.job.scheduling.mix))
        )
        self._state = RunState(self._name, launch.job.train.steps)
        self._shards: list[Shard] = [] if led is None else led.shards
        self._spans = Spans("coordinator")
        self._losses = LossWatch(launch.job.scheduling.losses_in_a_row)
        self._recorder = Recorder(
            directory,
            progress,
            resumed_version=self._version if resume is not None or self._found is not None else None,
            elapsed_s=resume.elapsed_s if resume is not None else None if self._found is not None else 0.0,
        )

    def _open_books(self) -> Books:
        if self._led is not None and self._led.journal is not None:
            books, self._found = Books.inherited(self._launch.job, self._directory, self._led.journal)
            self._version = self._found.version
            return books
        launch = self._launch
        return Books.of_sitting(launch.job, self._directory, launch.resume, launch.resume_directory)

    async def run(self) -> int:
        """Exit status: 0 done, 1 failed, 130 interrupted."""
        return self.say(await self.sit())

    async def sit(self) -> Ending:
        """From the first process to the last one's end. Its interruption is heard from here on, if not before."""
        self._interruption.listen()
        node: Node | None = None
        facts: Facts | None = None
        binder = self._binder()
        status, outcome = 1, "failed"
        try:
            node = self._open_node()
            binder.open()
            facts = await self._open_facts()
            status, outcome = await self._train(node, facts)
        except Interrupted as interruption:
            status, outcome = 130, f"{interruption} before anything was trained"
        except Exception as error:  # the last word on any failure, with its name
            await self._while_leading()
            outcome = self._failed(await self._cause(error))
        finally:
            if facts is not None and self._led is not None:  # before the roles end: there is nothing to lead on then
                await self._tell_end(facts, status)
            self._state.phase = "stopping"
            tell_stopping(f"run {self._name} ends: {outcome}")
            (self._directory.path / ADDRESS_FILE).unlink(missing_ok=True)
            if node is not None:
                await node.close()
            binder.close()
            if facts is not None:
                await self._tell_end(facts, status)  # of a led run once more: a standby that missed it would lead on
                await self._close_facts(facts)
            balance = self._scheduler.ledger.balance()
            if not balance.holds:  # trajectories were lost without a reason: a fault of this program
                status, outcome = 1, self._failed(RuntimeError(f"trajectories do not add up: {balance}"))
            self._close_books()
            self._recorder.close(outcome)
        died = status == 1 and self._failure.done() and _is_trainers(self._failure.result())
        return Ending(status, outcome, died, self._trainer_was_up)

    def say(self, ending: Ending) -> int:
        """The last words; returns the exit status."""
        self._progress.note(f"trajectories: {self._scheduler.ledger.balance()}")
        self._progress.finish(ending.outcome, self._directory.places())
        return ending.status

    async def _cause(self, error: Exception) -> Exception:
        """What a run failed for: who died, where that is why its messages failed."""
        if isinstance(error, BusError) and not self._failure.done():
            await asyncio.wait({self._failure}, timeout=CAUSE_GRACE_S)
        failure = self._failure.result() if self._failure.done() else None
        return failure if isinstance(failure, RoleLost) else error

    def _close_books(self) -> None:
        try:
            if self._books is not None:
                self._books.close()
        except OSError as error:
            log.error("%s: %s", self._directory.ledger, error)

    def _binder(self) -> Binder:
        launch = self._launch
        binding, directory = launch.job.binding, self._directory.path
        return Binder(binding, launch.placement, launch.affinity, directory=directory, say=self._progress.note)

    def _open_node(self) -> Node:
        if self._led is not None and self._led.node is not None:
            node = self._led.node
        else:
            node = open_node(self._launch, None if self._led is None else self._led.term.epoch)
        node.on_give_up(lambda ref, error: self._fail(BusError(f"{ref} failed too often: {error!r}")))
        return node

    async def _open_facts(self) -> Facts:
        """Raises ``Interrupted``, and what opening the store raises."""
        if self._led is not None:
            return Facts(self._led.store, self._name)
        settings = self._launch.job.coordinator
        opening = asyncio.create_task(
            open_store(
                settings.store,
                directory=self._directory.path / "metadata",
                timeout_s=settings.store_timeout_s,
                measure=self._shards,
                credentials=credentials.named(settings.store_credentials),
            )
        )
        try:
            return Facts(await self._race(opening), self._name)
        except Interrupted:
            opening.cancel()
            await asyncio.wait([opening], timeout=CLOSE_GRACE_S)
            raise

    async def _while_leading(self) -> None:
        """What fails once another process leads is none of this one's business, which is about to end
        (``commands.lead``); where that is uncertain, it is waited for, for a while."""
        if self._led is None:
            return
        try:
            async with asyncio.timeout(CERTAIN_GRACE_S):
                await self._led.term.certain()
        except TimeoutError:
            log.warning("it is uncertain whether this process still leads")
        except Deposed:
            await asyncio.sleep(CERTAIN_GRACE_S)

    async def _tell_end(self, facts: Facts, status: int) -> None:
        state = {0: "done", 130: "interrupted"}.get(status, "failed")
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                await facts.status(state, self._scheduler.version)
        except (StoreError, TimeoutError) as error:  # a store that is gone must not hide how the run ended
            log.warning("the metadata store was not told that the run has ended: %s", error)

    async def _close_facts(self, facts: Facts) -> None:
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                if self._led is not None:
                    await self._led.term.resign()
                await facts.close()
        except (StoreError, TimeoutError) as error:
            log.info("the metadata store was not closed: %s", error)

    def _failed(self, error: Exception) -> str:
        """The outcome of a run that ends with this error."""
        log.info("the run failed", exc_info=error)  # the traceback goes to the log file
        reason = " ".join(str(error).split()) or repr(error)
        log.error("%s", reason)
        return f"failed: {reason}"

    # ---- the parts -----------------------------------------------------------------------------------------------

    async def _train(self, node: Node, facts: Facts) -> tuple[int, str]:
        """Everything between an open store and a closed node."""
        led = self._led
        takeover = (
            None if led is None or self._found is None else await take_over(node, led, self._scheduler, self._found)
        )
        coordinator = Coordinator(
            self._scheduler,
            self._welcome(Ref(node.address, "coordinator")),
            failed=self._fail,
            joined=lambda join: self._record_join(join, node, facts),
            spans=self._recorder.spans,
            desk=AdminDesk(self._state, self._scheduler),
            warn=self._progress.warn,
            losses=self._losses,
            silence_s=self._launch.job.coordinator.silence_s,
            terms=Terms(self._launch.job.environment.max_turns, self._launch.job.scheduling.queue_ttl_s),
            journal=self._directory.ledger,
            left=lambda name: self._beside(node, facts.left(name)),
            authority=SOLE if led is None else led.term,
        )
        ref = await node.spawn(lambda: coordinator, "coordinator", restarts=0)
        await node.spawn(lambda: self._desk(coordinator), DESK)
        self._write_address(ref)
        if led is not None:
            await led.term.listens_at(ref.node.control, led.pulse)
        if takeover is not None:
            await takeover.call_together(node, ref, coordinator.adopt)
        node.background(report_spans(node, ref, self._spans))
        node.background(keep_telling())
        await facts.status("starting", self._version)
        await self._join_locally(node, ref, facts)
        starting = asyncio.gather(*(self._start_role(role, node, ref) for role in self._launch.local_roles))
        finding = asyncio.create_task(self._peers(coordinator, starting))
        try:
            peers = await self._race(finding)
            affinity = self._launch.job.rollout.affinity
            if affinity:
                node.background(Rebinder(node, peers.proxy, affinity, say=self._progress.note).run())
            pipeline = self._pipeline(node, coordinator, peers, facts)
            try:
                return await self._drive(pipeline, facts, takeover)
            finally:
                self._trainer_was_up = pipeline.can_save
        finally:
            coordinator.end()
            finding.cancel()
            starting.cancel()
            await asyncio.gather(finding, starting, return_exceptions=True)
            self._recorder.spans(SpansTaken(self._spans.take()))

    def _desk(self, coordinator: Coordinator) -> Desk:
        settings, key_file = self._launch.job.coordinator, self._launch.key_file
        return Desk(
            coordinator,
            self._scheduler,
            self._state,
            self._launch.placement,
            store=settings.store,
            shards=self._shards,
            directory=self._directory.path,
            key=read_key(key_file) if key_file is not None else None,
            listening=lambda address: self._progress.note(f"metrics for Prometheus: {address}"),
            metrics=(settings.metrics_host, settings.metrics_port) if settings.metrics_port else None,
        )

    def _welcome(self, coordinator: Ref) -> Welcome:
        launch = self._launch
        resume = "" if launch.resume_directory is None else str(launch.resume_directory)
        return Welcome(
            run=self._name,
            job=msgspec.json.encode(launch.written or launch.job),
            job_directory=str(launch.job_directory),
            run_directory=str(self._directory.path),
            resume=resume,
            version=self._version,
            coordinator=coordinator,
        )

    def _write_address(self, ref: Ref) -> None:
        """Where the admin shell finds a run on this machine, and roles elsewhere find it."""
        address = ref.node.control
        (self._directory.path / ADDRESS_FILE).write_text(f"{address}\n")
        tell_ready(f"run {self._name} listens at {address}")
        missing = [role for role in ROLES if role not in self._launch.local_roles]
        if missing:
            self._progress.note(f"waiting at {address} for {', '.join(missing)}: start-ROLE --join {address}")

    def _record_join(self, join: Join, node: Node, facts: Facts) -> None:
        if join.node.name != CONTROL:
            other = f" (software {join.software or 'unknown'}, this is {VERSION})" if join.software != VERSION else ""
            self._progress.note(f"{join.node.name} joined: {', '.join(join.roles)}{other}")
        self._beside(node, facts.joined(join))

    def _beside(self, node: Node, fact: Coroutine[Any, Any, None]) -> None:
        node.background(self._told(fact))

    async def _told(self, fact: Coroutine[Any, Any, None]) -> None:
        """Write something into the metadata store, beside the loop; a store that fails ends the run."""
        try:
            await fact
        except StoreError as error:
            if self._led is not None and not self._led.term.leads():
                log.warning("a fact was not told, by a leader that may not be one: %s", error)
            else:
                self._fail(error)

    async def _join_locally(self, node: Node, ref: Ref, facts: Facts) -> None:
        roles: list[Role] = ["coordinator", *self._launch.local_roles]
        join = Join(node.address, roles, os.getpid(), encode(self._launch.affinity), VERSION)
        await node.ask(ref, join, Welcome, timeout_s=10.0)
        await facts.bound(CONTROL, self._launch.placement)

    async def _start_role(self, role: Role, node: Node, coordinator: Ref) -> None:
        launch = self._launch
        context = RoleContext(
            node,
            Leader(coordinator),
            launch.job,
            launch.placement,
            run=self._name,
            job_directory=launch.job_directory,
            policy_directory=policy_directory(launch.job, self._directory.path),
            run_directory=self._directory.path,
            resume=launch.resume_directory,
            version=self._version,
            host=launch.host,
            key_file=launch.key_file,
        )
        try:
            await START[role](context)
        except Exception as error:  # whatever keeps a role from starting ends the run, by name
            self._fail(BusError(f"{role} did not start: {error}"))

    async def _peers(self, coordinator: Coordinator, starting: asyncio.Future[list[None]]) -> Peers:
        """Wait for the roles; the env host last, because it needs all others."""
        timeout_s = self._launch.job.coordinator.start_timeout_s
        proxy = await coordinator.role("proxy", timeout_s)
        trainer = await coordinator.role("trainer", timeout_s)
        weightsync = await coordinator.role("weightsync", timeout_s)
        await coordinator.role("env", timeout_s)
        await starting
        return Peers(proxy, trainer, weightsync)

    def _pipeline(self, node: Node, coordinator: Coordinator, peers: Peers, facts: Facts) -> Pipeline:
        resume = self._launch.resume
        pipeline = Pipeline(
            self._launch.job,
            node,
            peers,
            coordinator=coordinator,
            scheduler=self._scheduler,
            checkpoints=self._checkpoints,
            recorder=self._recorder,
            state=self._state,
            spans=self._spans,
            losses=self._losses,
            best_success=self._recorder.best_success() if resume is None else resume.best_success,
            served=lambda version: node.background(self._told(facts.status("running", version))),
            authority=SOLE if self._led is None else self._led.term,
            evaluated=self._recorder.evaluated() if self._found is not None else -1,
        )
        self._scheduler.on_change(pipeline.changed)
        return pipeline

    # ---- to the end ----------------------------------------------------------------------------------------------

    async def _drive(self, pipeline: Pipeline, facts: Facts, takeover: Takeover | None) -> tuple[int, str]:
        """Train until done, interrupted or failed; then save."""
        await facts.status("running", self._version)
        resumption = None if takeover is None else takeover.resumption
        program = self._program(pipeline) if resumption is None else pipeline.go_on(resumption)
        training = asyncio.create_task(program)
        status = 0
        try:
            outcome = await self._race(training)
        except Interrupted as interruption:
            status, outcome = 130, str(interruption)
            between_steps = await self._out_of_step(pipeline)
        except BaseException:
            between_steps = await pipeline.leave_step(STEP_GRACE_S)
            await self._end(training, pipeline)
            await self._save_after_failure(pipeline, between_steps)
            raise
        else:
            between_steps = await pipeline.leave_step(STEP_GRACE_S)
        await self._end(training, pipeline)
        if not self._saves:
            return status, outcome
        return status, f"{outcome}; {await self._saved(pipeline, between_steps)}"

    async def _out_of_step(self, pipeline: Pipeline) -> bool:
        """After Ctrl-C: a step of a large model may take minutes, and what the last ones learned is worth the wait;
        a second Ctrl-C ends it."""
        if await pipeline.leave_step(STEP_GRACE_S):
            return True
        if not (self._saves and pipeline.can_save):
            return False
        self._progress.note("the training step under way is finished first (Ctrl-C again stops at once)")
        return await pipeline.leave_step(WHOLE_STEP_GRACE_S)

    async def _saved(self, pipeline: Pipeline, between_steps: bool) -> str:
        if not pipeline.can_save:
            before = self._launch.resume_directory
            kept = "" if before is None else f"; {before.name} is as it was"
            return f"no checkpoint: the trainer was not up yet{kept}"
        if not between_steps:
            return f"no checkpoint: the step under way took more than {WHOLE_STEP_GRACE_S:g} s"
        return await self._save(pipeline)

    async def _race(self, task: asyncio.Task[T]) -> T:
        """The result of a task, unless a part of the run fails or Ctrl-C arrives first; the task is then left as it
        is. Raises the failure, or ``Interrupted``."""
        waiting: set[asyncio.Future[Any]] = {task, self._failure, self._interruption.asked}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if self._failure.done():
            raise self._failure.result()
        raise Interrupted("interrupted")

    async def _end(self, training: asyncio.Task[str], pipeline: Pipeline) -> None:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await pipeline.stop()

    async def _save(self, pipeline: Pipeline) -> str:
        path = await pipeline.checkpoint()
        return f"checkpoint {path.name} written"

    async def _save_after_failure(self, pipeline: Pipeline, between_steps: bool) -> None:
        """A logic error leaves a checkpoint too, where the trainer still lives."""
        if not (self._saves and pipeline.can_save and between_steps):
            return
        try:
            async with asyncio.timeout(STEP_GRACE_S * 10):
                self._progress.note(await self._save(pipeline))
        except Exception as error:  # the first failure is what the user must see
            self._progress.warn(f"no checkpoint could be written: {error}")

    def _fail(self, error: BaseException) -> None:
        log.info("fatal: %s", error)
        if not self._failure.done():
            self._failure.set_result(error)


def open_node(launch: Launch, epoch: int | None) -> Node:
    """The control process's node. A leader's epoch is its node's: whoever has heard of a later one refuses it."""
    key = read_key(launch.key_file) if launch.key_file is not None else None
    return Node(CONTROL, host=launch.host, port=launch.port, key=key, epoch=epoch)


def _is_trainers(failure: BaseException) -> bool:
    return isinstance(failure, RoleLost) and failure.role == "trainer"


def policy_directory(job: Job, run_directory: Path) -> Path:
    """Where the processes that hold weights find ``config.json``; made here for a policy that starts from a shape."""
    if job.policy.path is not None:
        return Path(job.policy.path)
    directory = run_directory / "policy"
    write_config(job.policy.shape, directory)
    return directory
