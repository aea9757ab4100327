"""Sampling a batch of rows, each with its own temperature, allowed tokens and seed.

Invariant: the log-probability returned for a token is that of the distribution that it was drawn from (after
temperature and mask, float32 nats; for a greedy row that of temperature 1), and a row's draw depends on nothing but
its logits, its seed and its position. Alternatives are the most probable tokens of that same distribution.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from actors.proxy.engines.sampled import Ranked
from actors.proxy.engines.seeds import uniforms

Allowed = tuple[int, ...] | None
_INDEX_CACHE_SIZE = 1024

_BLOCK = 256
"""Large vocabularies are searched in two steps: which block of this many tokens, then which token of it."""

_AHEAD = 16
"""Draws whose random numbers are made at once."""


@dataclass(frozen=True)
class RowSampling:
    """How one row is sampled."""

    temperature: float  # 0 is greedy
    allowed: Allowed
    seed: int
    position: int  # tokens sampled so far in this request
    alternatives: int = 0  # how many of the most probable tokens are told


class Sampler:
    """Prepares draws for many rows at once; rows with the same allowed set share one pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._indices: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()

    def draws(self, rows: list[RowSampling]) -> Draws:
        """What draws a token for each of these rows, as often as it is called."""
        groups: dict[Allowed, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(row.allowed, []).append(index)
        return Draws(
            [
                _Part(
                    None if len(members) == len(rows) else np.array(members),
                    None if allowed is None else self._index(allowed),
                    [rows[index] for index in members],
                    self._device,
                )
                for allowed, members in groups.items()
            ],
            len(rows),
        )

    def _index(self, allowed: tuple[int, ...]) -> torch.Tensor:
        found = self._indices.get(allowed)
        if found is None:
            found = torch.tensor(sorted(set(allowed)), dtype=torch.int64, device=self._device)
            self._indices[allowed] = found
            if len(self._indices) > _INDEX_CACHE_SIZE:
                self._indices.popitem(last=False)
        return found


class Draws:
    """Each call draws the next token of every row: the first at the rows' positions, then at those that follow."""

    def __init__(self, parts: list[_Part], count: int) -> None:
        self._parts = parts
        self._count = count

    def __call__(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray, dict[int, Ranked]]:
        """``logits`` [B, V] -> token ids int32 [B], log-probabilities float32 [B], and the alternatives of those rows
        that want any."""
        tokens = np.empty(self._count, dtype=np.int32)
        logprobs = np.empty(self._count, dtype=np.float32)
        ranked: dict[int, Ranked] = {}
        for part in self._parts:
            where = slice(None) if part.members is None else part.members
            chosen, of_all = part.draw(logits if part.members is None else logits[where])
            tokens[where] = part.ids(chosen).cpu().numpy()
            logprobs[where] = of_all.gather(1, chosen[:, None])[:, 0].cpu().numpy()
            ranked |= part.ranked(of_all)
        return tokens, logprobs, ranked


class _Part:
    """Rows of one allowed set."""

    def __init__(
        self, members: np.ndarray | None, ids: torch.Tensor | None, rows: list[RowSampling], device: torch.device
    ) -> None:
        """``members`` are their places in the batch, None where they are all of it."""
        self.members = members
        self._ids = ids
        self._wanted = {place: row.alternatives for place, row in enumerate(rows) if row.alternatives}
        self._device = device
        temperatures = np.array([row.temperature for row in rows], dtype=np.float32)
        greedy = temperatures == 0
        self._all_greedy = bool(greedy.all())
        self._greedy = torch.from_numpy(greedy).to(device) if greedy.any() else None
        divisors = np.where(greedy, np.float32(1), temperatures)
        self._divisors = None if (divisors == 1).all() else torch.from_numpy(divisors).to(device)[:, None]
        self._seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        self._positions = np.array([row.position for row in rows])
        self._points: list[torch.Tensor] = []  # of the draws to come, the last one first

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``logits`` [B, V] of these rows -> places int64 [B] among the A allowed tokens, and float32 [B, A]: the
        log-probabilities of all of them."""
        if self._ids is not None:
            logits = logits.index_select(1, self._ids)
        logits = logits.float()
        logprobs = (logits if self._divisors is None else logits / self._divisors).log_softmax(-1)
        if self._all_greedy:
            chosen = logprobs.argmax(-1)
        else:
            chosen = _invert(logprobs.exp(), self._next_points())
            if self._greedy is not None:
                chosen = torch.where(self._greedy, logprobs.argmax(-1), chosen)
        return chosen, logprobs

    def ids(self, places: torch.Tensor) -> torch.Tensor:
        """Of which tokens these are the places."""
        return places if self._ids is None else self._ids[places]

    def ranked(self, logprobs: torch.Tensor) -> dict[int, Ranked]:
        """The best of ``logprobs`` [B, A], by place in the batch."""
        if not self._wanted:
            return {}
        places = list(self._wanted)
        count = min(max(self._wanted.values()), logprobs.shape[1])
        best, chosen = logprobs[places].topk(count, dim=-1)
        ids, of_ids = self.ids(chosen).cpu().numpy(), best.cpu().numpy()
        return {
            place if self.members is None else int(self.members[place]): (ids[row], of_ids[row])
            for row, place in enumerate(places)
        }

    def _next_points(self) -> torch.Tensor:
        """float64 [B]; made for ``_AHEAD`` draws at a time, which costs little more than for one."""
        if not self._points:
            ahead = uniforms(self._seeds, self._positions + np.arange(_AHEAD)[:, None])
            self._points = list(torch.from_numpy(ahead[::-1].copy()).to(self._device))
            self._positions = self._positions + _AHEAD
        return self._points.pop()


def _invert(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """For each row of ``weights`` [B, V], the first token at which the cumulated sum exceeds the row's point (float64
    in [0, 1)) of its total: never one of weight 0."""
    width = weights.shape[1]
    whole = width // _BLOCK * _BLOCK
    if whole < 2 * _BLOCK:
        return _first_above(weights.cumsum(-1, dtype=torch.float64), points[:, None])
    blocks = weights[:, :whole].reshape(len(weights), -1, _BLOCK).sum(-1).double()
    tail = weights[:, whole:].sum(-1, keepdim=True).double()
    cumulated = torch.cat([blocks, tail], dim=1).cumsum(-1)
    block = _first_above(cumulated, points[:, None])
    before = torch.where(block > 0, cumulated.gather(1, (block[:, None] - 1).clamp(min=0))[:, 0], 0.0)
    within = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, within.clamp(max=width - 1)).double().masked_fill(within >= width, 0.0)
    # What is left of the point for this block; rounding must not carry it past the block's last token.
    left = points * cumulated[:, -1] - before
    place = torch.searchsorted(inside.cumsum(-1), left[:, None], right=True)[:, 0]
    last = (inside > 0).int().cumsum(-1).argmax(-1)
    return block * _BLOCK + torch.minimum(place, last)


def _first_above(cumulated: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    chosen = torch.searchsorted(cumulated, points * cumulated[:, -1:], right=True)[:, 0]
    return chosen.clamp(max=cumulated.shape[1] - 1)
