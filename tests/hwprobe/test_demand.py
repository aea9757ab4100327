"""What tasks are like, from requests as they come and go."""

from __future__ import annotations

import pytest

from hwprobe import demand as module
from hwprobe.demand import SEEN, Demand, TaskFit
from hwprobe.flow import TaskShape


def play(demand: Demand, name: str, task: str = "games", at: float = 0.0) -> None:
    """Three turns: 100 tokens, then 30 more each; 10 are sampled a turn; the environment takes 2 s."""
    length = 100
    for turn in range(3):
        demand.asked(task, name, length, at + 5.0 * turn)
        demand.answered(name, 10, at + 5.0 * turn + 3.0)
        length += 10 + 30
    demand.ended(name)


def test_a_task_is_as_its_trajectories_are() -> None:
    demand = Demand()
    for number in range(5):
        play(demand, f"t{number}")
    fit = demand.tasks["games"]
    assert (fit.prompt, fit.observation, fit.response, fit.turns, fit.step_s) == (100, 30, 10, 3, 2)
    assert (fit.prompts, fit.observations, fit.responses, fit.ended, fit.steps) == (5, 10, 15, 5, 10)
    shape = fit.shape()
    assert shape.prefill_tokens == 160
    assert shape.decode_tokens == 30
    assert shape.environment_s == pytest.approx(4.0), "none after the last turn"
    assert len(demand) == 0


def test_an_answer_that_is_heard_of_late_changes_nothing_but_the_wait() -> None:
    """The next turn's request comes first, because the environment was quick."""
    demand = Demand()
    demand.asked("games", "t", 100, 0.0)
    demand.asked("games", "t", 140, 3.0)
    assert demand.tasks["games"].observations == 0
    demand.answered("t", 10, 3.05)
    fit = demand.tasks["games"]
    assert (fit.observation, fit.observations, fit.response, fit.step_s) == (30, 1, 10, 0)
    demand.answered("t", 10, 6.0)
    assert demand.tasks["games"].responses == 2


def test_single_turns_whose_answers_are_heard_of_after_the_end_count_whole() -> None:
    """As it is as a rule: the engine tells of its answers later than the environment ends."""
    demand = Demand()
    for number in range(SEEN):
        demand.asked("math", f"t{number}", 100, 0.0)
        demand.ended(f"t{number}")
        assert len(demand) == 0, "it is under way no more"
        demand.answered(f"t{number}", 10, 1.0)
        demand.answered(f"t{number}", 10, 1.0)
    fit = demand.tasks["math"]
    assert (fit.response, fit.responses, fit.turns, fit.ended, fit.known) == (10, SEEN, 1, SEEN, True)


def test_two_answers_that_are_heard_of_after_the_end_are_two_turns() -> None:
    demand = Demand()
    demand.asked("games", "t", 100, 0.0)
    demand.asked("games", "t", 140, 1.0)
    demand.ended("t")
    demand.answered("t", 10, 2.0)
    assert demand.tasks["games"].ended == 0
    demand.answered("t", 20, 2.0)
    fit = demand.tasks["games"]
    assert (fit.turns, fit.ended, fit.response, fit.observation) == (2, 1, 15, 30)


def test_trajectories_that_were_broken_off_say_nothing_of_how_many_turns_one_has() -> None:
    demand = Demand()
    for name, whole in (("whole", True), ("stopped", False), ("waits", False)):
        for turn in range(4 if whole else 1):
            demand.asked("games", name, 100, float(turn))
            if name != "waits":
                demand.answered(name, 10, float(turn))
        demand.ended(name, whole=whole)
    demand.answered("waits", 3, 9.0)
    fit = demand.tasks["games"]
    assert (fit.turns, fit.ended, fit.response, len(demand)) == (4, 1, 10, 0)


