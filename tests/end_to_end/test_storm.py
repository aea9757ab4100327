"""Kill -9, again and again: nothing that was acknowledged is lost without a reason, and the run reaches its target."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.runs import TINY, balance
from tests.end_to_end.storm import VICTIMS, Storm
from tests.support.audit import audited_file
from tests.support.running import ROOT

BLOWS = 20


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1])
def test_a_run_under_twenty_kills_reaches_its_end_with_every_trajectory_accounted_for(
    tmp_path: Path, seed: int
) -> None:
    storm = Storm(tmp_path, seed)
    # A reward function of one's own, so that there is a reward worker to kill.
    shutil.copy(ROOT / "tests" / "end_to_end" / "faulty.py", tmp_path / "faulty.py")
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({"environment": {"name": "frozenlake"}, "reward": {"function": "faulty:paid"}}))
    overrides = (*TINY, "train.steps=100000", "checkpoint.every=2", "environment.workers=1")
    assert storm.rage(str(job), overrides, BLOWS) == 0, storm.unexpected
    print(f"{storm.sittings} sittings; {dict(storm.hits)}; {storm.missed} moments did not come; {storm.stdout[-900:]}")
    assert storm.hits.total() == BLOWS
    assert {hit.partition(",")[0] for hit in storm.hits} == set(VICTIMS)
    assert storm.missed <= BLOWS // 4
    assert (storm.leftovers, storm.unexpected) == ([], [])

    run = storm.run
    assert [step["version"] for step in run.steps()] == list(range(1, storm.last_version + 1))
    audit = audited_file(run.path / "ledger.jsonl")
    assert audit.version == storm.last_version
    ended = {ticket for ticket, state in audit.state.items() if state in ("trained", "lost", "evicted", "stored")}
    assert storm.acknowledged <= ended
    assert len(audit.trained) == storm.last_version * 2 * 4
    final = balance(storm.stdout)
    assert (final["admitted"], final["trained"]) == (len(audit.state), len(audit.trained))
    assert final["lost"] == audit.lost.total()
    assert final["evicted"] == audit.evicted.total()
    assert sorted(path.name for path in run.path.rglob("*") if path.name.startswith(".partial")) == []
