"""Rewards to advantages.

Invariant: an advantage depends on the rewards of its own group (or, for REINFORCE++, batch) only; where all of them
score alike it is exactly 0, and no division is by less than epsilon. All in float64.

Sources: GRPO, DeepSeekMath (arXiv 2402.03300, eq. 3), without scaling Dr.GRPO (2503.20783); RLOO, Ahmadian et al.
(2402.14740); REINFORCE++, Hu et al. (2501.03262); GAE, Schulman et al. (1506.02438); overlong shaping,
DAPO (2503.14476).
"""

from __future__ import annotations

import numpy as np

from actors.trainer.algorithms.algorithm import Algorithm


def estimate(rewards: np.ndarray, lengths: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    """Advantages of trajectories, float64 [G, N], as the algorithm's estimator has them (GiGPO: without those of
    turns; GAE: the rewards, of which ``generalised`` makes advantages of tokens). ``rewards``: [G, N], of G groups of N
    trajectories of one task; ``lengths``: [G, N], their sampled tokens. Raises ``ValueError`` for rewards that are not
    finite and groups that are too small."""
    rewards = _checked(rewards, algorithm.least_members)
    if algorithm.overlong_share > 0:
        rewards = rewards + overlong(lengths, algorithm)
    match algorithm.estimator:
        case "grpo" | "gigpo":
            return advantages(rewards, scale=algorithm.scale_advantages, epsilon=algorithm.advantage_epsilon)
        case "rloo":
            return leave_one_out(rewards)
        case "reinforce_pp":
            return normalised(rewards, lengths, epsilon=algorithm.advantage_epsilon)
        case "reinforce_pp_baseline":
            centred = advantages(rewards, scale=False, epsilon=0.0)
            return normalised(centred, lengths, epsilon=algorithm.advantage_epsilon)
        case "distillation":
            return np.zeros(rewards.shape)
        case "gae":
            return rewards  # a critic makes them advantages of tokens
        case _:
            raise ValueError(f"the estimator {algorithm.estimator} does not come from rewards alone")


def advantages(rewards: np.ndarray, *, scale: bool, epsilon: float) -> np.ndarray:
    """Reward minus its group's mean, divided by (standard deviation + epsilon) where ``scale``; float64 [G, N].

    The deviation is the sample's (N - 1), as in TRL. Raises ``ValueError``.
    """
    rewards = _checked(rewards, 2)
    centred: np.ndarray = rewards - rewards.mean(axis=1, keepdims=True)
    centred[np.ptp(rewards, axis=1) == 0] = 0.0  # the mean of equal numbers is not always that number
    if scale:
        centred /= rewards.std(axis=1, ddof=1, keepdims=True) + epsilon
    return centred


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Reward minus the mean of the other members of the group; float64 [G, N]. Raises ``ValueError``."""
    rewards = _checked(rewards, 2)
    members = rewards.shape[1]
    result: np.ndarray = advantages(rewards, scale=False, epsilon=0.0) * (members / (members - 1))
    return result


def normalised(rewards: np.ndarray, lengths: np.ndarray, *, epsilon: float) -> np.ndarray:
    """Rewards minus the mean of the batch, over (the batch's deviation + epsilon), in both of which a trajectory counts
    once for each of its sampled tokens, each of which has the advantage; float64 [G, N]."""
    weights = np.asarray(lengths, dtype=np.float64)
    total = weights.sum()
    if not total or np.ptp(rewards) == 0:
        return np.zeros(rewards.shape)
    centred = rewards - (weights * rewards).sum() / total
    result: np.ndarray = centred / (np.sqrt((weights * centred**2).sum() / total) + epsilon)
    return result


def overlong(lengths: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    """What is added to the rewards of trajectories of so many sampled tokens: 0 up to (1 - ``overlong_share``) of the
    longest allowed, then falling linearly to -``overlong_penalty`` there and beyond. Raises ``ValueError``."""
    if algorithm.length < 1:
        raise ValueError(f"length: the penalty for overlong answers needs it, found {algorithm.length}")
    tolerated = algorithm.overlong_share * algorithm.length
    beyond = np.asarray(lengths, dtype=np.float64) - (algorithm.length - tolerated)
    result: np.ndarray = -algorithm.overlong_penalty * np.clip(beyond / tolerated, 0.0, 1.0)
    return result


def generalised(rewards: np.ndarray, values: np.ndarray, *, gamma: float, decay: float) -> np.ndarray:
    """Generalised advantage estimation over the T steps of one episode, which ends after the last of them; ``decay`` is
    lambda. ``rewards``, ``values``: [T]. Returns float64 [T]; added to ``values`` it is what a critic learns."""
    rewards, values = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if rewards.shape != values.shape or rewards.ndim != 1:
        raise ValueError(f"expected rewards and values of one length, found {rewards.shape} and {values.shape}")
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    result = np.zeros(len(deltas))
    following = 0.0
    for step in range(len(deltas) - 1, -1, -1):
        following = deltas[step] + gamma * decay * following
        result[step] = following
    return result


def _checked(rewards: np.ndarray, least: int) -> np.ndarray:
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 2 or rewards.shape[1] < least:
        raise ValueError(f"rewards: expected shape [groups, {least} or more members], found {rewards.shape}")
    if not np.isfinite(rewards).all():
        group, member = np.argwhere(~np.isfinite(rewards))[0]
        raise ValueError(
            f"rewards: group {group}, member {member} is {rewards[group, member]}, expected a finite number"
        )
    return rewards
