"""What the trajectories of each task are like, learned from their requests as they come and go.

Invariant: a fold over what happened, in order; means are over the last ``MEMORY`` events, and plain means while there
are fewer. What never happened has no figure: a task that nobody has asked for is not in the table.

Whoever routes requests knows all of it: how long a prompt is, how much of it was there the turn before, what was
sampled, how long the environment took in between, and when a trajectory ends. News of an answer may come later than
the next turn's request, or than the trajectory's end, because it travels another way; the request is then kept until
the answer is known, and so is the trajectory, if it is among the last ``ENDING`` of its kind.

Who asks may say which turn it is. A trajectory that is met in the middle (another proxy had its earlier turns) began
elsewhere: it is no start, and what is new in its prompt is known from its next turn on.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hwprobe.flow import TaskShape

MEMORY = 40
STARTS = 100
"""Trajectories, of all tasks, over which it is counted how often each is posed."""
SEEN = 8
"""Answers from which on a task's figures are used."""
ENDING = 10_000
"""Trajectories that have ended, whose last answers are waited for."""


class TaskFit(msgspec.Struct, frozen=True, kw_only=True):
    """Means of one task, and over how many events."""

    starts: float = 0.0  # trajectories that began, lately
    prompt: float = 0.0  # tokens of a first turn
    prompts: int = 0
    observation: float = 0.0  # new tokens of a later turn
    observations: int = 0
    response: float = 0.0  # tokens sampled a turn
    responses: int = 0
    turns: float = 0.0  # of a trajectory that ended
    ended: int = 0
    step_s: float = 0.0  # between an answer and the next turn
    steps: int = 0

    @property
    def known(self) -> bool:
        return self.responses >= SEEN and self.prompts > 0

    @property
    def events(self) -> int:
        """What the means are made of."""
        return self.prompts + self.observations + self.responses + self.ended

    def shape(self) -> TaskShape:
        """As the network takes it; before a first trajectory has ended, from the turns so far."""
        turns = max(1.0, self.turns if self.ended else 1.0 + self.observations / max(1, self.prompts))
        return TaskShape(
            weight=max(self.starts, 1e-3),
            turns=turns,
            prompt=max(1.0, self.prompt),
            observation=self.observation,
            response=max(1.0, self.response),
            step_s=self.step_s * (turns - 1) / turns,  # there is none after the last turn
        )


class _Playing:
    """One trajectory."""

    __slots__ = ("ahead", "answered_at", "asked", "length", "task", "turns", "waits")

    def __init__(self, task: str, turns: int) -> None:
        self.task = task
        self.turns = turns
        # Tokens that were there after the last answer; None: nobody here has seen it.
        self.length: float | None = None if turns else 0.0
        self.asked = 0.0  # tokens of the prompt that is out
        self.waits = False  # for the answer to it
        self.answered_at = 0.0
        self.ahead: float | None = None  # tokens of a prompt that has come before the answer to the one before


class Demand:
    """See the module docstring. Times are handed in."""

    def __init__(self, tasks: dict[str, TaskFit] | None = None) -> None:
        self.tasks: dict[str, TaskFit] = dict(tasks or {})
        self._playing: dict[str, _Playing] = {}
        self._ending: dict[str, _Playing] = {}  # those that only wait for an answer, oldest first

    def __len__(self) -> int:
        """Trajectories under way."""
        return len(self._playing)

    def inherit(self, tasks: Mapping[str, TaskFit]) -> None:
        """Go on from these means, where they are made of more than the ones here."""
        for name, fit in tasks.items():
            if fit.events >= self.tasks.get(name, TaskFit()).events:
                self.tasks[name] = fit

    def asked(self, task: str, trajectory: str, prompt: float, now: float, turn: int | None = None) -> None:
        """A turn is to be sampled: the trajectory's ``turn``-th, from 0, where that is known."""
        playing = self._playing.get(trajectory)
        if playing is None:
            self._ending.pop(trajectory, None)  # that one was another
            playing = self._playing[trajectory] = _Playing(task, turn or 0)
            if turn:
                self.tasks.setdefault(task, TaskFit())
            else:
                self._began(task)
        if playing.waits:
            playing.ahead = prompt
        else:
            self._turn(playing, prompt, now - playing.answered_at)

    def _turn(self, playing: _Playing, prompt: float, waited_s: float) -> None:
        fit = self.tasks[playing.task]
        if playing.turns == 0:
            fit = _with(fit, "prompt", "prompts", prompt)
        elif playing.length is not None:
            fresh = max(0.0, prompt - playing.length)
            fit = _with(_with(fit, "observation", "observations", fresh), "step_s", "steps", waited_s)
        self.tasks[playing.task] = fit
        playing.asked, playing.waits = prompt, True
        playing.turns += 1

    def answered(self, trajectory: str, sampled: float, now: float) -> None:
        """So many tokens were sampled. Nothing of a trajectory that is not known."""
        playing = self._waiting(trajectory)
        if playing is None:
            return
        playing.length, playing.answered_at, playing.waits = playing.asked + sampled, now, False
        self.tasks[playing.task] = _with(self.tasks[playing.task], "response", "responses", sampled)
        self._go_on(trajectory, playing)

    def unanswered(self, trajectory: str) -> None:
        """A request has ended without a token: it was no turn."""
        playing = self._waiting(trajectory)
        if playing is None:
            return
        playing.turns -= 1
        playing.waits = False
        self._go_on(trajectory, playing)

    def ended(self, trajectory: str, *, whole: bool = True) -> None:
        """``whole``: it was played to its end. Of others it is not known how many turns they would have had."""
        playing = self._playing.pop(trajectory, None)
        if playing is None or not whole:
            return
        if not playing.waits:
            self._count(playing)
            return
        self._ending[trajectory] = playing
        if len(self._ending) > ENDING:
            del self._ending[next(iter(self._ending))]

    def _waiting(self, trajectory: str) -> _Playing | None:
        playing = self._playing.get(trajectory) or self._ending.get(trajectory)
        return playing if playing is not None and playing.waits else None

    def _go_on(self, trajectory: str, playing: _Playing) -> None:
        """With the request that has come meanwhile; without one, a trajectory that has ended is over."""
        ahead, playing.ahead = playing.ahead, None
        if ahead is not None:
            self._turn(playing, ahead, 0.0)
        elif self._ending.pop(trajectory, None) is not None:
            self._count(playing)

    def _count(self, playing: _Playing) -> None:
        """The turns of one that is over."""
        if playing.turns:
            self.tasks[playing.task] = _with(self.tasks[playing.task], "turns", "ended", playing.turns)

    def _began(self, task: str) -> None:
        keep, replace = 1 - 1 / STARTS, msgspec.structs.replace
        faded = {name: replace(fit, starts=keep * fit.starts) for name, fit in self.tasks.items()}
        known = faded.get(task, TaskFit())
        self.tasks = {**faded, task: replace(known, starts=known.starts + 1.0)}


def _with(fit: TaskFit, mean: str, count: str, value: float) -> TaskFit:
    """One more of what a mean is over."""
    events = getattr(fit, count) + 1
    before = getattr(fit, mean)
    after = before + (value - before) / min(events, MEMORY)
    return msgspec.structs.replace(fit, **{mean: after, count: events})
