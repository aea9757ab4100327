"""Trajectories, some by hand and some at random, recorded as an env host records them."""

from __future__ import annotations

import numpy as np

from actors.env.recorder import TrajectoryRecorder
from actors.trajectory import Trajectory


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def trajectory(ticket: str, *, reward: float = 0.0, allowed: tuple[int, ...] | None = (4, 5)) -> Trajectory:
    """One turn: prompt [10, 11], sampled [5]."""
    recorder = TrajectoryRecorder(ticket, group=0, task=0, temperature=0.5)
    recorder.start(ids(10, 11), "map")
    recorder.sampled(ids(5), np.array([-0.5], np.float32), ids(3), allowed, "R")
    return recorder.finish(env_return=reward, reward=reward, success=False)


class Sampled:
    """A random trajectory and, kept apart, what was sampled for it: (token, log-probability, version, allowed)."""

    def __init__(self, ticket: str, chance: np.random.Generator) -> None:
        self.tokens: list[list[tuple[int, float, int, tuple[int, ...] | None]]] = []
        recorder = TrajectoryRecorder(ticket, 0, 0, temperature=0.7, capacity=int(chance.integers(1, 40)))
        version = int(chance.integers(0, 50))
        for _ in range(int(chance.integers(1, 4))):  # segments
            recorder.start(chance.integers(0, 300, chance.integers(1, 30), dtype=np.int32), "opening")
            self.tokens.append([])
            for _ in range(int(chance.integers(1, 8))):  # turns
                count = int(chance.integers(1, 6))
                allowed = (
                    tuple(sorted(chance.choice(300, 4, replace=False).tolist())) if chance.random() < 0.5 else None
                )
                pool = np.array(allowed if allowed is not None else range(300), np.int32)
                tokens = chance.choice(pool, count)
                logprobs = -chance.random(count, np.float32)
                versions = version + np.sort(chance.integers(0, 2, count))
                version = int(versions[-1])
                recorder.sampled(tokens, logprobs, versions.astype(np.int32), allowed, "action")
                self.tokens[-1] += [
                    (int(token), float(logprob), int(number), allowed)
                    for token, logprob, number in zip(tokens, logprobs, versions, strict=True)
                ]
                recorder.observed(chance.integers(0, 300, chance.integers(0, 10), dtype=np.int32), "answer")
        self.trajectory = recorder.finish(env_return=0.0, reward=float(chance.random()), success=False)
