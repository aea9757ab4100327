"""A run's scheduler with its ledger, as its directory has them: fresh, or gone back to a checkpoint.

Invariant: every ticket of every sitting stays accounted for: what the checkpoint does not know is read from the
ledger's journal and from the trajectory store, and is counted under a reason.
"""

from __future__ import annotations

import logging
from pathlib import Path

from actors.trainer.algorithms.presets import resolve
from actors.trainer.store import StoreCorrupt, read_records
from actors.trainer.trainer import BUFFER_FILE
from coordinator.checkpoints import RunCheckpoint
from coordinator.job import Job
from coordinator.observe.rundir import RunDirectory
from coordinator.scheduling.journal import FileJournal, read_journal
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.mix import Mix
from coordinator.scheduling.rolling import NOTHING_YET, RollingScheduler, Rules
from coordinator.scheduling.succession import Found, JournalReader

log = logging.getLogger(__name__)


class Books:
    """See the module docstring; for a run that trains."""

    def __init__(self, scheduler: RollingScheduler, journal: FileJournal) -> None:
        self.scheduler = scheduler
        self._journal = journal

    @classmethod
    def of_sitting(
        cls, job: Job, directory: RunDirectory, checkpoint: RunCheckpoint | None, checkpoint_directory: Path | None
    ) -> Books:
        """Raises ``OSError`` where they cannot be read or written."""
        held = _tickets(checkpoint_directory / BUFFER_FILE) if checkpoint_directory is not None else []
        state, version = (checkpoint.scheduler, checkpoint.version) if checkpoint is not None else (NOTHING_YET, 0)
        since = read_journal(directory.ledger, state.journal)
        journal = FileJournal(directory.ledger)
        scheduler = RollingScheduler(rules_of(job), Ledger(journal), Mix(job.scheduling.mix))
        if checkpoint is not None or since:
            acknowledged = _tickets(directory.path / "store" / BUFFER_FILE)
            scheduler.restore(state, version, held, since=since, acknowledged=acknowledged)
        return cls(scheduler, journal)

    @classmethod
    def inherited(cls, job: Job, directory: RunDirectory, reader: JournalReader) -> tuple[Books, Found]:
        """Those of a run that another process led (whose directory was taken over), and what its journal tells. Raises
        ``OSError``."""
        found = reader.found()
        journal = FileJournal(directory.ledger)
        scheduler = RollingScheduler(rules_of(job), Ledger(journal), Mix(job.scheduling.mix))
        return cls(scheduler, journal), found

    def close(self) -> None:
        """Raises ``OSError``."""
        self._journal.close()


def rules_of(job: Job) -> Rules:
    """What a job says about admission."""
    streams = job.scheduling.mix or ("",)
    return Rules(
        job.train.groups_per_step,
        job.train.group_size,
        job.scheduling.alpha,
        job.scheduling.redundant_groups,
        job.rollout.temperature,
        job.seed,
        frozenset(stream for stream in streams if resolve(job.train, stream).dynamic_sampling),
    )


def _tickets(path: Path) -> list[str]:
    """Whose trajectories a store's file holds. One that cannot be read has none: the next sitting begins it anew."""
    found: list[str] = []
    try:
        if path.exists():
            for trajectory, _ in read_records(path):
                found.append(trajectory.ticket)
    except StoreCorrupt as error:
        log.warning("%s; what follows there is not used", error)
    return found
