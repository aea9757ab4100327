"""What happens to a run from outside without killing it: processes that stand still, a full disk, a clock that jumps.
Each ends in a recovery or in a named error, never in a hang."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.runs import FROZENLAKE, TINY, TRAIN, Run, balance, everywhere, job_with_reward_worker, training
from tests.end_to_end.story import BEYOND_THE_BUFFER, START_S, ended, goes_on
from tests.support.audit import audited_file
from tests.support.running import Command, last_error, ran

ENDLESS = ("train.steps=100000", "checkpoint.every=0")
WORKERS = ("engine-0", "env-worker-0", "reward-worker-0")


def recovers_by_itself(command: Command) -> None:
    back = command.wait_for(r"the trainer is started again from version (\d+)", timeout_s=START_S)
    command.wait_for(rf"step {int(back[1]) + BEYOND_THE_BUFFER}/", timeout_s=START_S)


def test_processes_that_stand_still_are_replaced_and_a_control_process_that_does_goes_on(tmp_path: Path) -> None:
    job = job_with_reward_worker(tmp_path)
    with training(tmp_path, job, *TINY, "train.steps=100000", "checkpoint.every=5", "coordinator.silence_s=4") as run:
        run.wait_for("step 6/", timeout_s=START_S)
        for name in WORKERS:
            os.kill(run.children()[name], signal.SIGSTOP)
        goes_on(run)
        os.kill(run.children()["trainer-0"], signal.SIGSTOP)
        recovers_by_itself(run)
        os.kill(run.pid, signal.SIGSTOP)
        time.sleep(6.0)  # longer than its silence may last; it has been nobody's fault
        os.kill(run.pid, signal.SIGCONT)
        goes_on(run)
        run.send(signal.SIGTERM)
        sitting = ended(run, START_S)
    assert (sitting.status, sitting.leftovers) == (130, []), sitting
    for name in (*WORKERS, "trainer-0"):
        assert f"{name}: no sign of life for " in sitting.stderr, sitting
    assert "Traceback" not in sitting.stdout + sitting.stderr
    audited_file(Run.latest(tmp_path).path / "ledger.jsonl")


@pytest.mark.deep
@pytest.mark.parametrize("victim", [*WORKERS, "trainer-0", "control"])
def test_a_process_that_stands_still_for_a_minute_costs_no_more_than_time(tmp_path: Path, victim: str) -> None:
    job = job_with_reward_worker(tmp_path)
    with training(tmp_path, job, *TINY, "train.steps=100000", "checkpoint.every=5") as run:
        run.wait_for("step 6/", timeout_s=START_S)
        pid = run.pid if victim == "control" else run.children()[victim]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(60.0)
        with contextlib.suppress(ProcessLookupError):  # it was given up meanwhile
            os.kill(pid, signal.SIGCONT)
        goes_on(run)
        run.send(signal.SIGTERM)
        sitting = ended(run, START_S)
    assert (sitting.status, sitting.leftovers) == (130, []), sitting
    assert "Traceback" not in sitting.stdout + sitting.stderr
    audited_file(Run.latest(tmp_path).path / "ledger.jsonl")


@pytest.mark.parametrize(
    ("size", "overrides", "expected"),
    [
        pytest.param(
            150_000, ("checkpoint.every=3",), r"File too large: .*rank-00000\.safetensors", id="while-checkpointing"
        ),
        pytest.param(
            400_000,
            ENDLESS,
            r"store_failed: .*File too large: .*store/trajectories\.log",
            id="while-storing",
            marks=pytest.mark.deep,
        ),
        pytest.param(
            30_000,
            ENDLESS,
            r"the metadata store \(embedded in .*\) failed at open: disk I/O error",
            id="from-the-start",
            marks=pytest.mark.deep,
        ),
    ],
)
def test_a_full_disk_ends_a_run_by_name_and_it_can_be_resumed_where_there_was_a_checkpoint(
    tmp_path: Path, size: int, overrides: tuple[str, ...], expected: str
) -> None:
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.RLIM_INFINITY))\n"
    words = [str(FROZENLAKE), *TINY, "train.steps=100000", "scheduling.losses_in_a_row=50", *overrides]
    with training(tmp_path, *words, environment=everywhere(tmp_path, limit)) as command:
        status = command.wait(timeout_s=4 * START_S)
        assert (status, command.leftovers(grace_s=1.0)) == (1, []), command.said()
        assert re.search(expected, last_error(command.stderr)), command.said()
        assert "Traceback" not in command.stdout + command.stderr
    run = Run.latest(tmp_path)
    assert list((run.path / "checkpoints").glob(".*")) == []
    audited_file(run.path / "ledger.jsonl")
    if run.checkpoints():
        steps = f"train.steps={run.checkpoints()[-1] + 3}"
        resumed = ran(TRAIN, "--resume", "runs/latest", steps, directory=tmp_path, timeout_s=START_S, name="resumed")
        assert resumed.status == 0, resumed
        counts = balance(resumed.stdout)
        assert counts.pop("admitted") == sum(counts.values())


JUMPS = """
import time

_time, _time_ns, _start = time.time, time.time_ns, time.monotonic()


def _jump():
    return 3600 if time.monotonic() - _start < 8 else -7200


time.time = lambda: _time() + _jump()
time.time_ns = lambda: _time_ns() + _jump() * 10**9
"""
"""The clock is an hour ahead for some seconds, in each process by its own time, then two behind."""


def test_a_clock_that_jumps_disturbs_nothing_not_even_a_restart(tmp_path: Path) -> None:
    words = [str(FROZENLAKE), *TINY, *ENDLESS, "coordinator.silence_s=5"]
    with training(tmp_path, *words, environment=everywhere(tmp_path, JUMPS)) as command:
        command.wait_for("step 3/", timeout_s=START_S)
        time.sleep(8.0)
        goes_on(command)
        os.kill(command.children()["engine-0"], signal.SIGKILL)  # its successor is younger by its own clock
        goes_on(command)
        command.send(signal.SIGTERM)
        sitting = ended(command, START_S)
    assert (sitting.status, sitting.leftovers) == (130, []), sitting
    assert "no sign of life" not in sitting.stderr
    elapsed = [step["elapsed_s"] for step in Run.latest(tmp_path).steps()]
    assert elapsed == sorted(elapsed)
    assert 0.0 < elapsed[-1] < 600.0
