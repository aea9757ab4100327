"""Kill -9, again and again: nothing that was acknowledged is lost without a reason, and the run reaches its target."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import TINY, balance, job_with_reward_worker
from tests.end_to_end.storm import VICTIMS, Storm
from tests.support.audit import audited_file

BLOWS = 20


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1])
def test_a_run_under_twenty_kills_reaches_its_end_with_every_trajectory_accounted_for(
    tmp_path: Path, seed: int
) -> None:
    storm = Storm(tmp_path, seed)
    overrides = (*TINY, "train.steps=100000", "checkpoint.every=2")
    assert storm.rage(job_with_reward_worker(tmp_path), overrides, BLOWS) == 0, storm.unexpected
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
