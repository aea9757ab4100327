"""What a user's code spoils is lost under a reason; a run in which nothing works says so, by its deadline."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from tests.end_to_end.runs import TINY, Run, balance, trained
from tests.support.running import ROOT

TIMEOUT_S = 120.0


def job(directory: Path, environment: str) -> str:
    """A job file with the faulty module beside it."""
    shutil.copy(ROOT / "tests" / "end_to_end" / "faulty.py", directory / "faulty.py")
    path = directory / "job.yaml"
    settings = {
        "environment": {"name": f"faulty:{environment}", "step_timeout_s": 2.0},
        "reward": {"function": "faulty:mostly_faulty"},
        "train": {"steps": 4},
    }
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def test_trajectories_that_a_users_code_spoils_are_lost_with_a_reason_and_the_run_completes(tmp_path: Path) -> None:
    ended = trained(tmp_path, job(tmp_path, "MostlyFaulty"), *TINY, "scheduling.order=paper", timeout_s=TIMEOUT_S)
    assert (ended.status, ended.leftovers) == (0, []), ended
    lost = Run.latest(tmp_path).checkpoint()["scheduler"]["balance"]["lost"]
    assert {"env_failed", "env_timeout", "reward_failed"} <= lost.keys()
    for words in (
        "step 1: ValueError: the wheel came off (faulty.py, line ",
        "env_timeout: ",
        "LookupError: no such score (faulty.py, line ",
    ):
        assert words in ended.stdout, ended
    counts = balance(ended.stdout)
    assert counts["trained"] == 4 * 2 * 4
    assert counts.pop("admitted") == sum(counts.values())


def test_a_run_in_which_nothing_succeeds_ends_by_its_deadline_and_says_why(tmp_path: Path) -> None:
    overrides = ["scheduling.batch_timeout_s=4", "evaluation.episodes=0"]
    ended = trained(tmp_path, job(tmp_path, "Hopeless"), *TINY, *overrides, timeout_s=TIMEOUT_S)
    assert (ended.status, ended.leftovers) == (1, []), ended
    assert "Traceback" not in ended.stdout + ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: control: no batch within 4 s: 0 of 2 groups are complete")
    assert "env_failed: environment instance t" in last
    assert "ValueError: the wheel came off (faulty.py, line " in last
    counts = balance(ended.stdout)
    assert counts["trained"] == 0
    assert counts.pop("admitted") == sum(counts.values())
