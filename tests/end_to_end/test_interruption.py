"""Ctrl-C and SIGTERM: acknowledged at once, over within seconds, nothing left behind, and a run that goes on later."""

from __future__ import annotations

import itertools
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.end_to_end.runs import FROZENLAKE, TINY, TRAIN, Run, balance, training
from tests.support.running import Command, started

START_S = 90.0
ACKNOWLEDGED_S = 3.0  # asked for: 1 s; the rest is for a machine that is busy with other tests
ENDED_S = 10.0  # asked for: 5 s
BATCH, SIZE = 2, 4  # of TINY


class Sitting(NamedTuple):
    """One process that worked on the run."""

    status: int
    stdout: str
    stderr: str
    leftovers: list[str]
    checkpoint: dict[str, Any]
    """The newest one when it ended."""


def interrupted(command: Command, number: signal.Signals, acknowledgement: str) -> Sitting:
    command.send(number)
    command.wait_for(acknowledgement, timeout_s=ACKNOWLEDGED_S)
    return ended(command, ENDED_S)


def ended(command: Command, timeout_s: float) -> Sitting:
    status = command.wait(timeout_s=timeout_s)
    leftovers = command.leftovers(grace_s=1.0)
    checkpoint = Run.latest(command.directory).checkpoint()
    return Sitting(status, command.stdout, command.stderr, leftovers, checkpoint)


def resumed(directory: Path, name: str, *overrides: str) -> AbstractContextManager[Command]:
    return started(TRAIN, "--resume", "runs/latest", *overrides, directory=directory, name=name)


class Story(NamedTuple):
    """A run in four sittings."""

    run: Run
    ctrl_c: Sitting
    sigterm: Sitting
    twice: Sitting
    last: Sitting
    end: int  # the last version


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    directory = tmp_path_factory.mktemp("story")
    endless = ["train.steps=100000", "checkpoint.every=0"]
    with training(directory, str(FROZENLAKE), *TINY, *endless, name="1") as command:
        command.wait_for(r"step 5/", timeout_s=START_S)
        ctrl_c = interrupted(command, signal.SIGINT, r"Ctrl-C: stopping; a checkpoint is written first")
    with resumed(directory, "2") as command:
        command.wait_for(rf"step {ctrl_c.checkpoint['version'] + 3}/", timeout_s=START_S)
        sigterm = interrupted(command, signal.SIGTERM, r"SIGTERM: stopping; a checkpoint is written first")
    with resumed(directory, "3") as command:
        command.wait_for(rf"step {sigterm.checkpoint['version'] + 1}/", timeout_s=START_S)
        command.send(signal.SIGINT)
        command.wait_for("Ctrl-C: stopping", timeout_s=ACKNOWLEDGED_S)
        command.send(signal.SIGINT)
        twice = ended(command, ENDED_S)
    end = twice.checkpoint["version"] + 5
    with resumed(directory, "4", f"train.steps={end}") as command:
        last = ended(command, START_S)
    return Story(Run.latest(directory), ctrl_c, sigterm, twice, last, end)


def test_ctrl_c_while_the_parts_start_ends_the_run_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with training(tmp_path, str(FROZENLAKE), *TINY) as command:
        command.wait_for("starting the trainer", timeout_s=START_S)
        command.send(signal.SIGINT)
        command.wait_for("Ctrl-C: stopping", timeout_s=ACKNOWLEDGED_S)
        assert command.wait(timeout_s=ENDED_S) == 130, command.said()
        assert command.leftovers() == []
        assert command.stderr == ""
        assert "interrupted; no checkpoint: the trainer was not up yet" in command.stdout


def test_an_interrupted_run_exits_with_130_and_leaves_a_checkpoint_and_nothing_else(story: Story) -> None:
    for sitting in (story.ctrl_c, story.sigterm):
        assert (sitting.status, sitting.leftovers, sitting.stderr) == (130, [], ""), sitting
        version = sitting.checkpoint["version"]
        assert f"interrupted; checkpoint v{version:05d} written" in sitting.stdout
    assert story.sigterm.checkpoint["version"] > story.ctrl_c.checkpoint["version"] >= 5


def test_a_second_ctrl_c_ends_at_once_without_a_checkpoint_and_leaves_nothing_behind(story: Story) -> None:
    assert (story.twice.status, story.twice.leftovers) == (130, [])
    assert story.twice.checkpoint == story.sigterm.checkpoint


def test_the_steps_of_all_sittings_follow_each_other(story: Story) -> None:
    assert (story.last.status, story.last.stderr) == (0, "")
    assert f"resuming from version {story.sigterm.checkpoint['version']}" in story.last.stdout
    assert [step["version"] for step in story.run.steps()] == list(range(1, story.end + 1))


def test_time_trend_and_losses_go_on_from_the_sitting_before(story: Story) -> None:
    steps = story.run.steps()
    for before, after in itertools.pairwise(steps):
        assert after["elapsed_s"] > before["elapsed_s"]
        assert after["reward_trend"] == pytest.approx(0.8 * before["reward_trend"] + 0.2 * after["reward_mean"])
        assert all(after["lost"].get(reason, 0) >= count for reason, count in before["lost"].items())


def test_the_buffer_and_the_order_of_the_data_are_taken_up(story: Story) -> None:
    for before, after in ((story.ctrl_c, story.sigterm), (story.sigterm, story.last)):
        was, now = before.checkpoint["scheduler"], after.checkpoint["scheduler"]
        assert now["next_group"] >= was["next_group"]
        running = was["balance"]["in_flight"]  # all that an interruption may cost
        lost = now["balance"]["lost"].get("interrupted", 0) - was["balance"]["lost"].get("interrupted", 0)
        assert lost == running
    final = story.last.checkpoint["scheduler"]
    evicted = sum(final["balance"]["evicted"].values())
    assert evicted % SIZE == 0
    # Every group that was ever begun, in whatever sitting, is trained, evicted or still there: none was begun twice.
    assert final["next_group"] == story.end * BATCH + evicted // SIZE + len(final["groups"])


def test_trajectories_add_up_over_all_sittings(story: Story) -> None:
    counts = balance(story.last.stdout)
    assert counts["trained"] == story.end * BATCH * SIZE
    assert counts.pop("admitted") == sum(counts.values())
