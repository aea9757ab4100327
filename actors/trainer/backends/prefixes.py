"""Token sequences as trees that hold each shared prefix once, laid out flat in a row.

Invariant: walking a sequence's path through the row reads exactly its tokens, in order, each at its own depth; two
sequences share a place exactly as far as their tokens agree from the first one on.

In lexicographic order a sequence shares the most with its neighbour before it, so the whole radix tree is there in the
order and the lengths of the common prefixes: a sequence's *run* is what it does not share with the one before, and
hangs on that one's path. No group ids are needed, and trees nest as the tokens do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np


class Path(msgspec.Struct, frozen=True):
    """One sequence in a row."""

    sequence: int  # its index among the given ones
    places: np.ndarray  # int64 [length]; where in the row each of its tokens lies
    shared: int  # how many of its first tokens are those of a sequence before it; the others are its run


class Row(msgspec.Struct, frozen=True):
    """Trees side by side: T tokens, each once."""

    tokens: np.ndarray  # int64 [T]
    depths: np.ndarray  # int64 [T]; the token's index in its sequences
    paths: list[Path]


class Forest:
    """The trees of a set of sequences. ``sequences`` are int arrays of at least one token each."""

    def __init__(self, sequences: Sequence[np.ndarray]) -> None:
        self._sequences = sequences
        # Big-endian bytes sort as the numbers do.
        self._order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">u4").tobytes())
        ordered = [sequences[i] for i in self._order]
        self._lengths = np.array([len(sequence) for sequence in ordered], dtype=np.int64)
        self._common = np.array([0, *(_common_prefix(a, b) for a, b in pairwise(ordered))], dtype=np.int64)[
            : len(ordered)
        ]
        self._runs = np.concatenate([[0], np.cumsum(self._lengths - self._common)])

    def tokens(self, first: int, end: int) -> int:
        """Tokens of the row that holds the sequences ``first`` to ``end`` of the order."""
        return int(self._runs[end] - self._runs[first] + self._common[first])

    def rows(self, budget: int) -> list[Row]:
        """Rows of at most ``budget`` tokens (a longer sequence gets one of its own). A tree that fits stays whole, a
        larger one is cut where it shares least, and its pieces repeat what lies above the cut."""
        rows: list[tuple[int, int]] = []
        for first, end in self._pieces(budget):
            if rows and self.tokens(rows[-1][0], end) <= budget:
                rows[-1] = (rows[-1][0], end)
            else:
                rows.append((first, end))
        return [self._lay_out(first, end) for first, end in rows]

    def _pieces(self, budget: int) -> list[tuple[int, int]]:
        """The largest subtrees that fit, in order."""
        pieces: list[tuple[int, int]] = []
        waiting = [(0, len(self._order))] if self._order else []
        while waiting:
            first, end = waiting.pop()
            # Different trees are different pieces even where they would fit together: rows() joins them.
            inner = self._common[first + 1 : end]
            if inner.size == 0 or (inner.min() > 0 and self.tokens(first, end) <= budget):
                pieces.append((first, end))
                continue
            cuts = [first, *(first + 1 + np.flatnonzero(inner == inner.min())).tolist(), end]
            waiting += reversed(list(pairwise(cuts)))
        return pieces

    def _lay_out(self, first: int, end: int) -> Row:
        tokens, depths, paths = [], [], []
        above, size = np.zeros(0, dtype=np.int64), 0
        for i in range(first, end):
            length = int(self._lengths[i])
            shared = 0 if i == first else int(self._common[i])
            run = np.arange(size, size + length - shared)
            above = np.concatenate([above[:shared], run])
            size += len(run)
            tokens.append(self._sequences[self._order[i]][shared:])
            depths.append(np.arange(shared, length))
            paths.append(Path(sequence=self._order[i], places=above, shared=shared))
        return Row(tokens=np.concatenate(tokens).astype(np.int64), depths=np.concatenate(depths), paths=paths)


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    shorter = min(len(a), len(b))
    different = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(different[0]) if different.size else shorter
