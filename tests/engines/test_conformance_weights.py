"""What every real engine computes with: the weights that it has now, and no key or value of others; against plain
transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.proxy.engines import EngineKind, make_engine
from actors.proxy.engines.protocol import EngineRefusal
from actors.weightsync.manifest import digest
from tests.engines.reference import MAX_MODEL_LEN, MAX_SEQUENCES, VOCABULARY, finish, prompt, write_tiny_policy
from tests.engines.rigs import TOLERANCE, Rig, generate


def test_turns_that_reuse_their_prefix_have_the_logprobs_of_fresh_ones(rig: Rig) -> None:
    history = {name: prompt(35, seed) for seed, name in enumerate(["a", "b", "c"])}
    for turn in range(5):
        requests = [
            generate(f"{name}{turn}", tokens, 2, trajectory=name, seed=turn) for name, tokens in history.items()
        ]
        answers = rig.run(*requests)
        for request in requests:
            answer = answers[request.request_id]
            rig.check_logprobs(request, answer)
            observation = prompt(5, 100 + turn)
            history[request.trajectory] = np.concatenate([request.prompt, answer.tokens, observation])
    for name in history:
        rig.engine.forget(name)


def test_a_turn_whose_prompt_departs_from_the_last_one_is_right(rig: Rig) -> None:
    first = generate("r0", prompt(60, 7), 3, trajectory="t")
    rig.check_logprobs(first, rig.run(first)["r0"])
    edited = first.prompt.copy()
    edited[40] = 2 + (edited[40] - 1) % (VOCABULARY - 2)
    assert edited[40] != first.prompt[40]
    for name, tokens in [("r1", edited), ("r2", first.prompt[:20]), ("r3", first.prompt)]:
        request = generate(name, tokens, 3, trajectory="t")
        rig.check_logprobs(request, rig.run(request)[name])


def test_two_requests_of_one_trajectory_at_once_are_both_right(rig: Rig) -> None:
    requests = [generate(f"r{i}", prompt(12 + i, i), 6, trajectory="t") for i in range(3)]
    answers = rig.run(*requests)
    for request in requests:
        rig.check_logprobs(request, answers[request.request_id])


def test_many_more_trajectories_than_the_cache_holds_come_back_right(rig: Rig) -> None:
    history = {f"t{i}": prompt(40, i) for i in range(5 * MAX_SEQUENCES)}
    for turn in range(2):
        requests = [generate(f"{name}.{turn}", tokens, 2, trajectory=name) for name, tokens in history.items()]
        answers = rig.run(*requests)
        for request in requests:
            rig.check_logprobs(request, answers[request.request_id])
            history[request.trajectory] = np.concatenate([request.prompt, answers[request.request_id].tokens])


def test_new_weights_in_the_middle_keep_tokens_and_rebuild_the_cache(head_rig: Rig) -> None:
    requests = [generate(f"r{i}", prompt(34 + 7 * i, i), 24, seed=i) for i in range(3)]
    for request in requests:
        head_rig.engine.add(request)
    for version in (1, 2):
        for _ in range(6):
            assert not head_rig.engine.step()
        head_rig.load(version)
    answers = finish(head_rig.engine)
    for request in requests:
        answer = answers[request.request_id]
        assert answer.versions.tolist() == [0] * 6 + [1] * 6 + [2] * 12
        head_rig.check_logprobs(request, answer)


def test_a_load_does_not_disturb_requests_that_wait(rig: Rig) -> None:
    requests = [generate(f"r{i}", prompt(10, i), 5, temperature=0.0) for i in range(2 * MAX_SEQUENCES)]
    for request in requests:
        rig.engine.add(request)
    rig.engine.step()
    rig.load(1)
    answers = finish(rig.engine)
    for request in requests[MAX_SEQUENCES:]:
        answer = answers[request.request_id]
        assert answer.versions.tolist() == [1] * 5
        assert answer.tokens.tolist() == rig.reference.greedy(1, request.prompt, 5)


def test_a_prefix_kept_from_an_older_version_is_not_used(rig: Rig) -> None:
    first = generate("r0", prompt(64, 9), 2, trajectory="t")
    answer = rig.run(first)["r0"]
    rig.load(1)
    second = generate("r1", np.concatenate([first.prompt, answer.tokens]), 4, trajectory="t")
    answer = rig.run(second)["r1"]
    assert answer.versions.tolist() == [1] * 4
    rig.check_logprobs(second, answer)


def test_digests_are_those_of_the_tensors_given(head_rig: Rig) -> None:
    expected = {name: digest(tensor.numpy().astype("<f4").tobytes()) for name, tensor in head_rig.reference.weights(1)}
    assert head_rig.load(1) == expected
    assert ("lm_head.weight" in expected) != head_rig.reference.models[0].config.tie_word_embeddings


def test_score_is_the_logprob_of_each_token_under_the_weights_in_use(head_rig: Rig) -> None:
    for version in (0, 1):
        head_rig.load(version)
        for tokens in (prompt(MAX_MODEL_LEN, 1), prompt(33, 2), prompt(2, 3)):
            expected = head_rig.reference.score(version, tokens)
            np.testing.assert_allclose(head_rig.engine.score(tokens), expected, rtol=0, atol=TOLERANCE)
    assert head_rig.engine.score(prompt(1)).shape == (0,)


def test_score_leaves_unfinished_requests_untouched(rig: Rig) -> None:
    requests = [generate(f"r{i}", prompt(20 + i, i), 12, temperature=0.0) for i in range(2 * MAX_SEQUENCES)]
    for request in requests:
        rig.engine.add(request)
    for _ in range(4):
        rig.engine.step()
    tokens = prompt(50, 5)
    np.testing.assert_allclose(rig.engine.score(tokens), rig.reference.score(0, tokens), rtol=0, atol=TOLERANCE)
    assert rig.engine.unfinished() == len(requests)
    answers = finish(rig.engine)
    for request in requests:
        assert answers[request.request_id].tokens.tolist() == rig.reference.greedy(0, request.prompt, 12)


def test_a_load_that_fails_serves_nothing_until_one_succeeds(rig: Rig) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from rig.reference.weights(1)[:3]
        raise ConnectionError("the sender died")

    rig.engine.add(generate("r", prompt(6), 3, temperature=0.0))
    with pytest.raises(ConnectionError):
        rig.engine.load_weights(1, broken())
    assert not rig.engine.step()
    assert rig.engine.unfinished() == 1
    rig.load(2)
    answer = finish(rig.engine)["r"]
    assert answer.versions.tolist() == [2, 2, 2]
    assert answer.tokens.tolist() == rig.reference.greedy(2, prompt(6), 3)


def test_weights_that_are_not_finite_leave_nothing_behind(rig: Rig) -> None:
    rig.engine.add(generate("r", prompt(60), 4, temperature=0.0))
    rig.engine.load_weights(1, [(name, torch.full_like(x, torch.nan)) for name, x in rig.reference.weights(1)])
    assert np.isnan(rig.engine.score(prompt(90))).all()
    rig.load(2)
    np.testing.assert_allclose(rig.engine.score(prompt(30)), rig.reference.score(2, prompt(30)), rtol=0, atol=TOLERANCE)
    assert finish(rig.engine)["r"].tokens.tolist() == rig.reference.greedy(2, prompt(60), 4)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("model.layers.0.nonsense.weight", (64, 64)), ("model.embed_tokens.weight", (VOCABULARY, 32))],
    ids=["unknown name", "wrong shape"],
)
def test_a_tensor_that_the_policy_does_not_have_is_refused_by_name(rig: Rig, name: str, shape: tuple[int, ...]) -> None:
    weights = dict(rig.reference.weights(1)) | {name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=name):
        rig.engine.load_weights(1, weights.items())
    rig.load(2)
    answer = rig.run(generate("r", prompt(6), 3, temperature=0.0))["r"]
    assert answer.tokens.tolist() == rig.reference.greedy(2, prompt(6), 3)


def test_nothing_can_be_scored_before_weights_are_loaded(rig: Rig) -> None:
    with pytest.raises(ConnectionError):
        rig.engine.load_weights(1, lost())
    with pytest.raises(EngineRefusal, match="no weights"):
        rig.engine.score(prompt(5))


def lost() -> Iterator[tuple[str, torch.Tensor]]:
    raise ConnectionError("the sender died")
    yield


def test_closing_twice_is_harmless(kind: EngineKind, tmp_path: Path) -> None:
    if kind == "vllm":
        pytest.importorskip("vllm")
    engine = make_engine(kind, write_tiny_policy(tmp_path, tied=True), max_sequences=2, max_model_len=32)
    engine.add(generate("r", prompt(6), 3))
    engine.close()
    engine.close()
    assert engine.unfinished() == 0
