"""What every engine refuses, in the same words.

Invariant: a request that passes ``check`` can run to its end on an engine with these limits.
"""

from __future__ import annotations

import numpy as np

from actors.proxy.engines.protocol import Begun, EngineLimits, EngineRefusal, GenerateRequest

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""What vLLM accepts above 0: it silently raises smaller ones, whose log-probabilities would then be another's."""


def check(request: GenerateRequest, limits: EngineLimits, vocabulary: int) -> None:
    """Raise ``EngineRefusal`` for a request that can never run."""
    who = f"request {request.request_id}"
    _check_tokens(who, "prompt", request.prompt, vocabulary)
    if request.max_tokens < 1:
        raise EngineRefusal(f"{who}: max_tokens is {request.max_tokens}, expected at least 1")
    total = len(request.prompt) + request.max_tokens
    if total > limits.max_model_len:
        raise EngineRefusal(
            f"{who}: {len(request.prompt)} prompt tokens and max_tokens={request.max_tokens} make {total}, but this "
            f"engine holds {limits.max_model_len} (rollout.max_model_len); shorten the context or raise the limit"
        )
    if request.begun is not None:
        _check_begun(who, request, request.begun, vocabulary)
    if request.temperature != 0 and not MIN_TEMPERATURE <= request.temperature <= MAX_TEMPERATURE:
        raise EngineRefusal(
            f"{who}: temperature is {request.temperature}, expected 0 (greedy) or {MIN_TEMPERATURE}..{MAX_TEMPERATURE}"
        )
    if request.allowed_token_ids is not None:
        if not request.allowed_token_ids:
            raise EngineRefusal(f"{who}: no token is allowed; expected at least one (None allows all)")
        _check_ids(who, "allowed token", request.allowed_token_ids, vocabulary)
    _check_ids(who, "stop token", request.stop_token_ids, vocabulary)


def check_score(tokens: np.ndarray, limits: EngineLimits, vocabulary: int, version: int | None) -> None:
    """Raise ``EngineRefusal`` for a sequence that cannot be scored (now)."""
    if version is None:
        raise EngineRefusal("score: no weights are loaded; call load_weights first")
    _check_tokens("score", "sequence", tokens, vocabulary)
    if len(tokens) > limits.max_model_len:
        raise EngineRefusal(
            f"score: {len(tokens)} tokens, but this engine holds {limits.max_model_len} (rollout.max_model_len)"
        )


def _check_tokens(who: str, what: str, tokens: np.ndarray, vocabulary: int) -> None:
    """Raise ``EngineRefusal`` unless ``tokens`` is a non-empty vector of token ids."""
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        raise EngineRefusal(f"{who}: {what} is {tokens.dtype} {tokens.shape}, expected at least one integer token id")
    if not (int(tokens.min()) >= 0 and int(tokens.max()) < vocabulary):
        bad = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
        raise EngineRefusal(f"{who}: {what} has token id {bad}, the vocabulary is 0..{vocabulary - 1}")


def _check_begun(who: str, request: GenerateRequest, begun: Begun, vocabulary: int) -> None:
    """Raise ``EngineRefusal`` unless there is something left to sample behind what has begun."""
    _check_tokens(who, "what has begun", begun.tokens, vocabulary)
    count = len(begun.tokens)
    if count >= request.max_tokens or int(begun.tokens[-1]) in request.stop_token_ids:
        raise EngineRefusal(f"{who}: its {count} tokens are all that it asks for (max_tokens={request.max_tokens})")
    if begun.logprobs.shape != (count,) or begun.versions.shape != (count,):
        raise EngineRefusal(
            f"{who}: {count} tokens have begun, with log-probabilities {begun.logprobs.shape} and versions "
            f"{begun.versions.shape}; expected as many"
        )


def _check_ids(who: str, what: str, ids: tuple[int, ...], vocabulary: int) -> None:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise EngineRefusal(f"{who}: {what} id {token} is outside the vocabulary 0..{vocabulary - 1}")
