"""A batch of segments as micro-batches, holding of each segment only what its loss depends on.

Invariant: every sampled token of the batch is in exactly one micro-batch, together with all others of its segment, and
with the weight that it has in the whole batch's loss; so gradients summed over micro-batches do not depend on how the
batch was cut, also where a loss looks at a whole segment.

A segment is cut behind the token before its last sampled one (nothing later is predicted). Then either segments of
like length share a micro-batch, padded on the right, where causal attention never looks; or, for a backend that can
compute on trees, a micro-batch is one row in which each shared prefix lies once. Sampled tokens that share a place
there keep a loss term each.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import torch

from actors.trainer.backends.prefixes import Forest, Row
from actors.trainer.backends.protocol import TrainBatch, TrainSequence
from actors.trajectory import FULL_VOCABULARY

WORTHWHILE = 0.9
"""Trees are laid out where they need at most this share of the padded tokens: their attention costs some gathering."""


class Choice(msgspec.Struct, frozen=True):
    """The sampled tokens of a micro-batch that were drawn from one set of allowed tokens."""

    rows: torch.Tensor  # int64 [R], positions in the micro-batch's M sampled tokens
    token_ids: torch.Tensor | None  # int64 [A], ascending; None is the whole vocabulary
    targets: torch.Tensor  # int64 [R]; index of the sampled token in token_ids, or the token itself


class MicroBatch(msgspec.Struct, frozen=True):
    """B rows of at most T tokens, or one row of trees, and the M sampled tokens that they predict."""

    tokens: torch.Tensor  # int64 [B, T], padded with 0
    positions: torch.Tensor  # int64 [M], index into the flattened [B * T] of the position that predicts the token
    row: Row | None  # the trees, where ``tokens`` is one row of them
    choices: list[Choice]
    temperature: torch.Tensor  # float32 [M]
    behaviour: torch.Tensor  # float32 [M]
    advantage: torch.Tensor  # float32 [M]
    weight: torch.Tensor  # float32 [M]
    segment: torch.Tensor  # int64 [M], which of the micro-batch's segments the token is of
    segments: int
    sequence: np.ndarray  # int64 [M], index of the token's segment in the batch
    place: np.ndarray  # int64 [M], the token's index in its segment


class BatchError(ValueError):
    """A batch that contradicts itself; names the trajectory."""


def check(batch: TrainBatch, vocabulary: int) -> None:
    """Refuse a batch that cannot be what engines sampled, on every rank alike, before any of them waits for another.
    Raises ``BatchError`` naming the ticket."""
    if not any(sequence.loss_mask.any() for sequence in batch.sequences):
        raise BatchError(f"a batch of {len(batch.sequences)} segments has no sampled token to train on")
    for i, allowed in enumerate(batch.allowed_sets):
        if not (allowed.size and allowed[0] >= 0 and allowed[-1] < vocabulary and (np.diff(allowed) > 0).all()):
            raise BatchError(f"allowed set {i}: expected ascending token ids below {vocabulary}, found {allowed}")
    for sequence in batch.sequences:
        _check_sequence(sequence, batch.allowed_sets, vocabulary)
        if not 0 <= sequence.algorithm < max(len(batch.algorithms), 1):
            raise BatchError(f"{sequence.ticket}: algorithm {sequence.algorithm} of {len(batch.algorithms)}")


def _check_sequence(sequence: TrainSequence, allowed_sets: list[np.ndarray], vocabulary: int) -> None:
    length = len(sequence.tokens)
    arrays = {"loss_mask": sequence.loss_mask, "logprobs": sequence.logprobs, "allowed": sequence.allowed}
    if sequence.token_advantages is not None:
        arrays["token_advantages"] = sequence.token_advantages
    for name, array in arrays.items():
        if array.shape != (length,):
            raise BatchError(f"{sequence.ticket}: {name} has shape {array.shape}, expected ({length},) as tokens")
    if length and sequence.loss_mask[0]:
        raise BatchError(f"{sequence.ticket}: the first token cannot be a sampled one, nothing precedes it")
    if not sequence.temperature > 0:
        raise BatchError(f"{sequence.ticket}: temperature is {sequence.temperature}, expected above 0")
    if length and not (sequence.tokens.min() >= 0 and sequence.tokens.max() < vocabulary):
        raise BatchError(f"{sequence.ticket}: token ids reach {sequence.tokens.max()}, the vocabulary has {vocabulary}")
    used = sequence.allowed[sequence.loss_mask == 1]
    if used.size and not (used.min() >= FULL_VOCABULARY and used.max() < len(allowed_sets)):
        raise BatchError(f"{sequence.ticket}: allowed set {used.max()} of {len(allowed_sets)}")
    sampled = sequence.tokens[sequence.loss_mask == 1]
    for index in np.unique(used):
        if index != FULL_VOCABULARY:
            _check_allowed(sequence.ticket, allowed_sets[index], sampled[used == index])


def _check_allowed(ticket: str, allowed: np.ndarray, sampled: np.ndarray) -> None:
    places = np.minimum(np.searchsorted(allowed, sampled), len(allowed) - 1)
    wrong = sampled[allowed[places] != sampled]
    if wrong.size:
        raise BatchError(f"{ticket}: token {wrong[0]} was sampled, but is not in its allowed set")


def deduplicate(allowed_sets: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Equal sets once, and for each given set its index among them."""
    distinct: dict[bytes, int] = {}
    keep: list[np.ndarray] = []
    index = np.zeros(len(allowed_sets), dtype=np.int64)
    for i, allowed in enumerate(allowed_sets):
        ids = np.ascontiguousarray(allowed, dtype=np.int64)
        index[i] = distinct.setdefault(ids.tobytes(), len(keep))
        if index[i] == len(keep):
            keep.append(ids)
    return keep, index


