"""When a run in which trajectories are lost warns, and when it stops."""

from __future__ import annotations

import pytest

from actors.env.messages import Outcome
from coordinator.losses import LossWatch, TooManyLosses
from tests.scheduling.support import stored


def failed(number: int, reason: str = "env_failed", detail: str = "the wheel\n came off") -> Outcome:
    return Outcome(f"t{number}", "lost", reason, detail)


def test_the_first_loss_of_each_kind_is_told_in_one_line_and_the_last_words_are_kept() -> None:
    watch = LossWatch(100)
    assert watch.ended(failed(1)) == "trajectory t1 is lost, env_failed: the wheel came off"
    assert watch.ended(failed(2, detail="the horse bolted")) is None
    assert watch.ended(failed(3, "reward_failed", "no score")) == "trajectory t3 is lost, reward_failed: no score"
    assert watch.details == {"env_failed": "the horse bolted", "reward_failed": "no score"}


def test_so_many_losses_in_a_row_are_too_many_and_a_stored_one_begins_a_new_row() -> None:
    watch = LossWatch(3)
    for number in (1, 2):
        watch.ended(failed(number))
    watch.ended(stored("t3"))
    for number in (4, 5):
        watch.ended(failed(number))
    with pytest.raises(TooManyLosses, match=r"3 trajectories in a row .* t6, env_failed: the wheel came off"):
        watch.ended(failed(6))


def test_what_the_scheduler_itself_ends_is_no_loss_to_worry_about() -> None:
    watch = LossWatch(2)
    for number in range(10):
        assert watch.ended(failed(number, "stale", "too old")) is None
        assert watch.ended(failed(number, "env_failed", "")) is None  # stopped with its group
    assert watch.details == {}


def test_a_run_that_loses_most_of_its_trajectories_is_told_so_once() -> None:
    watch = LossWatch(10)
    warnings = []
    for number in range(400):
        warnings += [watch.ended(failed(number)), watch.ended(failed(number)), watch.ended(stored(f"t{number}"))]
    said = [warning for warning in warnings if warning is not None]
    assert len(said) == 2  # the first of its kind, then that it is most
    assert said[1].startswith("67% of the last 200 trajectories were lost; the last one, env_failed: ")
