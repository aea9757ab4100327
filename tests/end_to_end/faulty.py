"""Environments and rewards with every fault that a user's code can have; jobs name them by import path."""

from __future__ import annotations

import time

from actors.env.protocol import Observation, Step, is_held_out
from actors.trajectory import Trajectory

RAISES, NONSENSE, HANGS = 1, 2, 5
"""Training tasks are 0, 1, 2, ...: these go wrong."""
UNSCORABLE, NO_NUMBER = 3, 4


class MostlyFaulty:
    """Two turns of "y" or "n"; faults by task."""

    def reset(self, task: int) -> Observation:
        self._task = task
        self._turns = 0
        return Observation(f"task {task}?", ("y", "n"))

    def step(self, action: str) -> Step:
        self._turns += 1
        if self._task == RAISES:
            raise ValueError("the wheel came off")
        if self._task == NONSENSE:
            return "done"  # type: ignore[return-value]
        if self._task == HANGS:
            time.sleep(3600.0)
        won = float(action == "y")
        return Step(Observation("again?", ("y", "n")), reward=won, terminated=self._turns == 2)


class Hopeless(MostlyFaulty):
    """Not one episode of training ends."""

    def step(self, action: str) -> Step:
        if not is_held_out(self._task):
            raise ValueError("the wheel came off")
        return super().step(action)


class Unplayable(MostlyFaulty):
    """Its first step fails already."""

    def step(self, action: str) -> Step:
        raise ValueError("the wheel came off")


def hopeless(trajectory: Trajectory) -> float:
    """Scores nothing."""
    raise LookupError("no such score")


def mostly_faulty(trajectory: Trajectory) -> float:
    """Scores most trajectories."""
    if trajectory.task == UNSCORABLE:
        raise LookupError("no such score")
    return float("nan") if trajectory.task == NO_NUMBER else trajectory.env_return


def paid(trajectory: Trajectory) -> float:
    """What the environment paid, by a function of one's own."""
    return trajectory.env_return
