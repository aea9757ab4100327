"""What every real engine refuses, without harm to what it has."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from actors.proxy.engines.protocol import Alternatives, Begun, EngineRefusal, GenerateRequest
from tests.engines.reference import MAX_MODEL_LEN, VOCABULARY, finish, prompt
from tests.engines.rigs import Rig, generate


def going_on(
    tokens: int, max_tokens: int, *, logprobs: int | None = None, stop: tuple[int, ...] = ()
) -> GenerateRequest:
    """Brings so many tokens (7) and log-probabilities."""
    count = tokens if logprobs is None else logprobs
    begun = Begun(np.full(tokens, 7, np.int32), np.zeros(count, np.float32), np.zeros(tokens, np.int32))
    return msgspec.structs.replace(generate("bad", prompt(5), max_tokens, stop=stop), begun=begun)


def bound(request: GenerateRequest, from_version: int, to_version: int) -> GenerateRequest:
    return msgspec.structs.replace(request, from_version=from_version, to_version=to_version)


def ranked(request: GenerateRequest, count: int) -> Begun:
    begun = request.begun
    assert begun is not None
    places = len(begun.tokens)
    told = Alternatives(np.zeros((places, count), np.int32), np.zeros((places, count), np.float32))
    return msgspec.structs.replace(begun, alternatives=told)


BAD = {
    "brings all that it wants": going_on(3, 3),
    "brings its end": going_on(2, 2, stop=(7,)),
    "goes on from nothing": going_on(0, 0),
    "brings fewer log-probabilities than tokens": going_on(2, 1),
    "prompt and completion too long": generate("bad", prompt(MAX_MODEL_LEN - 3), 4),
    "empty prompt": generate("bad", np.empty(0, dtype=np.int32)),
    "prompt of two dimensions": generate("bad", np.ones((2, 2), dtype=np.int32)),
    "prompt of floats": generate("bad", np.ones(3, dtype=np.float32)),
    "token id beyond the vocabulary": generate("bad", np.array([5, VOCABULARY], dtype=np.int32)),
    "negative token id": generate("bad", np.array([5, -1], dtype=np.int32)),
    "allowed id beyond the vocabulary": generate("bad", prompt(5), allowed=(3, VOCABULARY)),
    "nothing allowed": generate("bad", prompt(5), allowed=()),
    "stop id beyond the vocabulary": generate("bad", prompt(5), stop=(VOCABULARY,)),
    "no token wanted": generate("bad", prompt(5), 0),
    "negative temperature": generate("bad", prompt(5), temperature=-1.0),
    "temperature that vLLM would raise": generate("bad", prompt(5), temperature=0.001),
    "empty stop string": generate("bad", prompt(5), texts=("",)),
    "more alternatives than are given": generate("bad", prompt(5), logprobs=21),
    "several completions of what has begun": msgspec.structs.replace(going_on(1, 3), n=2),
    "brings no alternatives": msgspec.structs.replace(going_on(1, 3), logprobs=2),
    "brings alternatives of another number": msgspec.structs.replace(
        going_on(1, 3), begun=ranked(going_on(1, 3), 1), logprobs=2
    ),
    "versions that exclude each other": msgspec.structs.replace(
        generate("bad", prompt(5)), from_version=2, to_version=1
    ),
    "has begun under a version that it excludes": msgspec.structs.replace(
        going_on(1, 3), from_version=-2, to_version=-1
    ),
    "temperature that is no number": generate("bad", prompt(5), temperature=float("nan")),
}


@pytest.mark.parametrize("request_", BAD.values(), ids=BAD.keys())
def test_what_can_never_run_is_refused_and_the_engine_works_on(rig: Rig, request_: GenerateRequest) -> None:
    rig.engine.add(generate("good", prompt(6), 3, temperature=0.0))
    with pytest.raises(EngineRefusal, match="bad"):
        rig.engine.add(request_)
    assert rig.engine.unfinished() == 1
    assert finish(rig.engine)["good"].tokens.tolist() == rig.reference.greedy(0, prompt(6), 3)


def test_a_full_length_request_fits_to_the_last_token(rig: Rig) -> None:
    request = generate("r", prompt(MAX_MODEL_LEN - 4, 8), 4)
    answer = rig.run(request)["r"]
    assert len(answer.tokens) == 4
    rig.check_logprobs(request, answer)


def test_an_id_in_use_is_refused_and_free_again_afterwards(rig: Rig) -> None:
    rig.engine.add(generate("r", prompt(6), 2))
    with pytest.raises(EngineRefusal, match="already here"):
        rig.engine.add(generate("r", prompt(6), 2))
    assert set(finish(rig.engine)) == {"r"}
    assert set(rig.run(generate("r", prompt(6), 2))) == {"r"}


def test_scores_of_what_does_not_fit_are_refused(rig: Rig) -> None:
    for tokens in (prompt(MAX_MODEL_LEN + 1), np.empty(0, dtype=np.int32), np.array([VOCABULARY], dtype=np.int32)):
        with pytest.raises(EngineRefusal):
            rig.engine.score(tokens)
