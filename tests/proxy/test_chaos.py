"""Kills, hangs and restarts of real engines and of one of two proxies, under load: every request is answered, or fails
with a name, and each answer is the one that it would have had without them.

A request's unbroken answer comes from a torch engine in this process, which nothing happens to. A vLLM engine that goes
on with a request that has a seed draws from another point of its stream: what it says then is held against plain
transformers, token by token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from actors.policy import Qwen3Shape, write_config
from actors.proxy.engines.protocol import Completion, GenerateRequest
from actors.proxy.engines.seeds import uniforms
from actors.proxy.engines.torch_engine import TorchEngine
from tests.engines.reference import VOCABULARY, Reference, finish
from tests.proxy.storm import DISTINCT, LIMITS, Plan, Played, alive, some_request, storm
from tests.support.loops import run

LIMIT_S = 2_400.0
NATS = 1e-3

TORCH = Plan(
    kind="torch",
    requests=2_000,
    deck={
        "kill an engine": 40,
        "stop an engine for a moment": 30,
        "stop an engine for good": 12,
        "remove an engine": 4,
        "kill a proxy": 6,
        "stop a proxy for a moment": 5,
        "stop a proxy for good": 3,
    },
)
VLLM = Plan(
    kind="vllm",
    requests=400,
    deck={
        "kill an engine": 8,
        "stop an engine for a moment": 5,
        "stop an engine for good": 3,
        "remove an engine": 1,
        "kill a proxy": 1,
        "stop a proxy for a moment": 1,
        "stop a proxy for good": 1,
    },
    silence_s=15.0,
)
"""A fifth: an engine that was killed takes a while to start."""


def _reference(directory: Path) -> Reference:
    write_config(Qwen3Shape(vocab_size=VOCABULARY, max_positions=LIMITS.max_model_len + 1), directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 1, "pad_token_id": 0}))
    return Reference(directory, versions=(0,))


def _unbroken(policy_dir: Path, reference: Reference) -> dict[int, Completion]:
    engine = TorchEngine(policy_dir, max_sequences=LIMITS.max_sequences, max_model_len=LIMITS.max_model_len)
    engine.load_weights(0, reference.weights(0))
    for index in range(DISTINCT):
        engine.add(some_request(index))
    answers = finish(engine, limit=10**6)
    engine.close()
    return {index: answers[f"d{index}"] for index in range(DISTINCT)}


def _is_close_call(reference: Reference, request: GenerateRequest, found: Completion, expected: Completion) -> bool:
    """Whether two continuations part where rounding decides: at equal logits, or a draw between two tokens."""
    place = int(np.flatnonzero(found.tokens != expected.tokens)[0])
    logits = reference.logits(0, np.concatenate([request.prompt, expected.tokens[:place]]))[-1].double().numpy()
    one, other = int(found.tokens[place]), int(expected.tokens[place])
    if not request.temperature:
        return bool(abs(logits[one] - logits[other]) < 1e-3)
    ends = np.cumsum(np.exp(logits - logits.max()))
    ends /= ends[-1]
    drawn = float(uniforms(np.array([request.seed]), np.array([place]))[0])
    return bool(min(abs(drawn - ends[one]), abs(drawn - (ends[one - 1] if one else 0.0))) < 1e-4)


def _every_answer(played: Played) -> Iterator[tuple[str, Completion]]:
    """The late ones, too."""
    yield from played.client.answers.items()
    yield from ((late.request_id, late) for late in played.client.late)


def _check_conservation(plan: Plan, played: Played) -> None:
    client, chaos = played.client, played.chaos
    print(f"{client.asked} requests, {len(client.answers)} answers, {len(client.late)} late, {chaos.done}")
    print(f"asked again: {client.asked_again}, behind {client.counters['tokens_kept']} tokens")
    print(f"{dict(played.counters)}; failures: {client.failures}")
    print(f"engines: {dict(played.engines)}, removed: {chaos.removed}; KiB of the first proxy: {played.kib}")
    assert set(chaos.done) == set(plan.deck)
    assert sum(chaos.done.values()) == sum(plan.deck.values())
    assert (played.left, [engine.pid for engine in chaos.left_behind if alive(engine)]) == ([], [])
    assert (played.queued, played.in_flight) == (0, 0)
    assert set(played.engines) <= {"serving", "removed"}
    assert played.engines["removed"] <= chaos.removed
    assert client.asked >= plan.requests
    assert len(client.answers) + len(client.failures) == client.asked
    assert not set(client.answers) & set(client.failures)
    assert all(client.failures.values())
    assert "no answer" not in client.failures.values()
    assert len(client.failures) <= client.asked // 100, client.failures
    assert played.counters["tokens_kept"] > 0
    assert client.counters["tokens_kept"] > 0 or not client.asked_again


def _check_answers(plan: Plan, played: Played, policy_dir: Path, reference: Reference) -> None:
    unbroken = _unbroken(policy_dir, reference)
    close_calls = 0
    for id_, found in _every_answer(played):
        index = int(id_[1:]) % DISTINCT
        request, expected = some_request(index), unbroken[index]
        assert np.all(np.diff(found.versions) >= 0), id_
        assert found.finish_reason == expected.finish_reason, id_
        assert len(found.tokens) == len(found.logprobs) == len(expected.tokens), id_
        if plan.kind == "vllm" and request.seed is not None:
            expected = msgspec.structs.replace(found, logprobs=_behaviour(reference, request, found))
        if found.tokens.tolist() != expected.tokens.tolist():
            close_calls += 1
            assert _is_close_call(reference, request, found, expected), id_
        else:
            np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=NATS, err_msg=id_)
    print(f"{close_calls} close calls")


def _behaviour(reference: Reference, request: GenerateRequest, found: Completion) -> np.ndarray:
    """Log-probabilities of the tokens under the weights, which are the same for every version."""
    return reference.behaviour(request, msgspec.structs.replace(found, versions=np.zeros_like(found.versions)))


@pytest.mark.deep
@pytest.mark.parametrize("plan", [TORCH, VLLM], ids=lambda plan: plan.kind)
def test_chaos_among_engines_and_proxies_loses_no_request_and_changes_no_token(plan: Plan, tmp_path: Path) -> None:
    if plan.kind == "vllm":
        pytest.importorskip("vllm")
    reference = _reference(tmp_path / "policy")
    played = run(storm(tmp_path, reference, plan, seed=7), LIMIT_S)
    _check_conservation(plan, played)
    _check_answers(plan, played, tmp_path / "policy", reference)
