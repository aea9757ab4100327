"""A policy trained on some random maps walks over others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.runs import FROZENLAKE_MAPS, Run, trained
from tests.support.running import ran

LIMIT_S = 1200.0


@pytest.mark.deep
def test_it_walks_over_maps_that_it_never_trained_on(tmp_path: Path) -> None:
    ended = trained(tmp_path, str(FROZENLAKE_MAPS), "rollout.engine=torch", timeout_s=LIMIT_S)
    assert (ended.status, ended.leftovers) == (0, []), ended
    run = Run.latest(tmp_path)
    assert run.evaluations()[0]["success"] < 0.1
    assert not maps_of(run, "t") & maps_of(run, "e")
    arguments = [str(run.path), "--episodes", "400", "--json"]
    ended = ran("coordinator.commands.eval", *arguments, directory=tmp_path, timeout_s=LIMIT_S)
    assert (ended.status, ended.leftovers) == (0, []), ended
    figures = json.loads(ended.stdout)
    assert (figures["episodes"], figures["lost"]) == (400, 0)
    assert figures["success"] >= 0.5


def maps_of(run: Run, kind: str) -> set[str]:
    """The maps shown in the sampled trajectories whose tickets begin so: t of training, e of evaluations."""
    maps = {sample["transcript"][0][1].split("\n")[0] for sample in run.samples() if sample["ticket"].startswith(kind)}
    assert maps
    return maps
