"""Questions of the package reasoning-gym, answered at once or with the help of a calculator.

Invariant: questions, right answers and scores are the dataset's own; this module only asks, passes the reply on, and
keeps held-out questions apart from those that are trained on (``actors.env.splits``).
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from actors.env.calculator import CannotCompute, compute
from actors.env.protocol import Observation, Step
from actors.env.splits import draws, on_the_right_side

LARGEST_SEED = 2**31
RIGHT = 1.0
"""The score of a right answer; reasoning-gym scores range from 0 to this."""


class Dataset(Protocol):
    """What is used of ``reasoning_gym.data.ProceduralDataset``."""

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def answer_in(reply: str) -> str:
    """The last number of a reply, which small models wrap in words ("The answer is 75."); the whole reply where it
    has none."""
    numbers: list[str] = _NUMBER.findall(reply)
    return numbers[-1] if numbers else reply.strip()


class Question:
    """One question, one reply; the reward is the dataset's score of the number that the reply ends with."""

    system_prompt = "Do the sum. Reply with: The answer is"

    def __init__(self, dataset: str = "chain_sum", config: dict[str, Any] | None = None, system: str = "") -> None:
        """``dataset`` and ``config`` as ``reasoning_gym.create_dataset`` takes them; ``system`` replaces the system
        prompt. Raises ``ValueError`` for a dataset that cannot be made."""
        self._dataset = _create(dataset, config or {})
        self._entry: dict[str, Any] = {}
        if system:
            self.system_prompt = system

    def reset(self, task: int) -> Observation:
        """The question of ``task``."""
        for seed in draws(task):
            entry = self._dataset[seed]
            if on_the_right_side(task, entry["question"]):
                break
        self._entry = entry
        return Observation(entry["question"])

    def step(self, action: str) -> Step:
        """Score the reply."""
        return self._answered(action)

    def _answered(self, reply: str, **metrics: float) -> Step:
        score = float(self._dataset.score_answer(answer_in(reply), self._entry))
        right = score >= RIGHT
        return Step(
            Observation("Right." if right else f"Wrong: {self._entry['answer']}."),
            reward=score,
            terminated=True,
            success=right,
            metrics=metrics,
        )


_CALL = re.compile(r"calc:\s*([^\n=]*)")


class WithCalculator(Question):
    """The same questions, with a tool that may be called before answering; only the answer is rewarded.

    Metrics of an episode: ``tool_calls``, of which ``tool_errors`` could not be computed.
    """

    system_prompt = (
        "Use the calculator first. Example:\n"
        "user: 12 + 30 - 4 =\nassistant: calc: 12 + 30 - 4\nuser: 38\nassistant: The answer is 38."
    )

    def __init__(
        self, dataset: str = "chain_sum", config: dict[str, Any] | None = None, system: str = "", calls: int = 1
    ) -> None:
        """``calls``: how often the calculator answers in one episode."""
        super().__init__(dataset, config, system)
        self._calls = calls
        self._left = 0

    def reset(self, task: int) -> Observation:
        """The question of ``task``."""
        self._left = self._calls
        return super().reset(task)

    def step(self, action: str) -> Step:
        """Compute what stands behind "calc:", or take the reply as the answer where nothing (more) does."""
        call = _CALL.search(action)
        if call is None or not self._left:
            return self._answered(action, tool_calls=0.0)
        self._left -= 1
        try:
            result = compute(call.group(1))
        except CannotCompute as error:
            return Step(Observation(f"Error: {error}."), metrics={"tool_calls": 1.0, "tool_errors": 1.0})
        return Step(Observation(result), metrics={"tool_calls": 1.0})


def _create(name: str, config: dict[str, Any]) -> Dataset:
    try:
        import reasoning_gym  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ValueError(f"the package {error.name} is not installed: bin/setup --with reasoning installs it") from None
    try:
        dataset: Dataset = reasoning_gym.create_dataset(name, **{"seed": 0, "size": LARGEST_SEED, **config})
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())}") from None
    return dataset
