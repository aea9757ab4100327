"""An engine beside plain transformers on the same weights, for what every real engine must do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from actors.proxy.engines import EngineKind, make_engine
from actors.proxy.engines.protocol import Begun, Completion, Engine, GenerateRequest
from tests.engines.reference import MAX_MODEL_LEN, MAX_SEQUENCES, Reference, finish, spelled, write_tiny_policy

TOLERANCE = 1e-4  # nats, float32
ALLOWED = (3, 17, 18, 40, 77, 119)


class Rig:
    """An engine and the reference for its policy."""

    def __init__(self, kind: EngineKind, directory: Path, *, tied: bool) -> None:
        policy_dir = write_tiny_policy(directory, tied=tied)
        self.reference = Reference(policy_dir)
        self.engine: Engine = make_engine(
            kind, policy_dir, max_sequences=MAX_SEQUENCES, max_model_len=MAX_MODEL_LEN, seed=11, texts=spelled
        )

    def load(self, version: int) -> dict[str, str]:
        return self.engine.load_weights(version, self.reference.weights(version))

    def run(self, *requests: GenerateRequest) -> dict[str, Completion]:
        for request in requests:
            self.engine.add(request)
        return finish(self.engine)

    def check_logprobs(self, request: GenerateRequest, completion: Completion) -> None:
        expected = self.reference.behaviour(request, completion)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=TOLERANCE)


Rigs = Callable[[EngineKind, bool], Rig]


def generate(
    name: str,
    tokens: np.ndarray,
    max_tokens: int = 8,
    *,
    trajectory: str | None = None,
    temperature: float = 1.0,
    allowed: tuple[int, ...] | None = None,
    stop: tuple[int, ...] = (),
    seed: int | None = None,
    texts: tuple[str, ...] = (),
    logprobs: int = 0,
) -> GenerateRequest:
    """``stop``: token ids, ``texts``: stop strings."""
    return GenerateRequest(
        name,
        trajectory or name,
        tokens,
        max_tokens,
        temperature,
        allowed,
        stop,
        seed,
        stop=texts,
        logprobs=logprobs,
    )


def aborted_after(rig: Rig, request: GenerateRequest, tokens: int) -> Begun:
    """What an engine that lets a request go has of it."""
    rig.engine.add(request)
    for _ in range(tokens):
        rig.engine.step()
    aborted = rig.engine.abort(request.request_id)
    assert aborted is not None
    assert len(aborted.tokens) == tokens
    begun = aborted.begun()
    assert begun is not None
    return begun