def rows_by_length(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Indices in groups of like length: longest first, each group's padded size within ``budget`` tokens (a single
    longer one gets a group of its own)."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    group: list[int] = []
    for i in order:
        if group and (len(group) + 1) * lengths[group[0]] > budget:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


class Packer:
    """Cuts one batch into micro-batches on ``device``.

    ``weights`` float64 [segments] is what ``token_weights`` returned for the whole batch. ``trees``: whether shared
    prefixes may be computed once; they are where that saves enough.
    """

    def __init__(self, batch: TrainBatch, weights: np.ndarray, device: torch.device, *, trees: bool = False) -> None:
        self._sequences = batch.sequences
        self._weights = weights
        self._device = device
        self._trees = trees
        self._allowed_sets, self._renumbered = deduplicate(batch.allowed_sets)
        self._sampled = [np.flatnonzero(sequence.loss_mask) for sequence in batch.sequences]

    def micro_batches(self, indices: list[int], budget: int) -> Iterator[MicroBatch]:
        """The sampled tokens of the segments ``indices``, at most ``budget`` computed tokens at a time, padding
        included."""
        kept = [i for i in indices if self._sampled[i].size]
        lengths = [int(self._sampled[i][-1]) for i in kept]
        groups = list(rows_by_length(lengths, budget))
        if self._trees and kept:
            rows = Forest([self._sequences[i].tokens[:n] for i, n in zip(kept, lengths, strict=True)]).rows(budget)
            padded = sum(len(group) * lengths[group[0]] for group in groups)
            if sum(len(row.tokens) for row in rows) <= WORTHWHILE * padded:
                yield from (self._pack_row(row, kept) for row in rows)
                return
        yield from (self._pack_padded([kept[g] for g in group]) for group in groups)

    def _pack_padded(self, group: list[int]) -> MicroBatch:
        lengths = [int(self._sampled[i][-1]) for i in group]
        width = max(lengths)
        tokens = np.zeros((len(group), width), dtype=np.int64)
        for row, (i, length) in enumerate(zip(group, lengths, strict=True)):
            tokens[row, :length] = self._sequences[i].tokens[:length]
        positions = [row * width + self._sampled[i] - 1 for row, i in enumerate(group)]
        return self._pack(group, tokens, positions, None)

    def _pack_row(self, row: Row, kept: list[int]) -> MicroBatch:
        group = [kept[path.sequence] for path in row.paths]
        positions = [path.places[self._sampled[i] - 1] for path, i in zip(row.paths, group, strict=True)]
        return self._pack(group, row.tokens[None], positions, row)

    def _pack(self, group: list[int], tokens: np.ndarray, positions: list[np.ndarray], row: Row | None) -> MicroBatch:
        counts = [self._sampled[i].size for i in group]
        place = np.concatenate([self._sampled[i] for i in group])
        sequence = np.repeat(np.asarray(group), counts)

        def per_sequence(values: list[float]) -> torch.Tensor:
            return self._tensor(np.repeat(np.asarray(values, dtype=np.float32), counts))

        return MicroBatch(
            tokens=self._tensor(tokens),
            positions=self._tensor(np.concatenate(positions)),
            row=row,
            choices=self._choices(group),
            temperature=per_sequence([self._sequences[i].temperature for i in group]),
            behaviour=self._tensor(self._of_sampled(group, "logprobs").astype(np.float32)),
            advantage=self._tensor(np.concatenate([self._advantages(i) for i in group])),
            weight=per_sequence([float(self._weights[i]) for i in group]),
            segment=self._tensor(np.repeat(np.arange(len(group)), counts)),
            segments=len(group),
            sequence=sequence,
            place=place,
        )

    def _advantages(self, i: int) -> np.ndarray:
        """float32, of the sampled tokens of a segment."""
        sequence, sampled = self._sequences[i], self._sampled[i]
        if sequence.token_advantages is None:
            return np.full(sampled.size, sequence.advantage, np.float32)
        return sequence.token_advantages[sampled].astype(np.float32)

    def _choices(self, group: list[int]) -> list[Choice]:
        """One for each allowed set that occurs in the group."""
        targets = self._of_sampled(group, "tokens").astype(np.int64)
        allowed = self._of_sampled(group, "allowed").astype(np.int64)
        masked = allowed != FULL_VOCABULARY
        if masked.any():
            allowed[masked] = self._renumbered[allowed[masked]]
        choices = []
        for index in np.unique(allowed):
            rows = np.flatnonzero(allowed == index)
            ids, chosen = None, targets[rows]
            if index != FULL_VOCABULARY:
                ids = self._allowed_sets[index]
                chosen = np.searchsorted(ids, targets[rows])
            choices.append(
                Choice(
                    rows=self._tensor(rows),
                    token_ids=None if ids is None else self._tensor(ids),
                    targets=self._tensor(chosen),
                )
            )
        return choices

    def _of_sampled(self, group: list[int], field: str) -> np.ndarray:
        return np.concatenate([getattr(self._sequences[i], field)[self._sampled[i]] for i in group])

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
