"""From groups of trajectories to the arrays of one optimiser step.

Every segment of a trajectory carries the trajectory's advantage, or its tokens those of their turns (GiGPO), and which
algorithm trains it, by the stream it was drawn from; masks of allowed tokens are shared over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.settings import TrainSettings
from actors.trainer.algorithms.algorithm import Algorithm
from actors.trainer.algorithms.estimators import estimate
from actors.trainer.algorithms.gigpo import states_of, turn_advantages, turn_returns, turns_of
from actors.trainer.algorithms.presets import resolve
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
    algorithms, chosen = _algorithms(groups, settings)
    lengths = np.array([[trajectory.sampled_tokens for trajectory in group] for group in groups], np.int64)
    advantages = np.full(rewards.shape, np.nan)
    for number, algorithm in enumerate(algorithms):
        own = finite & (chosen == number)
        if own.any():
            advantages[own] = estimate(rewards[own], lengths[own], algorithm)
    sets: list[np.ndarray] = []
    index_of: dict[bytes, int] = {}
    sequences: list[TrainSequence] = []
    for group, row, number in zip(groups, advantages, chosen.tolist(), strict=True):
        by_token = _by_token(group, row, algorithms[number])
        for trajectory, advantage, own_tokens in zip(group, row, by_token, strict=True):
            local = np.array([_intern(ids, sets, index_of) for ids in trajectory.allowed_sets], np.int32)
            sequences += (
                _sequence(trajectory, segment, float(advantage), local, token_advantages=tokens, algorithm=number)
                for segment, tokens in zip(trajectory.segments, own_tokens, strict=True)
            )
    return TrainBatch(sequences, sets, algorithms=algorithms)


def _algorithms(groups: Sequence[Sequence[Trajectory]], settings: TrainSettings) -> tuple[list[Algorithm], np.ndarray]:
    """The algorithms of a batch, and which of them trains each group."""
    algorithms: list[Algorithm] = []
    chosen = []
    for group in groups:
        algorithm = resolve(settings, group[0].stream)
        if algorithm not in algorithms:
            algorithms.append(algorithm)
        chosen.append(algorithms.index(algorithm))
    return algorithms, np.array(chosen)


def _by_token(
    group: Sequence[Trajectory], advantages: np.ndarray, algorithm: Algorithm
) -> list[list[np.ndarray | None]]:
    """For each member of a group and each of its segments the advantages of tokens, float32 [T], where they differ."""
    if algorithm.estimator != "gigpo" or not np.isfinite(advantages).all():
        return [[None] * len(trajectory.segments) for trajectory in group]
    turns = [turns_of([segment.loss_mask for segment in trajectory.segments]) for trajectory in group]
    states = [states_of(trajectory.transcript) for trajectory in group]
    for trajectory, own, seen in zip(group, turns, states, strict=True):
        found = 1 + max(int(numbers.max(initial=-1)) for numbers in own)
        if found != len(seen):
            raise BadGroup(f"{trajectory.ticket}: tokens of {found} turns, the transcript has {len(seen)} actions")
    of_turns = turn_advantages(
        states,
        [turn_returns(each.reward, len(seen), algorithm.gamma) for each, seen in zip(group, states, strict=True)],
        scale=algorithm.scale_advantages,
        epsilon=algorithm.advantage_epsilon,
    )
    return [
        [_spread(whole + algorithm.step_weight * steps, numbers) for numbers in own]
        for whole, steps, own in zip(advantages, of_turns, turns, strict=True)
    ]


def _spread(of_turns: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return np.where(numbers >= 0, of_turns[numbers], 0.0).astype(np.float32)


def imitation_batch(trajectories: Sequence[Trajectory]) -> TrainBatch:
    """The same arrays for imitation: every trajectory counts, whatever its reward."""
    sets: list[np.ndarray] = []
    index_of: dict[bytes, int] = {}
    sequences: list[TrainSequence] = []
    for trajectory in trajectories:
        local = np.array([_intern(ids, sets, index_of) for ids in trajectory.allowed_sets], np.int32)
        sequences += (_sequence(trajectory, segment, 0.0, local) for segment in trajectory.segments)
    return TrainBatch(sequences, sets, "imitation")


def _sequence(
    trajectory: Trajectory,
    segment: Segment,
    advantage: float,
    local: np.ndarray,
    *,
    token_advantages: np.ndarray | None = None,
    algorithm: int = 0,
) -> TrainSequence:
    return TrainSequence(
        ticket=trajectory.ticket,
        tokens=segment.tokens,
        loss_mask=segment.loss_mask,
        logprobs=segment.logprobs,
        allowed=_translate(segment.allowed, local),
        advantage=advantage,
        temperature=trajectory.temperature,
        token_advantages=token_advantages,
        algorithm=algorithm,
        versions=segment.versions,
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
