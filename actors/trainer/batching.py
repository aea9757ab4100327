"""From groups of trajectories to the arrays of one optimiser step.

Every segment of a trajectory carries the trajectory's advantage; masks of allowed tokens are shared over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.settings import TrainSettings
from actors.trainer.algorithms.grpo import advantages as group_advantages
from actors.trainer.backends.protocol import TrainBatch, TrainSequence
from actors.trajectory import FULL_VOCABULARY, Segment, Trajectory


class BadGroup(ValueError):
    """A group that cannot be trained on; the message names it."""


def make_batch(groups: Sequence[Sequence[Trajectory]], settings: TrainSettings, *, strict: bool = True) -> TrainBatch:
    """Advantages within each group, segments flattened, allowed sets interned. Groups are of one size. Raises
    ``BadGroup``, also for rewards that are not finite unless, to look at them, not ``strict``: the advantages of such a
    group are NaN."""
    sizes = {len(group) for group in groups}
    if len(sizes) != 1:
        raise BadGroup(f"expected groups of one size, found sizes {sorted(sizes)}")
    rewards = np.array([[trajectory.reward for trajectory in group] for group in groups], np.float64)
    finite = np.isfinite(rewards).all(axis=1)
    if strict and not finite.all():
        named = [t.ticket for group in groups for t in group if not np.isfinite(t.reward)]
        raise BadGroup(f"rewards that are not finite: {', '.join(named)}")
    advantages = np.full(rewards.shape, np.nan)
    if finite.any():
        advantages[finite] = group_advantages(
            rewards[finite], scale=settings.scale_advantages, epsilon=settings.advantage_epsilon
        )
    sets: list[np.ndarray] = []
    index_of: dict[bytes, int] = {}
    sequences: list[TrainSequence] = []
    for group, row in zip(groups, advantages, strict=True):
        for trajectory, advantage in zip(group, row, strict=True):
            local = np.array([_intern(ids, sets, index_of) for ids in trajectory.allowed_sets], np.int32)
            sequences += (_sequence(trajectory, segment, float(advantage), local) for segment in trajectory.segments)
    return TrainBatch(sequences, sets)


def imitation_batch(trajectories: Sequence[Trajectory]) -> TrainBatch:
    """The same arrays for imitation: every trajectory counts, whatever its reward."""
    sets: list[np.ndarray] = []
    index_of: dict[bytes, int] = {}
    sequences: list[TrainSequence] = []
    for trajectory in trajectories:
        local = np.array([_intern(ids, sets, index_of) for ids in trajectory.allowed_sets], np.int32)
        sequences += (_sequence(trajectory, segment, 0.0, local) for segment in trajectory.segments)
    return TrainBatch(sequences, sets, "imitation")


def _sequence(trajectory: Trajectory, segment: Segment, advantage: float, local: np.ndarray) -> TrainSequence:
    return TrainSequence(
        ticket=trajectory.ticket,
        tokens=segment.tokens,
        loss_mask=segment.loss_mask,
        logprobs=segment.logprobs,
        allowed=_translate(segment.allowed, local),
        advantage=advantage,
        temperature=trajectory.temperature,
    )


def _intern(ids: np.ndarray, sets: list[np.ndarray], index_of: dict[bytes, int]) -> int:
    key = ids.tobytes()
    if key not in index_of:
        index_of[key] = len(sets)
        sets.append(ids)
    return index_of[key]


def _translate(allowed: np.ndarray, local: np.ndarray) -> np.ndarray:
    """Indices into the trajectory's own sets become indices into the batch's."""
    if local.size == 0:
        return allowed
    return np.where(allowed == FULL_VOCABULARY, FULL_VOCABULARY, local[np.maximum(allowed, 0)]).astype(np.int32)
