"""Training on a dump (``bin/train --from-dump``): the steps of a run, without engines and environments.

Invariant: the batches are the dump's whole groups in its order, B a step, from the beginning again when it ends; a step
on what a live run was trained on is the same step, because it is the same message to the same trainer.
"""

from __future__ import annotations

import time

from actors.env.messages import stored_outcome
from actors.settings import TrainSettings
from actors.trainer.dump import Dump
from actors.trainer.messages import Store, Stored, Train, Trained
from actors.trajectory import Trajectory
from coordinator.job import Job, JobError
from coordinator.observe.recorder import Sampled, StepFacts
from coordinator.offline import OfflineRun

STORE_TIMEOUT_S = 30.0


def whole_groups(dump: Dump, settings: TrainSettings) -> list[list[Trajectory]]:
    """The groups that can be trained on. Raises ``JobError`` where they do not make one batch."""
    groups = dump.groups
    whole = [group for group in groups if len(group) == settings.group_size]
    if len(whole) < settings.groups_per_step:
        sizes = sorted({len(group) for group in groups})
        raise JobError(
            f"{dump.path}: a step takes {settings.groups_per_step} groups of {settings.group_size} "
            f"(train.groups_per_step, train.group_size), found {len(whole)} such among {len(groups)} groups of "
            f"{' or '.join(map(str, sizes))}"
        )
    return whole


class FromDump:
    """The program of an offline run."""

    def __init__(self, dump: Dump, job: Job) -> None:
        """Raises ``JobError``."""
        self._groups = whole_groups(dump, job.train)
        self._left_out = len(dump.groups) - len(self._groups)
        self._dump = dump

    def describe(self) -> str:
        left_out = f"; {self._left_out} groups of another size are left out" if self._left_out else ""
        count = sum(map(len, self._groups))
        return f"dump: {self._dump.path}, {len(self._groups)} groups, {count} trajectories{left_out}"

    def batch(self, version: int, size: int) -> list[list[Trajectory]]:
        """What the step from ``version`` on is made of."""
        return [self._groups[index % len(self._groups)] for index in range(version * size, (version + 1) * size)]

    async def __call__(self, run: OfflineRun) -> str:
        version, steps = run.version, run.job.train.steps
        while version < steps:
            version = await self._step(run, version)
        return f"all {steps} steps are done"

    async def _step(self, run: OfflineRun, version: int) -> int:
        start = time.monotonic()
        groups = self.batch(version, run.job.train.groups_per_step)
        for group in groups:
            for trajectory in group:
                await run.ask(Store(trajectory), Stored, timeout_s=STORE_TIMEOUT_S, about=trajectory.ticket)
        loaded = time.monotonic()
        order = Train(version, [[trajectory.ticket for trajectory in group] for group in groups])
        about = f"version {version + 1}"
        trained = await run.ask(order, Trained, timeout_s=run.step_timeout_s(), about=about)
        facts = StepFacts(
            version=version + 1,
            outcomes=[stored_outcome(trajectory, {}) for group in groups for trajectory in group],
            statistics=trained.statistics,
            seconds={"load": loaded - start, "train": time.monotonic() - loaded},
            in_flight=0,
            buffered=0,
            lost={},
            sampled=Sampled(0, time.monotonic()),
        )
        run.recorder.step(facts)
        await run.stepped(version + 1)
        return version + 1
