"""The task that both sides train on, the same for both by construction.

Invariant: importable without torch; ``reward`` is the one definition of the score, over token ids of the byte
tokenizer, and both sides start from the same policy, batch, learning rate and prompts' length.

A prompt is 16 bytes; the answer has exactly 32 tokens (no token ends it on either side); its reward is the share of
its tokens that are lower-case letters, 26 of the 264 in the vocabulary. So random weights begin near 0.1, every group
differs within itself, and on an idle machine both sides reach 0.7 within half a minute.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.env.protocol import Observation, Step
from actors.policy import Qwen3Shape

SHAPE = Qwen3Shape(layers=4, tied_embeddings=False)
"""0.85 million parameters."""

GROUPS, GROUP_SIZE = 4, 8
COMPLETION_TOKENS = 32
LEARNING_RATE = 1e-3
ADAM_BETAS = (0.9, 0.99)
TARGET_REWARD = 0.7
_FIRST, _LAST = ord("a"), ord("z")


def prompt(task: int) -> str:
    """16 bytes."""
    return f"Write {task % 10_000:04d} abc: "[:16]


def reward(tokens: Sequence[int]) -> float:
    """Share of the answer's tokens that are lower-case letters, 0 to 1."""
    return sum(_FIRST <= token <= _LAST for token in tokens) / COMPLETION_TOKENS


class Letters:
    """Our side: one turn."""

    def reset(self, task: int) -> Observation:
        return Observation(prompt(task))

    def step(self, action: str) -> Step:
        share = reward([ord(character) for character in action])
        return Step(Observation(""), reward=share, terminated=True, success=share >= TARGET_REWARD)
