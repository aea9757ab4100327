"""A request that a server has, or is to be asked for again: its tokens so far, and the stream that brings more.

Invariant: of several streams that were opened for one request, the one of its newest submission is kept, and every
other is closed, however late it was opened.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from actors.proxy.engines.http_server import Stream
from actors.proxy.engines.protocol import GenerateRequest
from actors.proxy.engines.sampled import Sampled, Texts
from actors.proxy.engines.seeds import derive


@dataclass(frozen=True)
class Asked:
    """What is to be sampled behind ``tokens``, whatever an interface calls it."""

    tokens: Sequence[int]
    left: int = 1  # at most so many
    seed: int = 1
    temperature: float = 1.0
    logprobs: int = 0  # alternatives that are told
    stop: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None


class Held:
    """An unfinished request."""

    def __init__(self, request: GenerateRequest, seed: int, texts: Texts | None) -> None:
        self.request = request
        self.seed = seed
        self.sampled = Sampled(request, texts)
        self.submission = 0  # its number, new whenever it is asked of the server; 0 while it waits
        self.stream: Stream | None = None
        self._lock = threading.Lock()

    def opened(self, submission: int, stream: Stream) -> bool:
        """In the submission's thread: whether it is not withdrawn; its stream is closed when it is."""
        with self._lock:
            if self.submission != submission:
                return False
            self.stream = stream
            return True

    def withdraw(self) -> None:
        """What its thread still says is of no interest."""
        with self._lock:
            self.submission = 0
            stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()

    def asked(self) -> Asked:
        """What is left of it."""
        request, sampled = self.request, self.sampled
        return Asked(
            tokens=request.prompt.tolist() + sampled.tokens,
            left=request.max_tokens - len(sampled),
            seed=derive(self.seed, len(sampled)),  # it goes on from another point of its stream of random numbers
            temperature=request.temperature,
            logprobs=request.logprobs,
            stop=request.stop_token_ids,
            allowed=request.allowed_token_ids,
        )
