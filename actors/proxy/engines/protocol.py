"""What every inference engine does, whatever runs it.

An engine is a plain synchronous object that is driven by one thread (``actors.proxy.engines.host``): between two
calls of ``step`` it may be given requests, lose them, or be given new weights. It owns no thread, socket or clock.

Invariant: every request added is answered by exactly one ``Completion`` (from ``step`` or ``abort``), and each
sampled token carries the version whose weights produced it and its log-probability under the distribution that it
was sampled from: after temperature, after the mask of allowed tokens, in float32 nats. What a request brings with it
(``begun``) comes back unchanged.

There is no top-p, top-k or min-p: simulated engines have no distribution to cut, servers behind HTTP say the
probabilities before the cut, and a trainer that does not cut likewise would see importance ratios that are not 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
import numpy as np

from actors.proxy.engines.work import WorkMeter

if TYPE_CHECKING:
    import torch

MAX_ALTERNATIVES = 20
"""What servers with OpenAI's interface give at most."""

FinishReason = Literal["stop", "length", "aborted", "superseded"]
"""``superseded``: the request may not be sampled under the version that its engine has by now (``to_version``)."""

KvRole = Literal["prefill", "decode"]
"""What an engine does with the keys and values of prompts that engines share: writes them, or reads them."""

CUT: tuple[FinishReason, ...] = ("aborted", "superseded")
"""Reasons under which a request ends before its end."""


class Alternatives(msgspec.Struct, frozen=True):
    """The K most probable tokens at each of N places, the best one first, with their log-probabilities under the same
    distribution as the sampled one's. Where fewer have any probability, the rest is token -1 with -inf."""

    tokens: np.ndarray  # int32 [N, K]
    logprobs: np.ndarray  # float32 [N, K]


class Begun(msgspec.Struct, frozen=True):
    """What has been sampled of a request already, on another engine; arrays have the same length N >= 1."""

    tokens: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N]
    versions: np.ndarray  # int32 [N], non-decreasing; none newer than the engine's that goes on
    alternatives: Alternatives | None = None  # as many as the request wants


class GenerateRequest(msgspec.Struct, frozen=True):
    """One turn's generation."""

    request_id: str
    trajectory: str  # requests of one trajectory share a prefix; engines may keep its KV cache between turns
    prompt: np.ndarray  # int32 [P], P >= 1
    max_tokens: int  # >= 1
    temperature: float = 1.0  # 0 is greedy: log-probabilities are then those at temperature 1 (masked)
    allowed_token_ids: tuple[int, ...] | None = None  # None is the whole vocabulary
    stop_token_ids: tuple[int, ...] = ()  # generation ends after one of these; it is kept in the completion
    seed: int | None = None  # the same seed, prompt and weights give the same tokens on the same engine
    urgent: bool = False  # it joins the running batch before those that wait and are not
    from_version: int = 0  # an engine's host keeps it until the engine has this version
    begun: Begun | None = None  # goes on behind these: they count as ``max_tokens``, and are part of the completion
    to_version: int | None = None  # it is not sampled under a newer one, and then ends as "superseded"
    stop: tuple[str, ...] = ()  # generation ends with the token that completes one of these texts; it is kept
    logprobs: int = 0  # alternatives that are told at each place, 0..MAX_ALTERNATIVES
    n: int = 1  # completions of this prompt; the proxy makes it so many requests (``actors.proxy.admission``)


class Completion(msgspec.Struct, frozen=True):
    """The answer to one request; arrays have the same length N, which is 0 only for an early abort."""

    request_id: str
    tokens: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N]
    versions: np.ndarray  # int32 [N], non-decreasing
    finish_reason: FinishReason
    alternatives: Alternatives | None = None  # of N places; None where none were wanted

    def begun(self) -> Begun | None:
        """What another engine may go on from."""
        if not len(self.tokens):
            return None
        return Begun(self.tokens, self.logprobs, self.versions, self.alternatives)


def nothing_sampled(request: GenerateRequest, reason: FinishReason = "aborted") -> Completion:
    """The answer to a request that was cut before its first token here."""
    begun = request.begun
    if begun is None:
        nothing = np.empty(0, dtype=np.int32)
        return Completion(request.request_id, nothing, np.empty(0, dtype=np.float32), nothing, reason)
    return Completion(request.request_id, begun.tokens, begun.logprobs, begun.versions, reason, begun.alternatives)


class EngineLimits(msgspec.Struct, frozen=True):
    """What an engine can hold, and knows."""

    max_sequences: int  # requests decoded at once; more wait inside the engine
    max_model_len: int  # tokens of prompt and completion together
    vocabulary: int = 0  # token ids are below it; 0: not known
    texts: bool = False  # whether it can read tokens: without that, no stop strings
    masks: bool = True  # whether it can sample from allowed tokens alone


class Engine(Protocol):
    """See the module docstring. Methods raise ``EngineRefusal`` for a request that can never run."""

    limits: EngineLimits
    work: WorkMeter  # ``step`` counts there what it computes; whoever runs the engine says how long it took

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; it joins the running batch at the next step with room, urgent ones first and then in the
        order in which they came."""

    def abort(self, request_id: str) -> Completion | None:
        """End a request now and return the tokens it has, or None where it is not (or no longer) here."""

    def sampled(self, request_id: str, since: int) -> Begun | None:
        """What an unfinished request has behind its first ``since`` tokens, those that it brought among them, as
        copies; None where that is nothing, or where it is not here. It goes on."""

    def step(self) -> Sequence[Completion]:
        """Run one prefill or decode step over the batch; return the requests that it finished. Raises ``LateRefusal``
        for one that is here no more; the others go on with the next step."""

    def unfinished(self) -> int:
        """Number of requests waiting or running."""

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        """Take the weights of ``version`` in place and forget every KV cache; unfinished requests keep their tokens
        and continue under the new weights. Names are Hugging Face's; a tied ``lm_head.weight`` is absent.

        Returns the digest (``actors.weightsync.manifest.digest``) of every tensor, taken as it is loaded. The old
        version is gone once this is called: after an exception the engine serves nothing until a load succeeds.
        """

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Log-probability (float32 [T-1], nats, temperature 1, no mask) of tokens[1:] given what precedes each,
        computed now with the weights in use and without any cache. Leaves unfinished requests untouched."""

    def forget(self, trajectory: str) -> None:
        """The trajectory has ended: its KV cache may go."""

    def close(self) -> None:
        """Release what the engine holds; idempotent."""


class EngineRefusal(ValueError):
    """A request that this engine can never serve; the message says what was asked and what the limit is."""


class LateRefusal(EngineRefusal):
    """What the engine drives refuses a request that ``add`` has taken."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"request {request_id}: {reason}")
        self.request_id = request_id
