"""What a user's code spoils is lost under a reason; a run in which nothing works says so, by its deadline."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.runs import TINY, Run, balance, trained
from tests.support.running import ROOT, last_error

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
    for words in ("env_failed: environment instance ", "env_timeout: ", "LookupError: no such score (faulty.py, line "):
        assert words in ended.stdout, ended  # the first loss of each reason: whichever comes first
    journal = (Run.latest(tmp_path).path / "ledger.jsonl").read_text()
    assert "step 1: ValueError: the wheel came off (faulty.py, line " in journal
    counts = balance(ended.stdout)
    assert counts["trained"] == 4 * 2 * 4
    assert counts.pop("admitted") == sum(counts.values())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "500 trajectories in a row were lost and none was stored (scheduling.losses_in_a_row); the last, t"),
        pytest.param(
            ["scheduling.losses_in_a_row=1000000", "scheduling.batch_timeout_s=4"],
            "no batch within 4 s: 0 of 2 groups are complete",
            marks=pytest.mark.deep,
        ),
    ],
    ids=["many-losses", "no-batch"],
)
def test_a_run_in_which_nothing_succeeds_ends_and_says_why(tmp_path: Path, overrides: list[str], expected: str) -> None:
    words = [*TINY, "evaluation.episodes=0", *overrides]
    ended = trained(tmp_path, job(tmp_path, "Hopeless"), *words, timeout_s=TIMEOUT_S)
    assert (ended.status, ended.leftovers) == (1, []), ended
    assert "Traceback" not in ended.stdout + ended.stderr
    last = last_error(ended.stderr)
    assert last.startswith(f"error: control: {expected}")
    assert "env_failed: environment instance t" in last
    assert "ValueError: the wheel came off (faulty.py, line " in last
    counts = balance(ended.stdout)
    assert counts["trained"] == 0
    assert counts.pop("admitted") == sum(counts.values())
    report = (Run.latest(tmp_path).path / "report.html").read_text()
    assert "ValueError: the wheel came off (faulty.py, line " in report
    assert "env_failed" in report


@pytest.mark.parametrize(
    ("environment", "reward", "expected"),
    [
        ("Unplayable", "mostly_faulty", "environment.name: faulty:Unplayable failed at its first step 1: ValueError: "),
        ("MostlyFaulty", "hopeless", "reward.function: faulty:hopeless failed on a first trajectory: LookupError: "),
    ],
)
def test_a_job_whose_first_turn_fails_is_refused_before_anything_is_started(
    tmp_path: Path, environment: str, reward: str, expected: str
) -> None:
    words = [job(tmp_path, environment), *TINY, f"reward.function=faulty:{reward}"]
    ended = trained(tmp_path, *words, timeout_s=TIMEOUT_S)
    assert ended.status == 2, ended
    assert ended.stderr.startswith(f"error: {expected}")
    assert not (tmp_path / "runs").exists()
