"""What one episode leaves behind: append-only token segments, exactly as sampled.

Invariant: within a segment tokens are only ever appended, and a position with ``loss_mask == 1`` holds the very
token id that an engine sampled, with the log-probability of the distribution it was sampled from (after temperature
and after the mask of allowed tokens) and the version of the weights that produced it. Nothing is re-tokenised.
"""

from __future__ import annotations

import msgspec
import numpy as np

FULL_VOCABULARY = -1
"""Value of ``Segment.allowed`` where no mask of allowed tokens was applied (prompt tokens carry it too)."""

PROMPT_VERSION = -1
"""Value of ``Segment.versions`` for tokens that no engine sampled."""


class Segment(msgspec.Struct, frozen=True):
    """One context window's worth of tokens; all arrays have the same length T."""

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]; 1 where the token was sampled in this segment, and so is trained on
    logprobs: np.ndarray  # float32 [T]; nats, of the behaviour distribution; 0 where loss_mask is 0
    versions: np.ndarray  # int32 [T]; version that sampled the token, PROMPT_VERSION elsewhere
    allowed: np.ndarray  # int32 [T]; index into Trajectory.allowed_sets, FULL_VOCABULARY where unmasked


class Trajectory(msgspec.Struct, frozen=True):
    """One finished episode of one environment instance."""

    ticket: str  # the ledger's key, unique in a run
    group: int  # trajectories of one task share a group
    task: int  # index of the task that the environment was reset with
    initiating_version: int  # version served at the first sampled token
    temperature: float  # of sampling; the trainer divides logits by the same number
    segments: list[Segment]
    allowed_sets: list[np.ndarray]  # each int32, ascending token ids; Segment.allowed points here
    turns: int
    env_return: float  # undiscounted sum of the environment's own rewards
    reward: float  # what the reward function made of it; trained on
    success: bool
    transcript: list[tuple[str, str]]  # ("observation" | "action", text), for people to read
    stream: str = ""  # of tasks, that it was drawn from; "": the job names none

    @property
    def sampled_tokens(self) -> int:
        """Number of trained-on tokens."""
        return sum(int(segment.loss_mask.sum()) for segment in self.segments)
