"""Running users' environments, well behaved or not."""

import sys
from pathlib import Path
from typing import Any

import pytest

from actors.env.catalogue import EnvironmentUnavailable
from actors.env.protocol import Observation, Step
from actors.env.workbench import EnvironmentFailed, Standing, UnknownInstance, Workbench, WorkbenchCounts
from actors.settings import EnvironmentSettings

USERS = '''
import sys
import numpy as np
from actors.env.protocol import Observation, Step

closed = []

class Counting:
    """Plays along until it is told to misbehave."""
    system_prompt = "Count."
    made = 0
    def __init__(self):
        Counting.made += 1
        if Counting.made == 5:
            raise OSError("no more licences")
        self.id = Counting.made
    def reset(self, task):
        if task == 13:
            raise RuntimeError("unlucky")
        if task == 14:
            return "text"
        self.total = task
        return Observation(f"{self.id}:{task}", ["a", "b"])
    def step(self, action):
        if action == "raise":
            return self.deeper()
        if action == "exit":
            sys.exit(1)
        if action == "numpy":
            return Step(Observation("n"), np.float32(0.5), np.bool_(True), success=np.bool_(False))
        if action == "end":
            return Step(Observation("end", ()), 2, truncated=True)
        if action.startswith("return "):
            return eval(action[7:])
        self.total += 1
        return Step(Observation(str(self.total)), reward=1.0)
    def deeper(self):
        return {}["missing"]
    def close(self):
        closed.append(self.id)
        if self.id == 1:
            raise ValueError("cannot close")
'''


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    (tmp_path / "workbench_users.py").write_text(USERS)
    sys.modules.pop("workbench_users", None)
    return Workbench(EnvironmentSettings(name="workbench_users:Counting"), tmp_path)


def closed() -> list[int]:
    users: Any = sys.modules["workbench_users"]
    return list(users.closed)


def test_instances_play_side_by_side(bench: Workbench) -> None:
    assert bench.system_prompt == "Count."
    assert bench.reset("x", 3) == Observation("1:3", ("a", "b"))
    assert bench.reset("y", 5) == Observation("2:5", ("a", "b"))
    assert bench.step("x", "a") == Step(Observation("4"), reward=1.0)
    assert bench.step("y", "a") == Step(Observation("6"), reward=1.0)
    assert bench.step("x", "b") == Step(Observation("5"), reward=1.0)
    assert bench.standing("x") == Standing(steps=2, env_return=2.0, success=True)
    assert bench.counts() == WorkbenchCounts(open=2, spare=0, created=2, failed=0, episodes=2, steps=3)


def test_a_closed_instance_leaves_its_environment_for_the_next(bench: Workbench) -> None:
    bench.reset("x", 3)
    bench.close("x")
    bench.close("x")
    assert bench.reset("y", 8) == Observation("1:8", ("a", "b"))
    assert bench.reset("y", 9) == Observation("1:9", ("a", "b"))
    assert bench.counts().created == 1


def test_an_ended_or_unknown_episode_cannot_be_stepped(bench: Workbench) -> None:
    with pytest.raises(UnknownInstance, match="instance x is not here: reset it first"):
        bench.step("x", "a")
    bench.reset("x", 3)
    last = bench.step("x", "end")
    assert last == Step(Observation("end"), reward=2.0, truncated=True)
    with pytest.raises(UnknownInstance, match="instance x has ended its episode of task 3"):
        bench.step("x", "a")
    assert bench.standing("x") == Standing(steps=1, env_return=2.0, success=True)


def test_numpy_values_become_plain_ones(bench: Workbench) -> None:
    bench.reset("x", 0)
    step = bench.step("x", "numpy")
    assert (type(step.reward), type(step.terminated), type(step.success)) == (float, bool, bool)
    assert bench.standing("x") == Standing(steps=1, env_return=0.5, success=False)


