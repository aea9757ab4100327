"""What env hosts and environment workers are told, and what they answer."""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.core.typed import Message
from actors.env.agents.protocol import Result, Session
from actors.env.protocol import Observation, Step
from actors.trajectory import Trajectory

Purpose = Literal["train", "evaluate"]


class Ticket(msgspec.Struct, frozen=True):
    """Leave to run one trajectory: issued by the coordinator, accounted for until it is trained or counted lost."""

    id: str
    group: int
    task: int
    purpose: Purpose
    temperature: float  # 0 is greedy
    seed: int  # of this trajectory's sampling
    from_version: int = 0  # no token is sampled under an older one: its first turn waits for it at an engine
    again: int = 0  # epoch of the leader that started it once more, where the first host is gone
    stream: str = ""  # of tasks, that it was drawn from; "": the job names none

    def request(self, turn: int) -> str:
        """The id of a turn's request: engines answer each one once, so whoever plays it again needs others."""
        return f"{self.id}.{self.again}/{turn}" if self.again else f"{self.id}/{turn}"


# ---- to an env host -------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """Run these, each on its own timeline. ``more``: others wait at the coordinator for a place, which therefore wants
    to hear of ``LeftPlaces``."""

    tickets: list[Ticket]
    more: bool = False


class Stop(msgspec.Struct, frozen=True):
    """End these where they are; their outcome says ``reason``."""

    tickets: list[str]
    reason: str


class LearnerVersion(msgspec.Struct, frozen=True):
    """The learner has done this many steps: trajectories that can no longer be trained on stop at their next turn."""

    version: int
    alpha: int


class Noted(msgspec.Struct, frozen=True):
    """A ``Start``, ``Stop`` or ``Outcome`` has arrived, for the first time or again."""


class GetTickets(msgspec.Struct, frozen=True):
    """From a new leader: ask for ``TicketsHere``."""


class TicketsHere(msgspec.Struct, frozen=True):
    """All whose outcome has not arrived at a leader yet."""

    tickets: list[Ticket]


class DescribeEnv(msgspec.Struct, frozen=True):
    """Ask for ``EnvState``."""


class RunningTrajectory(msgspec.Struct, frozen=True):
    """One trajectory in progress."""

    ticket: str
    task: int
    purpose: Purpose
    turns: int
    initiating_version: int | None
    state: str  # what it waits for: "place", "reset", "engine", "environment", "reward", "store"
    seconds: float


class EnvState(msgspec.Struct, frozen=True):
    running: list[RunningTrajectory]
    counters: dict[str, int]


# ---- from an env host to the coordinator ----------------------------------------------------------------------------


class LeftPlaces(msgspec.Struct, frozen=True):
    """These are only scored and stored from now on: their places are free. Nobody relies on it: an ``Outcome``, which
    follows, says the same."""

    tickets: list[str]


class Outcome(msgspec.Struct, frozen=True):
    """How a ticket ended. ``stored``: its trajectory is durably in the trainer's store. ``evaluated``: nothing is
    kept. ``lost``: with a reason."""

    ticket: str
    state: Literal["stored", "evaluated", "lost"]
    reason: str = ""
    detail: str = ""  # of a loss, for people
    initiating_version: int = -1
    reward: float = 0.0
    env_return: float = 0.0
    success: bool = False
    turns: int = 0
    sampled_tokens: int = 0
    transcript: list[tuple[str, str]] = []
    metrics: dict[str, float] = {}  # the environment's own, summed over the episode


def stored_outcome(trajectory: Trajectory, metrics: dict[str, float]) -> Outcome:
    """How a trajectory ended that is in the trainer's store."""
    return Outcome(
        ticket=trajectory.ticket,
        state="stored",
        initiating_version=trajectory.initiating_version,
        reward=trajectory.reward,
        env_return=trajectory.env_return,
        success=trajectory.success,
        turns=trajectory.turns,
        sampled_tokens=trajectory.sampled_tokens,
        transcript=trajectory.transcript,
        metrics=metrics,
    )


# ---- to whoever follows a trajectory --------------------------------------------------------------------------------


class Followed(msgspec.Struct, frozen=True):
    """What a trajectory does now, what was said since the last of these, and in the last one how it ended."""

    now: RunningTrajectory
    said: list[tuple[str, str]]  # ("observation" | "action", text)
    outcome: Outcome | None = None


class FollowTrajectory(Message[Followed], frozen=True):
    """To an env host: a stream, from where the trajectory is to its end. Without a ticket: of the one that began last,
    or begins next."""

    ticket: str = ""


# ---- to an environment worker ---------------------------------------------------------------------------------------


class ResetEnv(msgspec.Struct, frozen=True):
    instance: str
    task: int


class ResetDone(msgspec.Struct, frozen=True):
    observation: Observation
    system_prompt: str


class StepEnv(msgspec.Struct, frozen=True):
    instance: str
    action: str


class StepDone(msgspec.Struct, frozen=True):
    step: Step
    success: bool  # so far, by the environment's own word or by its return
    env_return: float
    metrics: dict[str, float] = {}  # summed so far


class CloseEnv(msgspec.Struct, frozen=True):
    instance: str


class RunAgent(msgspec.Struct, frozen=True):
    """Run the job's agent; it asks the endpoint meanwhile. Whoever stops waiting lets go of it."""

    session: Session


class AgentDone(msgspec.Struct, frozen=True):
    result: Result


class ScoreWith(msgspec.Struct, frozen=True):
    """Apply the job's reward function to a trajectory."""

    trajectory: Trajectory


class ScoreDone(msgspec.Struct, frozen=True):
    reward: float
