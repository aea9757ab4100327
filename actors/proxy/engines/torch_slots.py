"""Which KV slot belongs to whom.

Invariant: a slot is free, busy with one request, or kept for one trajectory between its turns; the first
``length`` tokens recorded for it are exactly those whose keys and values it holds.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush

import numpy as np


class SlotTable:
    """Slots 0..slots-1, each for at most ``max_len`` tokens. Knows token ids, not tensors."""

    def __init__(self, slots: int, max_len: int) -> None:
        self._tokens = np.zeros((slots, max_len), dtype=np.int32)
        self._length = np.zeros(slots, dtype=np.int64)
        self._free = list(range(slots))  # a heap: rows that start together lie together where they can
        self._kept: OrderedDict[str, int] = OrderedDict()  # least recently used first

    def acquire(self, trajectory: str, prompt: np.ndarray) -> tuple[int, int] | None:
        """A slot and how many tokens of the prompt it already holds (at most all but the last, whose logits are
        wanted), or None where every slot is busy. The least recently used kept slot gives way."""
        slot = self._kept.pop(trajectory, None)
        if slot is None:
            if self._free:
                slot = heappop(self._free)
            elif self._kept:
                slot = self._kept.popitem(last=False)[1]
            else:
                return None
            self._length[slot] = 0
        reusable = min(int(self._length[slot]), len(prompt) - 1)
        different = np.flatnonzero(self._tokens[slot, :reusable] != prompt[:reusable])
        self._length[slot] = int(different[0]) if len(different) else reusable
        return slot, int(self._length[slot])

    def extend(self, slot: int, tokens: np.ndarray) -> None:
        """The slot now holds these tokens too."""
        start = int(self._length[slot])
        end = start + len(tokens)
        self._tokens[slot, start:end] = tokens
        self._length[slot] = end

    def extend_each(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Each of these slots (int64 [B], none twice) now holds one token more (int32 [B])."""
        self._tokens[slots, self._length[slots]] = tokens
        self._length[slots] += 1

    def longest_prefix(self, tokens: np.ndarray) -> tuple[int, int]:
        """The slot that holds most of how ``tokens`` begin, whoever it belongs to, and how many of them."""
        same = self._tokens[:, : len(tokens)] == tokens
        same &= np.arange(len(tokens)) < self._length[:, None]
        counts = np.where(same.all(1), len(tokens), same.argmin(1))
        slot = int(counts.argmax())
        return slot, int(counts[slot])

    def copied(self, slot: int, tokens: np.ndarray) -> None:
        """The slot now holds these tokens, taken from another one, and nothing else."""
        self._length[slot] = 0
        self.extend(slot, tokens)

    def release(self, slot: int, trajectory: str) -> None:
        """The request has ended; its slot is kept for the trajectory's next turn."""
        former = self._kept.pop(trajectory, None)
        if former is not None:
            heappush(self._free, former)
        self._kept[trajectory] = slot

    def forget(self, trajectory: str) -> None:
        """Free what is kept for a trajectory; nothing where nothing is."""
        slot = self._kept.pop(trajectory, None)
        if slot is not None:
            heappush(self._free, slot)

    def invalidate(self) -> None:
        """No slot holds anything that is still true; busy ones stay with their requests, empty."""
        self._length[:] = 0
        for slot in self._kept.values():
            heappush(self._free, slot)
        self._kept.clear()
