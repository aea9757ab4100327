"""An environment and a reward function of your own: copy this file and my_env.yaml, and change both."""

from actors.env.protocol import Observation, Step
from actors.trajectory import Trajectory


class GuessTheNumber:
    """Find a secret number; each wrong guess is answered with "higher" or "lower"."""

    system_prompt = "I think of a number. Guess it. Answer with the number alone."

    def __init__(self, largest: int = 9) -> None:
        self.largest = largest

    def reset(self, task: int) -> Observation:
        self.secret = 1 + task % self.largest
        return Observation(f"Guess a number from 1 to {self.largest}.")

    def step(self, action: str) -> Step:
        guess = int(action) if action.strip().isdecimal() else 0
        if guess == self.secret:
            return Step(Observation("Right!"), reward=1.0, terminated=True, success=True)
        return Step(Observation("Higher." if guess < self.secret else "Lower."))


def fewer_guesses_are_better(trajectory: Trajectory) -> float:
    """Scores a finished episode; without it the environment's own rewards count."""
    return trajectory.env_return / trajectory.turns
