"""One run from start to end, in the control process: prepare, start the roles, train, and leave everything in order.

Invariant: however a run ends (done, interrupted, failed) its child processes are gone, its run directory holds a
report, the conservation of trajectories has been checked, and a checkpoint was written unless there is no trainer to
write one or the user insisted. Why it failed is one line on stderr; the traceback is in the log.

Its parts: ``assembly`` (who takes part), ``fate`` (what may end it early), ``finishing`` (its work, and what is saved),
``telling`` (the metadata store).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from actors.core import Node
from actors.telemetry import Spans, SpansTaken
from bus.message import BusError
from coordinator.admin import RunState
from coordinator.assembly import Assembly, Sitting
from coordinator.books import Books, rules_of
from coordinator.checkpoints import Checkpoints
from coordinator.fate import Fate, failed
from coordinator.finishing import Finish
from coordinator.hostbook import HostBook
from coordinator.interruption import Interrupted, Interruption
from coordinator.launch import ADDRESS_FILE, Launch, open_node
from coordinator.launching.readiness import tell_stopping
from coordinator.leadership import SOLE
from coordinator.losses import LossWatch, RoleLost
from coordinator.messages import Join
from coordinator.observe.progress import Progress
from coordinator.observe.recorder import Recorder
from coordinator.observe.rundir import RunDirectory
from coordinator.pipeline import Pipeline
from coordinator.resources.binder import Binder
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.mix import Mix
from coordinator.scheduling.rolling import RollingScheduler
from coordinator.scheduling.succession import Found
from coordinator.takeover import Led
from coordinator.telling import Told

log = logging.getLogger(__name__)


class Ending(msgspec.Struct, frozen=True):
    """How a sitting ended."""

    status: int
    outcome: str
    trainer_died: bool = False
    trainer_was_up: bool = False
    again: bool = False  # the run gathers again: nobody was dismissed, and the store is open


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
        hosts: HostBook | None = None,
        again: Callable[[RoleLost, list[Join]], bool] = lambda lost, there: False,
    ) -> None:
        """``saves``: whether what the program leads to is worth a checkpoint; ``led``: of a run that other processes
        may lead on; ``again``: whether it can gather again after a loss, with who is there. Raises ``OSError``."""
        self._again = again
        self._assembly: Assembly | None = None
        self._program = program
        self._saves = saves
        self._interruption = interruption or Interruption(progress)
        self._trainer_was_up = False
        self._books: Books | None = None
        found: Found | None = None
        if saves:
            self._books, found = _open_books(launch, directory, led)
        self._sitting = _sitting(
            launch,
            directory,
            progress,
            fate=_fate(launch, self._interruption, led),
            scheduler=_unkept(launch) if self._books is None else self._books.scheduler,
            led=led,
            found=found,
            hosts=hosts,
        )

    async def run(self) -> int:
        """Exit status: 0 done, 1 failed, 130 interrupted."""
        return self.say(await self.sit())

    async def sit(self) -> Ending:
        """From the first process to the last one's end. Its interruption is heard from here on, if not before."""
        sitting = self._sitting
        self._interruption.listen()
        node: Node | None = None
        told: Told | None = None
        binder = self._binder()
        status, outcome, again = 1, "failed", False
        try:
            node = self._open_node()
            binder.open()
            told = await Told.open(
                sitting.launch.job, sitting.directory.path, sitting.fate, sitting.led, sitting.shards
            )
            status, outcome = await self._train(node, told)
        except Interrupted as interruption:
            status, outcome = 130, f"{interruption} before anything was trained"
        except Exception as error:  # the last word on any failure, with its name
            outcome = await sitting.fate.outcome(error)
            again = self._gathers_again()
        finally:
            if told is not None and sitting.led is not None and not again:  # before the roles end: nothing to lead then
                await told.ended(status, sitting.scheduler.version)
            sitting.state.phase = "stopping"
            tell_stopping(f"run {sitting.name} ends: {outcome}")
            (sitting.directory.path / ADDRESS_FILE).unlink(missing_ok=True)
            if node is not None:
                await node.close()
            binder.close()
            if sitting.hosts is not None:  # while this process still leads
                sitting.hosts.settle()
            if told is not None and not again:  # of a led run once more: a standby that missed it would lead on
                await told.ended(status, sitting.scheduler.version)
                await told.close()
            balance = sitting.scheduler.ledger.balance()
            if not balance.holds:  # trajectories were lost without a reason: a fault of this program
                status, outcome = 1, failed(RuntimeError(f"trajectories do not add up: {balance}"))
            self._close_books()
            sitting.recorder.close(outcome)
        return Ending(status, outcome, status == 1 and sitting.fate.trainer_died, self._trainer_was_up, again)

    def _gathers_again(self) -> bool:
        """Whether everybody is to begin again, after a loss: then nobody is dismissed."""
        lost, assembly = self._sitting.fate.lost, self._assembly
        if lost is None or assembly is None or self._interruption.asked.done():
            return False
        again = self._again(lost, assembly.coordinator.roster.joins)
        assembly.coordinator.dismisses = not again
        return again

    def say(self, ending: Ending) -> int:
        """The last words; returns the exit status."""
        progress = self._sitting.progress
        progress.note(f"trajectories: {self._sitting.scheduler.ledger.balance()}")
        progress.finish(ending.outcome, self._sitting.directory.places())
        return ending.status

    def _binder(self) -> Binder:
        launch, directory = self._sitting.launch, self._sitting.directory.path
        say = self._sitting.progress.note
        return Binder(launch.job.binding, launch.placement, launch.affinity, directory=directory, say=say)

    def _open_node(self) -> Node:
        led, fate = self._sitting.led, self._sitting.fate
        if led is not None and led.node is not None:
            node = led.node
        else:
            node = open_node(self._sitting.launch, None if led is None else led.term.epoch)
        node.on_give_up(lambda ref, error: fate.fail(BusError(f"{ref} failed too often: {error!r}")))
        return node

    async def _train(self, node: Node, told: Told) -> tuple[int, str]:
        """Everything between an open store and a closed node."""
        sitting = self._sitting
        assembly = self._assembly = await Assembly.open(sitting, node, told)
        try:
            pipeline = await assembly.pipeline()
            try:
                await told.facts.status("running", sitting.version)
                resumption = None if assembly.takeover is None else assembly.takeover.resumption
                program = self._program(pipeline) if resumption is None else pipeline.go_on(resumption)
                resumed = sitting.launch.resume_directory
                finish = Finish(pipeline, sitting.fate, sitting.progress, saves=self._saves, resumed=resumed)
                return await finish.drive(program)
            finally:
                self._trainer_was_up = pipeline.can_save
        finally:
            await assembly.close()
            sitting.recorder.spans(SpansTaken(sitting.spans.take()))

    def _close_books(self) -> None:
        try:
            if self._books is not None:
                self._books.close()
        except OSError as error:
            log.error("%s: %s", self._sitting.directory.ledger, error)


