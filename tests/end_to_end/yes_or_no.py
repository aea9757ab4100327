"""An environment in which some episodes succeed from the start; jobs name it by import path."""

from __future__ import annotations

from actors.env.protocol import Observation, Step


class YesOrNo:
    """Two turns of "y" or "n"; every "y" is worth half a point, two of them are a success."""

    def reset(self, task: int) -> Observation:
        self._turns = 0
        self._won = 0.0
        return Observation(f"task {task % 4}?", ("n", "y"))

    def step(self, action: str) -> Step:
        self._turns += 1
        self._won += 0.5 * (action == "y")
        done = self._turns == 2
        return Step(Observation("again?", ("n", "y")), 0.5 * (action == "y"), terminated=done, success=self._won == 1.0)


JOB = """
name: yes-or-no
environment:
  name: tests.end_to_end.yes_or_no:YesOrNo
  max_turns: 2
policy:
  shape: {hidden_size: 32, layers: 1}
rollout:
  engine: torch
train:
  steps: 3
  groups_per_step: 2
  group_size: 4
  learning_rate: 0.01
evaluation:
  every: 0
  episodes: 0
"""