def test_an_exception_names_instance_task_step_and_line_and_spares_the_others(bench: Workbench) -> None:
    bench.reset("x", 3)
    bench.reset("y", 5)
    bench.step("x", "a")
    with pytest.raises(EnvironmentFailed) as caught:
        bench.step("x", "raise")
    error = caught.value
    assert str(error) == ("environment instance x, task 3, step 2: KeyError: 'missing' (workbench_users.py, line 38)")
    assert (error.instance, error.task, error.during) == ("x", 3, "step 2")
    assert "in step" in error.details
    assert "in deeper" in error.details
    assert "actors/env/workbench.py" not in error.details
    assert closed() == [1]
    with pytest.raises(UnknownInstance):
        bench.step("x", "a")
    assert bench.step("y", "a").observation.text == "6"
    assert bench.counts() == WorkbenchCounts(open=1, spare=0, created=2, failed=1, episodes=2, steps=2)


def test_an_exit_costs_one_instance_and_not_the_worker(bench: Workbench) -> None:
    bench.reset("x", 3)
    with pytest.raises(EnvironmentFailed, match=r"step 1: SystemExit: 1 \(workbench_users\.py, line 28\)"):
        bench.step("x", "exit")


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (13, r"task 13, reset: RuntimeError: unlucky \(workbench_users\.py, line 19\)"),
        (14, r"task 14, reset: expected an Observation, found 'text' \(str\)"),
    ],
)
def test_a_failed_reset_discards_the_environment(bench: Workbench, task: int, reason: str) -> None:
    with pytest.raises(EnvironmentFailed, match=reason):
        bench.reset("x", task)
    assert bench.reset("x", 1).text == "2:1"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("None", r"expected a Step, found None \(NoneType\)"),
        ("(1, 2, True, False, {})", r"expected a Step, found \(1, 2, True, False, \{\}\) \(tuple\)"),
        ("Step('text')", r"expected an Observation, found 'text' \(str\)"),
        ("Step(Observation(3))", r"expected Observation\.text to be a str, found 3 \(int\)"),
        ("Step(Observation('x', 'LDRU'))", r"expected Observation\.actions to be a tuple of str or None, found 'LDRU'"),
        ("Step(Observation('x', (1,)))", r"expected Observation\.actions to be a tuple of str or None, found \(1,\)"),
        ("Step(Observation('x', ()))", r"expected Observation\.actions to list at least one action"),
        ("Step(Observation('x'), '1')", r"expected Step\.reward to be a finite number, found '1' \(str\)"),
        ("Step(Observation('x'), float('nan'))", r"expected Step\.reward to be a finite number, found nan \(float\)"),
        ("Step(Observation('x'), 1.0, 1)", r"expected Step\.terminated to be True or False, found 1 \(int\)"),
        ("Step(Observation('x'), success='yes')", r"expected Step\.success to be True or False, found 'yes' \(str\)"),
    ],
)
def test_what_an_environment_returns_is_checked(bench: Workbench, code: str, reason: str) -> None:
    bench.reset("x", 0)
    with pytest.raises(EnvironmentFailed, match=f"instance x, task 0, step 1: {reason}"):
        bench.step("x", "return " + code)


def test_a_constructor_that_fails_later_is_a_failure_of_that_instance(bench: Workbench) -> None:
    for number in range(4):
        bench.reset(f"i{number}", 0)
    with pytest.raises(EnvironmentFailed, match=r"instance late, task 7, constructor: .*OSError: no more licences"):
        bench.reset("late", 7)
    assert bench.counts().failed == 1


def test_an_environment_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnavailable):
        Workbench(EnvironmentSettings(name="nothing"), tmp_path)


def test_shutdown_closes_everything_even_if_one_refuses(bench: Workbench) -> None:
    bench.reset("x", 0)
    bench.reset("y", 0)
    bench.close("x")
    bench.shutdown()
    bench.shutdown()
    assert sorted(closed()) == [1, 2]
    assert bench.counts().open == bench.counts().spare == 0
