"""Numbers that depend on a request's seed and a position in it, and on nothing else.

Invariant: equal seed and position give equal numbers in every process; no generator's state is kept per request.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint64 for each (seed, position): SplitMix64 (Steele, Lea, Flood 2014) used as a counter-based generator."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        state = _finalise(seeds.astype(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return _finalise(state)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) for each (seed, position), multiples of 2**-48."""
    return np.asarray((mix(seeds, positions) >> np.uint64(16)) * 2.0**-48)


def derive(seed: int, position: int) -> int:
    """``mix`` of one pair, in 0..2**63-1."""
    return int(mix(np.array([seed % 2**64], dtype=np.uint64), np.array([position]))[0] >> np.uint64(1))


def _finalise(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
