"""Which replica trains on which trajectories."""

from __future__ import annotations

import numpy as np

from actors.trainer.backends.protocol import TrainBatch
from actors.trainer.backends.sharing import share
from tests.trainer.samples import SETS, sequence


def test_replicas_share_whole_trajectories_the_longest_first() -> None:
    """Tokens: a 12 (two segments), b 9, c 5, d 4. a goes to the first, b to the second, c there too (9 < 12), and d to
    the first (12 < 14): 16 and 14."""
    rng = np.random.default_rng(0)
    lengths = [("b", 9), ("a", 7), ("c", 5), ("a", 5), ("d", 4)]
    batch = TrainBatch([sequence(rng, ticket, length) for ticket, length in lengths], SETS)
    assert share(batch, 2) == [[1, 3, 4], [0, 2]]
    assert share(batch, 1) == [[0, 1, 2, 3, 4]]


def test_more_replicas_than_trajectories_leave_some_without() -> None:
    batch = TrainBatch([sequence(np.random.default_rng(0), "a", 8)], SETS)
    assert share(batch, 3) == [[0], [], []]
