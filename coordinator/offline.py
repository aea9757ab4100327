"""A run without engines and environments: the trainer alone, driven by a program of steps.

Invariant: however it ends (done, interrupted, failed) its child processes are gone and its run directory holds a
report; an interruption finds the step under way either not begun or done, and what was reached is saved. The trainer is
started by the same function as in a whole run, and takes the same messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from actors.core import Actor, Node, Ref, handler
from actors.core.leader import Leader
from actors.telemetry import SpansTaken
from actors.trainer.messages import GetWeights, SaveCheckpoint, Saved, Weights
from bus.message import BusError, RemoteError
from coordinator.books import rules_of
from coordinator.checkpoints import FORMAT, Checkpoints, RunCheckpoint
from coordinator.interruption import Interruption
from coordinator.job import Job
from coordinator.launch import CONTROL, Launch, policy_directory
from coordinator.messages import Announce, Announced, RoleFailed
from coordinator.observe.progress import Progress
from coordinator.observe.recorder import Recorder
from coordinator.observe.rundir import RunDirectory
from coordinator.pipeline import SAVE_TIMEOUT_S
from coordinator.roles import RoleContext, start_trainer
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.rolling import RollingScheduler

R = TypeVar("R")
log = logging.getLogger(__name__)

INTERRUPTED = (
    "Ctrl-C: the step under way is finished, then a checkpoint is written (Ctrl-C again stops at once, without one)"
)


class Lead(Actor):
    """Stands where the coordinator of a whole run stands: hears of the trainer, its failure and its spans."""

    def __init__(self, failed: Callable[[BaseException], None], spans: Callable[[SpansTaken], None]) -> None:
        self._failed = failed
        self._spans = spans
        self.trainer: Ref | None = None

    @handler
    async def announce(self, message: Announce) -> Announced:
        self.trainer = message.ref
        return Announced()

    @handler
    async def role_failed(self, message: RoleFailed) -> None:
        self._failed(BusError(f"{message.role}: {message.reason}"))

    @handler
    async def spans(self, message: SpansTaken) -> None:
        self._spans(message)


class Stopped(Exception):
    """The program was asked to stop between two steps."""


class OfflineRun:
    """See the module docstring. A program steps with ``ask``, and tells ``stepped`` after each."""

    def __init__(
        self, launch: Launch, directory: RunDirectory, progress: Progress, *, finishes_steps: bool = True
    ) -> None:
        """``finishes_steps``: whether an interruption lets what is under way come to its end. To be called inside a
        running event loop."""
        self.job: Job = launch.job
        self.directory = directory
        self.progress = progress
        self.version = launch.resume.version if launch.resume is not None else 0
        self.recorder = Recorder(
            directory,
            progress,
            resumed_version=self.version if launch.resume is not None else None,
            elapsed_s=launch.resume.elapsed_s if launch.resume is not None else 0.0,
        )
        self._launch = launch
        self._checkpoints = Checkpoints(directory.checkpoints, launch.job.checkpoint.keep)
        self._saved_version = self.version
        self._node: Node | None = None
        self._trainer: Ref | None = None
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._interruption = Interruption(progress, INTERRUPTED)
        self._finishes_steps = finishes_steps

    # ---- for programs --------------------------------------------------------------------------------------------

    async def ask(self, message: Any, reply: type[R], *, timeout_s: float, about: str) -> R:
        """Ask the trainer; the failure of a rank ends the wait. Raises what the trainer raises, or ``BusError``."""
        if self._node is None or self._trainer is None:
            raise RuntimeError("the trainer is asked before it was started")
        return await self._race(self._node.ask(self._trainer, message, reply, timeout_s=timeout_s, about=about))

    def step_timeout_s(self) -> float:
        return self.job.train.step_timeout_s + self.job.coordinator.start_timeout_s

    async def stepped(self, version: int) -> None:
        """A step is done and on record. Raises ``Stopped`` if the user had enough."""
        self.version = version
        every = self.job.checkpoint.every
        if every and version % every == 0:
            await self.checkpoint()
        if self._interruption.asked.done():
            raise Stopped

    async def checkpoint(self) -> Path:
        """Write the trainer's state at this version."""

        async def write_ranks(directory: Path) -> Saved:
            order = SaveCheckpoint(str(directory))
            return await self.ask(order, Saved, timeout_s=SAVE_TIMEOUT_S, about="checkpoint")

        path = await self._checkpoints.write(self._state(), write_ranks)
        self._saved_version = self.version
        return path

    def _state(self) -> RunCheckpoint:
        """What a whole run would keep, had it trained on this: ``bin/eval`` and ``bin/play`` read it."""
        state = RollingScheduler(rules_of(self.job), Ledger()).state()
        return RunCheckpoint(FORMAT, self.version, state, None, self.recorder.elapsed_s)

    # ---- from start to end ---------------------------------------------------------------------------------------

    async def run(self, program: Callable[[OfflineRun], Awaitable[str]]) -> int:
        """Exit status: 0 done, 1 failed, 130 interrupted. ``program`` returns how it ended."""
        self._interruption.listen()
        status, outcome = 1, "failed"
        try:
            async with Node(CONTROL) as node:
                self._node = node
                node.on_give_up(lambda ref, error: self._fail(BusError(f"{ref} failed too often: {error!r}")))
                status, outcome = await self._drive(node, program)
        except Exception as error:  # the last word on any failure, with its name
            outcome = self._failed(error)
        self.recorder.close(outcome)
        self.progress.finish(outcome, self.directory.places())
        return status

    async def _drive(self, node: Node, program: Callable[[OfflineRun], Awaitable[str]]) -> tuple[int, str]:
        if not await self._start(node):
            return 130, "interrupted before anything was trained"
        try:
            outcome = await program(self)
        except Stopped:
            return 130, f"interrupted; {await self._saved()}"
        except RemoteError:  # the ranks live, and have not stepped
            with contextlib.suppress(BusError, OSError):  # the first failure is what the user must see
                self.progress.note(await self._saved())
            raise
        return 0, f"{outcome}; {await self._saved()}"

    async def _saved(self) -> str:
        if self._saved_version == self.version:
            return f"checkpoint v{self.version:05d} is the newest" if self.version else "no step was done"
        return f"checkpoint {(await self.checkpoint()).name} written"

    async def _start(self, node: Node) -> bool:
        """Bring the trainer up; False if the user had enough meanwhile."""
        lead = Lead(self._fail, self.recorder.spans)
        ref = await node.spawn(lambda: lead, "coordinator", restarts=0)
        launch = self._launch
        context = RoleContext(
            node,
            Leader(ref),
            launch.job,
            launch.placement,
            run=self.directory.path.name,
            job_directory=launch.job_directory,
            policy_directory=policy_directory(launch.job, self.directory.path),
            run_directory=self.directory.path,
            resume=launch.resume_directory,
            version=self.version,
            host=launch.host,
            key_file=launch.key_file,
        )
        asked = self._interruption.asked
        with self.progress.phase(f"starting the trainer ({launch.job.train.backend})"):
            starting = asyncio.create_task(self._trainer_up(context, lead))
            await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return False
        starting.result()
        return True

    async def _trainer_up(self, context: RoleContext, lead: Lead) -> None:
        await start_trainer(context)
        self._trainer = lead.trainer
        timeout_s = self.job.coordinator.start_timeout_s
        await self.ask(GetWeights(), Weights, timeout_s=timeout_s, about="the trainer's first weights")

    async def _race(self, answer: Awaitable[R]) -> R:
        """The answer, unless the trainer fails first. Raises ``Stopped`` where an interruption does not wait for it."""
        asked = asyncio.ensure_future(answer)
        waiting: set[asyncio.Future[Any]] = {asked, self._failure}
        if not self._finishes_steps:
            waiting.add(self._interruption.asked)
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            if self._failure.done():
                raise self._failure.result()
            raise Stopped
        finally:
            asked.cancel()

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_result(error)

    def _failed(self, error: Exception) -> str:
        log.info("the run failed", exc_info=error)  # the traceback goes to the log file
        reason = " ".join(str(error).split()) or repr(error)
        log.error("%s", reason)
        return f"failed: {reason}"
