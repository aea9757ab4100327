"""What has been sampled of one request, and whether that is its end.

Invariant: tokens, log-probabilities, versions and alternatives have the same length, what the request brought with it
included; a request ends with its first stop token, with the first token that completes a stop string, or with its last
one, whichever engine samples it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from actors.proxy.engines.protocol import Alternatives, Begun, Completion, FinishReason, GenerateRequest

Texts = Callable[[NDArray[np.integer]], str]
"""What reads tokens: a tokenizer's ``decode``."""

Ranked = tuple[NDArray[np.integer], NDArray[np.floating]]
"""The most probable tokens at one place, the best first, and their log-probabilities; at most as many as wanted."""

LEAD = 8
"""Tokens read before the earliest one that a stop string may begin in: a cut character or blank there is of no
consequence."""


class Sampled:
    """See the module docstring. ``texts`` is needed for requests with stop strings alone."""

    def __init__(self, request: GenerateRequest, texts: Texts | None = None) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self._ranked_ids: list[NDArray[np.int32]] = []
        self._ranked_logprobs: list[NDArray[np.float32]] = []
        self._texts = texts
        self._window = LEAD + max((len(text.encode()) for text in request.stop), default=0)  # a token is a byte or more
        begun = request.begun
        if begun is not None:
            self.tokens += begun.tokens.tolist()
            self.logprobs += begun.logprobs.tolist()
            self.versions += begun.versions.tolist()
            if begun.alternatives is not None:
                self._ranked_ids += list(begun.alternatives.tokens)
                self._ranked_logprobs += list(begun.alternatives.logprobs)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def rank(self, ranked: Ranked) -> None:
        """The alternatives to the token that was added last."""
        ids, logprobs = (
            np.full(self.request.logprobs, -1, np.int32),
            np.full(self.request.logprobs, -np.inf, np.float32),
        )
        possible = np.flatnonzero(np.isfinite(ranked[1][: self.request.logprobs]))
        ids[: len(possible)] = ranked[0][possible]
        logprobs[: len(possible)] = ranked[1][possible]
        self._ranked_ids.append(ids)
        self._ranked_logprobs.append(logprobs)

    def end(self) -> FinishReason | None:
        """Why the request ends with the token that was added last; None where it goes on."""
        if self.tokens[-1] in self.request.stop_token_ids or (self.request.stop and self._spells_stop()):
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_tokens else None

    def _spells_stop(self) -> bool:
        if self._texts is None:
            return False
        text = self._texts(np.array(self.tokens[-self._window :], np.int32))
        return any(stop in text for stop in self.request.stop)

    def since(self, count: int) -> Begun | None:
        """What it has behind its first ``count`` tokens, as copies; None where that is nothing."""
        if count >= len(self.tokens):
            return None
        return Begun(
            np.array(self.tokens[count:], dtype=np.int32),
            np.array(self.logprobs[count:], dtype=np.float32),
            np.array(self.versions[count:], dtype=np.int32),
            self._alternatives(count),
        )

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            self.request.request_id,
            np.array(self.tokens, dtype=np.int32),
            np.array(self.logprobs, dtype=np.float32),
            np.array(self.versions, dtype=np.int32),
            reason,
            self._alternatives(),
        )

    def _alternatives(self, since: int = 0) -> Alternatives | None:
        count = self.request.logprobs
        if not count:
            return None
        return Alternatives(
            np.array(self._ranked_ids[since:], dtype=np.int32).reshape(-1, count),
            np.array(self._ranked_logprobs[since:], dtype=np.float32).reshape(-1, count),
        )
