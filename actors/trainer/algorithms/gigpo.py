"""Group-in-group policy optimisation: what a turn was worth, among turns of the group that began in the same state.

Invariant: turns are compared only with turns of the same group that began in the very same state; one that has nobody
to compare with has an advantage of exactly 0.

Source: Feng et al., arXiv 2505.10978. Of rewards a trajectory keeps one number, which counts as earned in
its last turn: turn t of T has the return gamma^(T-1-t) times it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np


def turn_returns(reward: float, turns: int, gamma: float) -> np.ndarray:
    """float64 [turns]."""
    result: np.ndarray = reward * gamma ** np.arange(turns - 1, -1, -1, dtype=np.float64)
    return result


def turn_advantages(
    states: Sequence[Sequence[Hashable]], returns: Sequence[np.ndarray], *, scale: bool, epsilon: float
) -> list[np.ndarray]:
    """For each member of one group, float64 [its turns]: a turn's return minus the mean of those that began in the same
    state, over (their sample deviation + epsilon) where ``scale``. ``states``: what members saw before their turns."""
    places: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for member, seen in enumerate(states):
        if len(seen) != len(returns[member]):
            raise ValueError(f"member {member}: {len(seen)} states, {len(returns[member])} turns")
        for turn, state in enumerate(seen):
            places[state].append((member, turn))
    result = [np.zeros(len(seen)) for seen in states]
    for alike in places.values():
        found = np.array([returns[member][turn] for member, turn in alike])
        if len(alike) < 2 or np.ptp(found) == 0:
            continue
        centred = found - found.mean()
        if scale:
            centred = centred / (found.std(ddof=1) + epsilon)
        for (member, turn), advantage in zip(alike, centred, strict=True):
            result[member][turn] = advantage
    return result


def states_of(transcript: Sequence[tuple[str, str]]) -> list[str]:
    """What was observed last before each action."""
    states, seen = [], ""
    for kind, text in transcript:
        if kind == "action":
            states.append(seen)
        else:
            seen = text
    return states


def turns_of(masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For each segment of a trajectory, int64 [T]: the turn that sampled a token, -1 for others. A turn is a run of
    sampled tokens; they are counted on from segment to segment."""
    result, before = [], 0
    for mask in masks:
        sampled = np.asarray(mask) == 1
        begins = sampled & ~np.concatenate([[False], sampled[:-1]])
        numbers = np.cumsum(begins) - 1 + before
        result.append(np.where(sampled, numbers, -1))
        before += int(begins.sum())
    return result