def _open_books(launch: Launch, directory: RunDirectory, led: Led | None) -> tuple[Books, Found | None]:
    if led is not None and led.journal is not None:
        return Books.inherited(launch.job, directory, led.journal)
    return Books.of_sitting(launch.job, directory, launch.resume, launch.resume_directory), None


def _fate(launch: Launch, interruption: Interruption, led: Led | None) -> Fate:
    """Of a run that can go on without who is lost, it is worth waiting for the word that somebody is."""
    if led is None:
        return Fate(interruption, SOLE)
    return Fate(interruption, led.term, verdict_s=launch.job.coordinator.silence_s)


def _unkept(launch: Launch) -> RollingScheduler:
    """That of a run of which no books are kept."""
    return RollingScheduler(rules_of(launch.job), Ledger(), Mix(launch.job.scheduling.mix))


def _sitting(
    launch: Launch,
    directory: RunDirectory,
    progress: Progress,
    *,
    fate: Fate,
    scheduler: RollingScheduler,
    led: Led | None,
    found: Found | None,
    hosts: HostBook | None,
) -> Sitting:
    resume = launch.resume
    version = found.version if found is not None else resume.version if resume is not None else 0
    goes_on = resume is not None or found is not None
    return Sitting(
        launch=launch,
        directory=directory,
        progress=progress,
        fate=fate,
        scheduler=scheduler,
        recorder=Recorder(
            directory,
            progress,
            resumed_version=version if goes_on else None,
            elapsed_s=resume.elapsed_s if resume is not None else None if found is not None else 0.0,
        ),
        checkpoints=Checkpoints(directory.checkpoints, launch.job.checkpoint.keep),
        state=RunState(directory.path.name, launch.job.train.steps),
        shards=[] if led is None else led.shards,
        spans=Spans("coordinator"),
        losses=LossWatch(launch.job.scheduling.losses_in_a_row),
        version=version,
        led=led,
        found=found,
        hosts=hosts,
    )
