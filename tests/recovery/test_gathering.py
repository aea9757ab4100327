"""What a leader that has taken over decides about a run of which not every role is up."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from bus.message import NodeAddress
from bus.virtual_time import run
from coordinator.gathering import Gathering
from coordinator.job import Job
from coordinator.launch import Launch
from coordinator.leadership import SOLE
from coordinator.messages import ROLES, Following, Join
from coordinator.observe.progress import PlainProgress
from coordinator.observe.rundir import RunDirectory
from coordinator.resources.resolve import Placement
from coordinator.scheduling.journal import Event
from coordinator.scheduling.succession import JournalReader
from coordinator.takeover import Followers, Led
from hwprobe import AffinityMap, encode

NO_GPU = AffinityMap(hosts=(), devices=(), pools=(), reference_ridge=0.0)


def follows(name: str, *roles: Any, standby: int | None = None) -> Following:
    """A node that has announced nothing: what it has is still starting."""
    address = NodeAddress(name, f"tcp://{name}:1", f"tcp://{name}:2", 1)
    return Following(Join(address, list(roles), 1, encode(NO_GPU), standby=standby), [])


HOLDERS = [follows(role, role) for role in ROLES]


@pytest.mark.parametrize(
    ("there", "begun", "again"),
    [
        (HOLDERS, True, True),
        (HOLDERS, False, False),  # it waits for them
        (HOLDERS[1:], True, False),  # it ends, by name
        ([*HOLDERS[1:], follows("spare")], True, True),
        ([*HOLDERS[1:], follows("spare", "env", standby=0)], True, True),  # given the env that was missed first
    ],
)
def test_a_run_begins_again_where_every_role_can_be_had_with_or_without_a_spare(
    tmp_path: Path, there: list[Following], begun: bool, again: bool
) -> None:
    async def decided() -> bool:
        directory = RunDirectory.create(tmp_path, "run")
        if begun:
            directory.ledger.write_bytes(msgspec.json.encode(Event("admitted", ["t0"], group=0, task=5)) + b"\n")
        launch = Launch(job=Job(), placement=Placement([]), affinity=NO_GPU, job_directory=tmp_path, local_roles=())
        store, term = cast(Any, None), cast(Any, SOLE)
        led = Led(store, term, shards=[], followers=Followers(there), journal=JournalReader(directory.ledger))
        return Gathering(launch, directory, PlainProgress(1, io.StringIO()), led)._something_is_missing()

    assert run(decided()) is again
