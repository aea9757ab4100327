"""Training that survives the death of a trainer rank: the run goes back to its newest checkpoint, in the same command.

    sitting --trainer died--> newest checkpoint (or the beginning) --> next sitting
        |                        at most MOST times without a newer checkpoint
        +-- anything else --> the end

Everything is started anew: the weights reach the engines as they always do, by publication and receipt, and the ledger
counts what is undone. A rank cannot be replaced under a running pipeline without rolling back versions that engines
serve and trajectories carry; a restart does the same with the code that ``--resume`` needs anyway.

Invariant: a run whose trainer keeps dying ends, by name, and can be resumed.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from actors.trainer.trainer import BUFFER_FILE
from coordinator.checkpoints import Checkpoints
from coordinator.interruption import Interruption
from coordinator.launch import Launch
from coordinator.messages import ROLES
from coordinator.observe.progress import Progress
from coordinator.observe.rundir import RunDirectory
from coordinator.run import Ending, Run

log = logging.getLogger(__name__)

MOST = 3
"""Recoveries in a row that lead to no newer checkpoint."""


async def run_to_its_end(launch: Launch, directory: RunDirectory, progress: Progress) -> int:
    """Exit status: 0 done, 1 failed, 130 interrupted."""
    interruption = Interruption(progress)
    fruitless, started_from = 0, _version(launch)
    while True:
        run = Run(launch, directory, progress, interruption=interruption)
        ending = await run.sit()
        if not _can_recover(launch, ending, interruption, first=fruitless == 0):
            return run.say(ending)
        launch = gone_back(launch, directory)
        fruitless = fruitless + 1 if _version(launch) <= started_from else 1
        started_from = _version(launch)
        if fruitless > MOST:
            why = (
                f"{ending.outcome}; {MOST} recoveries in a row from version {started_from} came to no newer checkpoint"
            )
            log.error("%s", why)
            return run.say(msgspec.structs.replace(ending, outcome=why))
        progress.warn(f"the trainer is started again from version {started_from} (recovery {fruitless} of {MOST})")
        await asyncio.sleep(0)  # a Ctrl-C of this moment is acted upon


def _version(launch: Launch) -> int:
    return launch.resume.version if launch.resume is not None else 0


def _can_recover(launch: Launch, ending: Ending, interruption: Interruption, *, first: bool) -> bool:
    """A trainer that has never come up will not do so the next time; roles elsewhere have ended with the run."""
    if not ending.trainer_died or interruption.asked.done():
        return False
    return set(launch.local_roles) == set(ROLES) and (ending.trainer_was_up or not first)


def gone_back(launch: Launch, directory: RunDirectory) -> Launch:
    """The same from the newest checkpoint; without one, from the beginning."""
    checkpoints = Checkpoints(directory.checkpoints, launch.job.checkpoint.keep)
    if not checkpoints.versions():
        (directory.path / "store" / BUFFER_FILE).unlink(missing_ok=True)
        directory.rewind(0)
        return msgspec.structs.replace(launch, resume=None, resume_directory=None)
    checkpoint = checkpoints.newest()
    directory.rewind(checkpoint.version)
    path = checkpoints.path(checkpoint.version)
    return msgspec.structs.replace(launch, resume=checkpoint, resume_directory=path)
