"""Who of several replicas of the model trains on which trajectories of a batch.

Invariant: every segment has exactly one replica, all segments of a trajectory the same one, and every rank that asks
gets the same answer. Weights of tokens are of the whole batch (``algorithms.aggregation``), so that the replicas'
gradients need only be added, whoever has what.
"""

from __future__ import annotations

import heapq

from actors.trainer.backends.protocol import TrainBatch


def share(batch: TrainBatch, replicas: int) -> list[list[int]]:
    """Segments of each replica, ascending. The longest trajectory goes first, to who has the fewest tokens: no replica
    is more than one trajectory ahead of another."""
    tokens: dict[str, int] = {}
    for sequence in batch.sequences:
        tokens[sequence.ticket] = tokens.get(sequence.ticket, 0) + len(sequence.tokens)
    heap = [(0, replica) for replica in range(replicas)]
    replica_of: dict[str, int] = {}
    for ticket in sorted(tokens, key=lambda ticket: -tokens[ticket]):
        load, replica = heap[0]
        replica_of[ticket] = replica
        heapq.heapreplace(heap, (load + tokens[ticket], replica))
    shares: list[list[int]] = [[] for _ in range(replicas)]
    for i, sequence in enumerate(batch.sequences):
        shares[replica_of[sequence.ticket]].append(i)
    return shares
