"""What an environment is: a text game that one agent plays, one message at a time.

Invariant: an episode is ``reset(task)`` followed by ``step(action)`` until a step says that it is over; the same
task poses the same problem every time, and nothing but text and numbers crosses the boundary.

A complete environment, to copy and change::

    from actors.env.protocol import Observation, Step

    class GuessTheNumber:
        system_prompt = "Guess my number between 1 and 9. Answer with one digit."
        digits = tuple("123456789")

        def reset(self, task: int) -> Observation:
            self.secret = str(1 + task % 9)
            return Observation("Your guess?", self.digits)

        def step(self, action: str) -> Step:
            if action == self.secret:
                return Step(Observation("Right!"), reward=1.0, terminated=True, success=True)
            return Step(Observation("Higher." if action < self.secret else "Lower.", self.digits))

A job names it by import path (``environment.name: my_env:GuessTheNumber``); ``environment.options`` become the
keyword arguments of its constructor.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

FIRST_EVALUATION_TASK = 1_000_000_000
"""Tasks from here on are held out: training draws tasks below it, evaluation draws tasks from it upwards, so that no
episode that measures success was ever trained on. This line is the only place where the split is made."""

LAST_TASK = 2**31 - 1
"""The largest task: it fits any seed argument and a signed 32-bit integer."""


def training_task(index: int) -> int:
    """The ``index``-th training task; they repeat after ``FIRST_EVALUATION_TASK`` of them."""
    return index % FIRST_EVALUATION_TASK


def evaluation_task(index: int) -> int:
    """The ``index``-th held-out task; they repeat once the held-out range is used up."""
    return FIRST_EVALUATION_TASK + index % (LAST_TASK + 1 - FIRST_EVALUATION_TASK)


def is_held_out(task: int) -> bool:
    """Whether training must never see this task."""
    return task >= FIRST_EVALUATION_TASK


class Observation(msgspec.Struct, frozen=True):
    """What the agent reads before its next action."""

    text: str
    actions: tuple[str, ...] | None = None
    """The legal actions, where they can be listed. Sampling is then restricted to them, and each must be exactly
    one token of the policy's tokenizer (an error says which is not). None: the agent may write anything."""

    turns_left: int | None = None
    """How many more actions the environment thinks that the episode takes, where it can tell: trajectories that are
    almost done go first where engines are scarce. None: as many as the job's step bound allows."""


class Step(msgspec.Struct, frozen=True):
    """What one action led to."""

    observation: Observation  # of the last step, too: it is recorded, though no action follows it
    reward: float = 0.0  # any finite number; the episode's return is the plain sum
    terminated: bool = False  # the task is over: solved, failed or given up
    truncated: bool = False  # cut off by a limit of the environment's own
    success: bool | None = None  # read from the last step; None: an episode succeeded if its return is above 0
    metrics: dict[str, float] = {}
    """Counts worth a curve of their own, such as tool calls: summed over an episode, averaged over episodes."""


class Environment(Protocol):
    """See the module docstring for an example; nothing needs to be inherited.

    One object plays one episode at a time and is reset many times, each time with a task of its own. It runs in a
    worker process, so it may block, keep state and print; an exception ends the trajectory with a named error and
    the object is thrown away. Two optional members:

    - ``system_prompt: str``: the rules, told once at the start of an episode to policies that chat. The byte-level
      policies that start from random weights cannot read and are not told.
    - ``close() -> None``: called once, when the object is no longer needed.
    """

    def reset(self, task: int) -> Observation:
        """Begin the episode of ``task``, a seed: use it to choose the problem and to seed all chance in it."""

    def step(self, action: str) -> Step:
        """Play one action: one of the last observation's ``actions`` if it listed them, else any text."""


def system_prompt(environment: Environment) -> str:
    """The environment's system prompt, empty where it has none. Raises ``TypeError`` if it is not a string."""
    prompt: object = getattr(environment, "system_prompt", "")
    if not isinstance(prompt, str):
        raise TypeError(
            f"{type(environment).__name__}.system_prompt: expected a str (an attribute, not a method), "
            f"found {type(prompt).__name__}"
        )
    return prompt


def succeeded(last: Step | None, env_return: float) -> bool:
    """Whether an episode that ended (or was cut off) after ``last`` counts as a success."""
    if last is not None and last.success is not None:
        return last.success
    return env_return > 0
