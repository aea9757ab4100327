"""Ctrl-C and SIGTERM: acknowledged at once, over within seconds, nothing left behind, and a run that goes on later."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import FROZENLAKE, TINY, balance, training
from tests.end_to_end.story import ACKNOWLEDGED_S, BATCH, ENDED_S, SIZE, START_S, Story


def test_ctrl_c_while_the_parts_start_ends_the_run_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with training(tmp_path, str(FROZENLAKE), *TINY) as command:
        command.wait_for("starting the trainer", timeout_s=START_S)
        command.send(signal.SIGINT)
        command.wait_for("Ctrl-C: stopping", timeout_s=ACKNOWLEDGED_S)
        assert command.wait(timeout_s=ENDED_S) == 130, command.said()
        assert command.leftovers() == []
        assert command.stderr == ""
        assert "interrupted; no checkpoint: the trainer was not up yet" in command.stdout


def test_a_second_ctrl_c_ends_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with training(tmp_path, str(FROZENLAKE), *TINY) as command:
        command.wait_for("starting the trainer", timeout_s=START_S)
        assert {"trainer-0", "engine-0"} <= set(command.children())
        command.send(signal.SIGINT)
        command.wait_for("Ctrl-C: stopping", timeout_s=ACKNOWLEDGED_S)
        command.send(signal.SIGINT)
        assert command.wait(timeout_s=ACKNOWLEDGED_S) == 130, command.said()
        # Children that have only just been started find out by themselves, once they run.
        assert command.leftovers(grace_s=10.0) == []


def test_an_interrupted_run_exits_with_130_and_leaves_a_checkpoint_and_nothing_else(story: Story) -> None:
    for sitting in (story.ctrl_c, story.sigterm):
        assert (sitting.status, sitting.leftovers) == (130, []), sitting
        version = sitting.checkpoint["version"]
        assert f"interrupted; checkpoint v{version:05d} written" in sitting.stdout
    assert story.ctrl_c.stderr == ""
    assert story.sigterm.checkpoint["version"] > story.ctrl_c.checkpoint["version"] >= 5


def test_the_steps_of_all_sittings_follow_each_other(story: Story) -> None:
    assert f"resuming from version {story.ctrl_c.checkpoint['version']}" in story.sigterm.stdout
    assert story.last.status == 0, story.last
    assert [step["version"] for step in story.run.steps()] == list(range(1, story.end + 1))


def test_time_trend_and_losses_go_on_from_the_sitting_before(story: Story) -> None:
    for before, after in itertools.pairwise(story.run.steps()):
        assert after["elapsed_s"] > before["elapsed_s"]
        assert after["reward_trend"] == pytest.approx(0.8 * before["reward_trend"] + 0.2 * after["reward_mean"])
        assert all(after["lost"].get(reason, 0) >= count for reason, count in before["lost"].items())


def test_the_buffer_and_the_order_of_the_data_are_taken_up(story: Story) -> None:
    for before, after in itertools.pairwise(story.saved):
        assert after.checkpoint["scheduler"]["next_group"] > before.checkpoint["scheduler"]["next_group"]
    was, now = (sitting.checkpoint["scheduler"]["balance"] for sitting in (story.ctrl_c, story.sigterm))
    lost = {reason: now["lost"].get(reason, 0) - was["lost"].get(reason, 0) for reason in ("interrupted", "unsaved")}
    assert sum(lost.values()) == was["in_flight"]  # all that an interruption may cost
    assert "rolled_back" not in now["lost"]
    final = story.last.checkpoint["scheduler"]
    begun = [group["index"] for group in final["groups"]]
    # Every group that was begun, in whatever sitting that counts, is trained, evicted or still there: none twice.
    assert len(set(begun)) == len(begun)
    assert final["next_group"] * SIZE >= story.end * BATCH * SIZE + len(begun) * SIZE


def test_trajectories_add_up_over_all_sittings(story: Story) -> None:
    counts = balance(story.last.stdout)
    assert counts["trained"] == story.end * BATCH * SIZE
    assert counts.pop("admitted") == sum(counts.values())