def test_a_request_that_gets_no_token_is_no_turn() -> None:
    demand = Demand()
    demand.asked("math", "t", 100, 0.0)
    demand.unanswered("t")
    demand.ended("t")
    assert demand.tasks["math"].ended == 0
    demand.asked("math", "u", 100, 0.0)
    demand.answered("u", 10, 1.0)
    demand.asked("math", "u", 120, 1.0)
    demand.ended("u")
    demand.unanswered("u")
    fit = demand.tasks["math"]
    assert (fit.turns, fit.ended, fit.responses) == (1, 1, 1)


def test_a_trajectory_that_is_met_in_its_middle_says_nothing_of_first_prompts_but_all_else() -> None:
    """Its proxy's successor hears of it at its third turn, of five: 1000 tokens are there, 30 are new each turn."""
    demand = Demand()
    length = 1000
    for turn in (2, 3, 4):
        demand.asked("games", "t", length, 5.0 * turn, turn)
        demand.answered("t", 10, 5.0 * turn + 3.0)
        length += 10 + 30
    demand.ended("t")
    fit = demand.tasks["games"]
    assert (fit.starts, fit.prompts, fit.observation, fit.observations, fit.steps) == (0, 0, 30, 2, 2)
    assert (fit.turns, fit.ended, fit.response, fit.responses) == (5, 1, 10, 3)
    for number in range(SEEN):
        demand.asked("games", f"late{number}", 1000, 30.0, 7)
        demand.answered(f"late{number}", 10, 31.0)
    assert not demand.tasks["games"].known, "nobody has seen a first prompt"
    demand.asked("games", "new", 100, 40.0, 0)
    fit = demand.tasks["games"]
    assert (fit.prompt, fit.prompts, fit.starts, fit.known) == (100, 1, 1, True)


def test_means_are_taken_over_where_they_are_made_of_more_than_those_here() -> None:
    before, after = Demand(), Demand()
    for number in range(5):
        play(before, f"t{number}")
    play(before, "one", "math")
    for number in range(2):
        play(after, f"u{number}", "math")
    kept = after.tasks["math"]
    after.inherit(before.tasks)
    assert after.tasks == {"games": before.tasks["games"], "math": kept}


def test_of_those_whose_answers_never_come_only_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDING", 2)
    demand = Demand()
    for name in "abc":
        demand.asked("math", name, 100, 0.0)
        demand.ended(name)
    for name in "abc":
        demand.answered(name, 10, 1.0)
    assert demand.tasks["math"].responses == 2


def test_how_often_tasks_are_posed_follows_the_last_hundred_or_so() -> None:
    demand = Demand()
    for number in range(400):
        demand.asked("games" if number % 4 else "math", f"a{number}", 100, 0.0)
    starts = {name: fit.starts for name, fit in demand.tasks.items()}
    assert starts["games"] / starts["math"] == pytest.approx(3.0, rel=0.05)
    for number in range(300):
        demand.asked("math", f"b{number}", 100, 0.0)
    starts = {name: fit.starts for name, fit in demand.tasks.items()}
    assert starts["math"] / sum(starts.values()) > 0.95


def test_lengths_that_change_are_known_after_some_eighty_answers() -> None:
    demand = Demand()
    for number in range(200):
        demand.asked("math", f"t{number}", 10, 0.0)
        demand.answered(f"t{number}", 100 if number < 100 else 1000, 0.0)
    assert demand.tasks["math"].response == pytest.approx(1000, rel=0.1)


def test_before_a_trajectory_has_ended_its_turns_so_far_are_all_that_is_known() -> None:
    demand = Demand()
    for trajectory in ("a", "b"):
        for turn in range(4):
            demand.asked("games", trajectory, 100, float(turn))
            demand.answered(trajectory, 5, float(turn))
    assert demand.tasks["games"].shape().turns == 4
    assert demand.tasks["games"].known == (SEEN <= 2 * 4)
    demand.ended("nobody")
    demand.answered("nobody", 5, 0.0)
    assert set(demand.tasks) == {"games"}


def test_a_task_of_which_nothing_is_known_has_a_shape_all_the_same() -> None:
    assert TaskFit().shape() == TaskShape(weight=1e-3, turns=1.0, prompt=1.0, response=1.0)
