"""What every engine refuses, and the proxy before it (``actors.proxy.admission``), in the same words.

Invariant: a request that passes ``check`` can run to its end on an engine with these limits. ``check_parameters`` needs
no limits: what it refuses can run on no engine.
"""

from __future__ import annotations

import numpy as np

from actors.proxy.engines.protocol import MAX_ALTERNATIVES, Begun, EngineLimits, EngineRefusal, GenerateRequest

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""What vLLM accepts above 0: it silently raises smaller ones, whose log-probabilities would then be another's."""

MAX_STOPS, MAX_STOP_BYTES = 16, 256
"""Stop strings of a request, and bytes of each: they are looked for after every token."""

MAX_COMPLETIONS = 256
"""Completions of one request."""

SEEDS = range(-(2**63), 2**64)
"""What fits into a message."""


def check_parameters(request: GenerateRequest, vocabulary: int = 0) -> None:
    """Raise ``EngineRefusal`` for a request that can run nowhere, whatever the engine. ``vocabulary``: 0 is unknown."""
    who = f"request {request.request_id}"
    _check_tokens(who, "prompt", request.prompt, vocabulary)
    if request.max_tokens < 1:
        raise EngineRefusal(f"{who}: max_tokens is {request.max_tokens}, expected at least 1")
    if request.temperature != 0 and not MIN_TEMPERATURE <= request.temperature <= MAX_TEMPERATURE:
        raise EngineRefusal(
            f"{who}: temperature is {request.temperature}, expected 0 (greedy) or {MIN_TEMPERATURE}..{MAX_TEMPERATURE}"
        )
    if request.allowed_token_ids is not None:
        if not request.allowed_token_ids:
            raise EngineRefusal(f"{who}: no token is allowed; expected at least one (None allows all)")
        _check_ids(who, "allowed token", request.allowed_token_ids, vocabulary)
    _check_ids(who, "stop token", request.stop_token_ids, vocabulary)
    _check_stops(who, request.stop)
    if not 0 <= request.logprobs <= MAX_ALTERNATIVES:
        raise EngineRefusal(f"{who}: logprobs is {request.logprobs}, expected 0..{MAX_ALTERNATIVES} alternatives")
    if not 1 <= request.n <= MAX_COMPLETIONS:
        raise EngineRefusal(f"{who}: n is {request.n}, expected 1..{MAX_COMPLETIONS} completions")
    if request.seed is not None and request.seed not in SEEDS:
        raise EngineRefusal(f"{who}: seed is {request.seed}, expected {SEEDS.start}..{SEEDS.stop - 1}")
    if request.to_version is not None and request.to_version < request.from_version:
        raise EngineRefusal(
            f"{who}: it is for version {request.from_version} or newer (from_version), and for {request.to_version} or "
            f"older (to_version); expected a version between"
        )
    if request.begun is not None:
        _check_begun(who, request, request.begun, vocabulary)


def check(request: GenerateRequest, limits: EngineLimits) -> None:
    """Raise ``EngineRefusal`` for a request that can never run on such an engine."""
    who, vocabulary = f"request {request.request_id}", limits.vocabulary
    check_parameters(request, vocabulary)
    total = len(request.prompt) + request.max_tokens
    if total > limits.max_model_len:
        raise EngineRefusal(
            f"{who}: {len(request.prompt)} prompt tokens and max_tokens={request.max_tokens} make {total}, but this "
            f"engine holds {limits.max_model_len} (rollout.max_model_len); shorten the context or raise the limit"
        )
    if request.logprobs and 0 < vocabulary < request.logprobs:
        raise EngineRefusal(f"{who}: logprobs is {request.logprobs}, but the vocabulary has {vocabulary} tokens")
    if request.allowed_token_ids is not None and not limits.masks:
        raise EngineRefusal(
            f"{who}: {len(request.allowed_token_ids)} tokens are allowed, but this engine samples from all"
        )
    if request.stop and not limits.texts:
        raise EngineRefusal(
            f"{who}: it has stop strings, but this engine has no tokenizer to read tokens with; use stop_token_ids"
        )


def check_score(tokens: np.ndarray, limits: EngineLimits, version: int | None) -> None:
    """Raise ``EngineRefusal`` for a sequence that cannot be scored (now)."""
    if version is None:
        raise EngineRefusal("score: no weights are loaded; call load_weights first")
    _check_tokens("score", "sequence", tokens, limits.vocabulary)
    if len(tokens) > limits.max_model_len:
        raise EngineRefusal(
            f"score: {len(tokens)} tokens, but this engine holds {limits.max_model_len} (rollout.max_model_len)"
        )


def _check_tokens(who: str, what: str, tokens: np.ndarray, vocabulary: int) -> None:
    """Raise ``EngineRefusal`` unless ``tokens`` is a non-empty vector of token ids. ``vocabulary``: 0 is unknown."""
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise EngineRefusal(f"{who}: {what} is {tokens.dtype} {tokens.shape}, expected at least one integer token id")
    if tokens.dtype == np.int32 and tokens.view(np.uint32).max() < (vocabulary or 1 << 31):
        return  # one search instead of two: as it would be without a sign, a negative id is a very large one
    _check_ids(who, f"{what} has token", (int(tokens.min()), int(tokens.max())), vocabulary)


def _check_begun(who: str, request: GenerateRequest, begun: Begun, vocabulary: int) -> None:
    """Raise ``EngineRefusal`` unless there is something left to sample behind what has begun."""
    _check_tokens(who, "what has begun", begun.tokens, vocabulary)
    count = len(begun.tokens)
    if request.n != 1:
        raise EngineRefusal(f"{who}: {count} tokens have begun, and n is {request.n}; expected n = 1")
    if count >= request.max_tokens or int(begun.tokens[-1]) in request.stop_token_ids:
        raise EngineRefusal(f"{who}: its {count} tokens are all that it asks for (max_tokens={request.max_tokens})")
    if begun.logprobs.shape != (count,) or begun.versions.shape != (count,):
        raise EngineRefusal(
            f"{who}: {count} tokens have begun, with log-probabilities {begun.logprobs.shape} and versions "
            f"{begun.versions.shape}; expected as many"
        )
    told = begun.alternatives
    shapes = ((0, 0), (0, 0)) if told is None else (told.tokens.shape, told.logprobs.shape)
    wanted = (count, request.logprobs) if request.logprobs else (0, 0)
    if shapes != (wanted, wanted):
        raise EngineRefusal(
            f"{who}: {count} tokens have begun, with alternatives {shapes[0]} and {shapes[1]}; expected {wanted}"
        )
    if request.to_version is not None and int(begun.versions[-1]) > request.to_version:
        raise EngineRefusal(
            f"{who}: it has begun under version {int(begun.versions[-1])}, and is for {request.to_version} or older"
        )


def _check_stops(who: str, stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise EngineRefusal(f"{who}: {len(stops)} stop strings, expected at most {MAX_STOPS}")
    for stop in stops:
        if not 1 <= len(stop.encode()) <= MAX_STOP_BYTES:
            raise EngineRefusal(
                f"{who}: stop string {stop[:20]!r} has {len(stop.encode())} bytes, expected 1..{MAX_STOP_BYTES}"
            )


def _check_ids(who: str, what: str, ids: tuple[int, ...], vocabulary: int) -> None:
    for token in ids:
        if token < 0 or 0 < vocabulary <= token:
            known = f"0..{vocabulary - 1}" if vocabulary else "0 and above"
            raise EngineRefusal(f"{who}: {what} id {token} is outside the vocabulary {known}")
