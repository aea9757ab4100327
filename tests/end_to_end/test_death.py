"""A process that dies by itself: recovery or a named error, never a hang or an orphan."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import FROZENLAKE, TINY, TRAIN, Run, balance, separate_processes, training
from tests.end_to_end.story import BATCH, BEYOND_THE_BUFFER, SIZE, START_S, Story, goes_on
from tests.support.audit import audited_file
from tests.support.running import last_error, ran
from tests.support.zookeeper import running_servers


def test_a_killed_engine_is_restarted_brought_to_the_version_and_the_run_goes_on(story: Story) -> None:
    assert "engine engine-0 died (process engine-0" in story.sigterm.stderr
    assert "killed by SIGKILL" in story.sigterm.stderr
    joined = [event["message"] for event in story.run.events("control") if "engine-0 is up" in event["message"]]
    assert len(joined) == 7  # four sittings and a recovery, and twice more after it died


def test_a_killed_environment_worker_is_restarted_and_the_run_goes_on(story: Story) -> None:
    assert re.search(r"^error: control: process env-worker-0 .* killed by SIGKILL", story.sigterm.stderr, re.MULTILINE)
    lost = story.sigterm.checkpoint["scheduler"]["balance"]["lost"]
    assert lost.keys() <= {"interrupted", "unsaved", "env_worker_died"}  # nothing but what ran when something ended


def test_a_killed_trainer_takes_the_run_back_to_its_checkpoint_and_it_goes_on(story: Story) -> None:
    ended, version = story.control_killed, story.sigterm.checkpoint["version"]
    assert re.search(r"^error: control: trainer on node control: process trainer-0 .* SIGKILL", ended.stderr, re.M)
    assert f"the trainer is started again from version {version} (recovery 1 of 3)" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def test_the_children_of_a_killed_control_process_die_with_it(story: Story) -> None:
    assert (story.control_killed.status, story.control_killed.leftovers) == (-signal.SIGKILL, [])
    assert story.control_killed.checkpoint == story.sigterm.checkpoint


def test_every_trajectory_of_all_sittings_is_trained_once_or_lost_with_a_reason(story: Story) -> None:
    audit = audited_file(story.run.path / "ledger.jsonl")
    counts = balance(story.last.stdout)
    assert len(audit.state) == counts["admitted"]
    assert len(audit.trained) == counts["trained"] == story.end * BATCH * SIZE
    assert audit.lost.total() == counts["lost"]
    assert audit.evicted.total() == counts["evicted"]
    assert audit.resumes == 4  # three by --resume, one by itself
    assert audit.lost["rolled_back"] >= BEYOND_THE_BUFFER  # at least two steps were undone, twice


def test_an_engine_that_hangs_is_killed_restarted_and_the_run_completes(story: Story) -> None:
    assert (story.last.status, story.last.leftovers) == (0, []), story.last
    assert "engine engine-0: no sign of life for " in story.last.stderr
    assert f"all {story.end} steps are done" in story.last.stdout


def test_an_engine_that_dies_again_ends_the_run_by_name_with_a_checkpoint(tmp_path: Path) -> None:
    with training(tmp_path, str(FROZENLAKE), *TINY, "train.steps=100000", "checkpoint.every=0") as command:
        command.wait_for("step ", timeout_s=START_S)
        os.kill(command.children()["engine-0"], signal.SIGKILL)
        goes_on(command)
        os.kill(command.children()["engine-0"], signal.SIGKILL)
        assert command.wait(timeout_s=START_S) == 1, command.said()
        assert command.leftovers() == []
        last = last_error(command.stderr)
        assert "no engine is left; the last, engine-0: process engine-0" in last
        assert "killed by SIGKILL" in last
        assert "Traceback" not in command.stdout + command.stderr
        steps = Run.latest(tmp_path).steps()
    assert Run.latest(tmp_path).checkpoint()["version"] == steps[-1]["version"]


@pytest.mark.deep
@pytest.mark.parametrize("role", ["proxy", "env", "reward", "trainer", "weightsync"])
def test_a_killed_role_of_a_run_in_separate_processes_ends_it_by_name(tmp_path: Path, role: str) -> None:
    with separate_processes(tmp_path, *TINY, "train.steps=100000", "coordinator.silence_s=4") as (lead, roles):
        lead.wait_for("step 3/", timeout_s=START_S)
        roles[role].send(signal.SIGKILL)
        assert lead.wait(timeout_s=START_S) == 1, lead.said()
        last = last_error(lead.stderr)
        # Either the watch over the node says so, or whoever waited for it at that moment.
        assert re.search(rf"^error: control: .*node {role}-node.* is lost: its process has ended", last), lead.said()
        for name, command in roles.items():
            assert command.wait(timeout_s=START_S) == (-signal.SIGKILL if name == role else 0), command.said()
        for command in (lead, *roles.values()):
            assert command.leftovers(grace_s=1.0) == []


@pytest.mark.deep
def test_the_roles_of_a_killed_coordinator_end_by_themselves(tmp_path: Path) -> None:
    with separate_processes(tmp_path, *TINY, "train.steps=100000", "coordinator.silence_s=4") as (lead, roles):
        lead.wait_for("step 3/", timeout_s=START_S)
        lead.send(signal.SIGKILL)
        for name, command in roles.items():
            assert command.wait(timeout_s=START_S) == 1, command.said()
            assert f"{name}-node: lost the coordinator: no sign of life for " in command.stdout
        for command in (lead, *roles.values()):
            assert command.leftovers(grace_s=1.0) == []


@pytest.mark.deep
def test_a_metadata_store_that_dies_ends_the_run_by_name_with_a_checkpoint(tmp_path: Path) -> None:
    with running_servers(count=1) as (server,):
        store = [f"coordinator.store=zk://{server.address}", "coordinator.store_timeout_s=3"]
        with training(tmp_path, str(FROZENLAKE), *TINY, "train.steps=100000", *store) as command:
            command.wait_for("step 3/", timeout_s=START_S)
            server.kill()
            assert command.wait(timeout_s=START_S) == 1, command.said()
            assert command.leftovers() == []
            assert f"zk://{server.address}" in command.stderr
            assert "Traceback" not in command.stdout + command.stderr
            steps = Run.latest(tmp_path).steps()
    assert Run.latest(tmp_path).checkpoint()["version"] == steps[-1]["version"]


def test_a_run_whose_steps_are_all_done_says_so_instead_of_starting_again(story: Story) -> None:
    ended = ran(TRAIN, "--resume", str(story.run.path), directory=story.run.path, timeout_s=60.0, name="again")
    assert ended.status == 2
    assert f"all {story.end} steps are done; train.steps={2 * story.end} would add as many" in ended.stderr
