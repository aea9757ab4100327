"""What an interrupted run waits for before it saves."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from coordinator import run as run_module
from coordinator.job import Job
from coordinator.messages import ROLES
from coordinator.observe.progress import PlainProgress
from coordinator.observe.rundir import RunDirectory
from coordinator.resources.resolve import Placement
from coordinator.run import Launch, Run
from hwprobe import build_affinity_map, probe


class SlowStep:
    """A pipeline whose trainer is in a step that ends when it is told."""

    can_save = True

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def leave_step(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self.ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


def test_a_long_step_is_waited_for_so_that_it_can_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "STEP_GRACE_S", 0.01)

    async def main() -> tuple[bool, str]:
        job, words, pipeline = Job(name="slow"), io.StringIO(), SlowStep()
        with RunDirectory.create(tmp_path, job.name) as directory:
            directory.write_job(job)
            launch = Launch(
                job=job,
                placement=Placement([]),
                affinity=build_affinity_map(probe()),
                job_directory=tmp_path,
                local_roles=ROLES,
            )
            run = Run(launch, directory, PlainProgress(1, words))
            waiting = asyncio.create_task(run._out_of_step(pipeline))  # type: ignore[arg-type]
            while "is finished first" not in words.getvalue():  # noqa: ASYNC110 (written by what is tested)
                await asyncio.sleep(0.01)
            assert not waiting.done()
            pipeline.ended.set()
            return await waiting, words.getvalue()

    left, words = asyncio.run(asyncio.wait_for(main(), 30.0))
    assert left
    assert "Ctrl-C again stops at once" in words
