"""How often a run whose trainer dies is taken up again, and when it is given up."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from coordinator import recovery
from coordinator.checkpoints import FORMAT, RUN_FILE, Checkpoints, RunCheckpoint
from coordinator.job import Job
from coordinator.launch import Launch
from coordinator.messages import ROLES
from coordinator.observe.progress import PlainProgress
from coordinator.observe.rundir import RunDirectory
from coordinator.recovery import run_to_its_end
from coordinator.resources.resolve import Placement
from coordinator.run import Ending
from coordinator.scheduling.rolling import NOTHING_YET
from hwprobe import build_affinity_map, probe

DIED = Ending(1, "failed: process trainer-0 ended", trainer_died=True, trainer_was_up=True)
DONE = Ending(0, "done")


class Sittings:
    """Stands in for ``Run``: every sitting writes checkpoints, then ends as scripted."""

    def __init__(self, directory: RunDirectory, script: list[tuple[list[int], Ending]]) -> None:
        self.directory = directory
        self.script = script
        self.began_at: list[int | None] = []
        self.outcome = ""

    def __call__(self, launch: Launch, *_: Any, **__: Any) -> Sittings:
        self.began_at.append(None if launch.resume is None else launch.resume.version)
        return self

    async def sit(self) -> Ending:
        versions, ending = self.script[len(self.began_at) - 1]
        for version in versions:
            state = RunCheckpoint(FORMAT, version, NOTHING_YET, None, elapsed_s=1.0)
            await Checkpoints(self.directory.checkpoints, 2).write(state, lambda path: asyncio.sleep(0))
        return ending

    def say(self, ending: Ending) -> int:
        self.outcome = ending.outcome
        return ending.status


def went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: list[tuple[list[int], Ending]], **changes: Any
) -> tuple[int, Sittings]:
    settings: dict[str, Any] = {
        "job": Job(),
        "placement": Placement([]),
        "affinity": build_affinity_map(probe()),
        "job_directory": tmp_path,
        "local_roles": ROLES,
    }
    with RunDirectory.create(tmp_path, "lake") as directory:
        sittings = Sittings(directory, script)
        monkeypatch.setattr(recovery, "Run", sittings)

        async def scenario() -> int:
            progress = PlainProgress(10, io.StringIO())
            return await run_to_its_end(Launch(**settings | changes), directory, progress)

        return asyncio.run(scenario()), sittings


def test_a_run_goes_on_from_the_newest_checkpoint_each_time_its_trainer_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [([], DIED), ([5], DIED), ([10, 15], DIED), ([], DIED), ([], DIED), ([20], DIED), ([], DONE)]
    status, sittings = went(tmp_path, monkeypatch, script)
    assert (status, sittings.outcome) == (0, "done")
    assert sittings.began_at == [None, None, 5, 15, 15, 15, 20]


def test_a_run_that_dies_again_and_again_without_a_newer_checkpoint_is_given_up_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, sittings = went(tmp_path, monkeypatch, [([5], DIED), *[([], DIED)] * 10])
    assert status == 1
    assert sittings.began_at == [None, 5, 5, 5]
    assert sittings.outcome == (
        "failed: process trainer-0 ended; 3 recoveries in a row from version 5 came to no newer checkpoint"
    )


@pytest.mark.parametrize(
    "ending",
    [
        Ending(1, "failed: no engine is left", trainer_was_up=True),
        Ending(1, "failed: process trainer-0 ended", trainer_died=True),
        Ending(130, "interrupted", trainer_was_up=True),
    ],
    ids=["something-else-died", "it-never-came-up", "interrupted"],
)
def test_what_a_new_start_would_not_mend_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Ending
) -> None:
    status, sittings = went(tmp_path, monkeypatch, [([5], ending)])
    assert (status, sittings.began_at) == (ending.status, [None])


def test_a_run_whose_roles_are_elsewhere_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, sittings = went(tmp_path, monkeypatch, [([5], DIED)], local_roles=())
    assert (status, sittings.began_at) == (1, [None])


def test_a_trainer_that_dies_while_it_is_started_again_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_up = Ending(1, "failed: process trainer-0 ended", trainer_died=True)
    status, sittings = went(tmp_path, monkeypatch, [([5], DIED), ([], never_up), ([], DONE)])
    assert (status, sittings.began_at) == (0, [None, 5, 5])
    assert (sittings.directory.checkpoints / "v00005" / RUN_FILE).is_file()
