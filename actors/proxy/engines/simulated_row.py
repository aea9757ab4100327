"""A request at a simulated engine: what it samples, known in advance.

Invariant: every token is drawn evenly from the allowed ones, by the request's seed and the token's place alone
(``token_at``), whatever the temperature: what is recorded is the log-probability of that. Where it ends is therefore
known when it comes, so that steps which end nothing can be taken at once.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from actors.core import Ref
from actors.proxy.engines.protocol import GenerateRequest
from actors.proxy.engines.sampled import Sampled
from actors.proxy.engines.seeds import mix

VOCABULARY = 1000

LOOK_AHEAD = 256
"""Tokens drawn at once while a request's end is looked for."""


def token_at(seed: int, place: int) -> int:
    """What the ``place``-th token of a request with this seed is, on every such engine, where all are allowed."""
    return int(_numbers(seed, np.array([place]))[0] % np.uint64(VOCABULARY))


def text_of(tokens: NDArray[np.integer]) -> str:
    """What simulated tokens read as: their numbers, each with a blank behind it."""
    return "".join(f"{token} " for token in tokens.tolist())


class Row:
    """See the module docstring."""

    def __init__(self, request: GenerateRequest, reply_to: Ref, seed: int) -> None:
        """``seed``: for a request that brings none."""
        self.request = request
        self.reply_to = reply_to
        self.sampled = Sampled(request, text_of)
        self.brought = len(self.sampled)
        self.missing = 0  # tokens that are still to be computed, once it has a place
        self._seed = seed if request.seed is None else request.seed
        self._allowed = None if request.allowed_token_ids is None else np.unique(request.allowed_token_ids)
        self._logprob = -math.log(VOCABULARY if self._allowed is None else len(self._allowed))
        self._end = self._find_end()

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.sampled)

    @property
    def left(self) -> int:
        """Tokens until its end."""
        return self._end - len(self.sampled)

    def sample(self, version: int, count: int) -> None:
        places = np.arange(len(self.sampled), len(self.sampled) + count)
        for token in self._draw(places).tolist():
            self.sampled.add(token, self._logprob, version)
            if self.request.logprobs:
                self.sampled.rank(self._best())

    def _draw(self, places: NDArray[np.integer]) -> NDArray[np.integer]:
        numbers = _numbers(self._seed, places)
        if self._allowed is None:
            return np.asarray(numbers % np.uint64(VOCABULARY)).astype(np.int64)
        return np.asarray(self._allowed[(numbers % np.uint64(len(self._allowed))).astype(np.int64)])

    def _best(self) -> tuple[NDArray[np.integer], NDArray[np.floating]]:
        """Of tokens that are alike, the first ones."""
        ids = np.arange(VOCABULARY) if self._allowed is None else self._allowed
        ids = ids[: self.request.logprobs]
        return ids, np.full(len(ids), self._logprob)

    def _find_end(self) -> int:
        """How many tokens it has at its end."""
        if not self.request.stop_token_ids and not self.request.stop:
            return self.request.max_tokens
        ahead = Sampled(self.request, text_of)
        while True:
            for token in self._draw(np.arange(len(ahead), len(ahead) + LOOK_AHEAD)).tolist():
                ahead.add(token, 0.0, 0)
                if ahead.end() is not None:
                    return len(ahead)


def _numbers(seed: int, places: NDArray[np.integer]) -> NDArray[np.uint64]:
    return mix(np.full(len(places), seed % 2**64, dtype=np.uint64), places)
