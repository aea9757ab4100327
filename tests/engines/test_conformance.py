"""What every real engine must do, checked against plain transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from actors.proxy.engines import EngineKind, make_engine
from actors.proxy.engines.protocol import Begun, Completion, EngineRefusal, GenerateRequest
from actors.weightsync.manifest import digest
from hwprobe.fitting import Work
from tests.engines.reference import MAX_MODEL_LEN, MAX_SEQUENCES, VOCABULARY, finish, prompt, write_tiny_policy
from tests.engines.rigs import ALLOWED, TOLERANCE, Rig, Rigs, aborted_after, generate


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rigs]:
    """Rigs by engine and tied embeddings, each started once."""
    started: dict[tuple[EngineKind, bool], Rig] = {}

    def rig_of(kind: EngineKind, tied: bool) -> Rig:
        if kind == "vllm":
            pytest.importorskip("vllm")
        if (kind, tied) not in started:
            started[kind, tied] = Rig(kind, tmp_path_factory.mktemp("policy"), tied=tied)
        return started[kind, tied]

    yield rig_of
    for rig in started.values():
        rig.engine.close()


def ready(rig: Rig) -> Iterator[Rig]:
    rig.load(0)
    yield rig
    assert rig.engine.unfinished() == 0


@pytest.fixture(params=["torch", "vllm"])
def rig(request: pytest.FixtureRequest, rigs: Rigs) -> Iterator[Rig]:
    """Each engine, with tied embeddings."""
    yield from ready(rigs(request.param, True))


@pytest.fixture(params=["tied", "untied"])
def head_rig(request: pytest.FixtureRequest, rigs: Rigs, kind: EngineKind) -> Iterator[Rig]:
    """Each engine with and without tied embeddings, for what depends on the head."""
    yield from ready(rigs(kind, request.param == "tied"))


@pytest.fixture(params=["torch", "vllm"])
def kind(request: pytest.FixtureRequest) -> EngineKind:
    chosen: EngineKind = request.param
    return chosen


def test_every_request_is_answered_exactly_once_though_more_wait_than_run(rig: Rig) -> None:
    requests = [generate(f"r{i}", prompt(5 + 3 * i, i), 1 + i % 7) for i in range(4 * MAX_SEQUENCES)]
    answers = rig.run(*requests)
    assert set(answers) == {request.request_id for request in requests}
    for request in requests:
        assert len(answers[request.request_id].tokens) == request.max_tokens
        assert answers[request.request_id].finish_reason == "length"


def test_what_is_computed_is_counted(rig: Rig) -> None:
    """Two prompts are prefilled, and give the first token; each further one is a step over what is there by then."""
    rig.engine.work.step(1.0)  # whatever came before
    rig.engine.work.take()
    rig.run(generate("one", prompt(23, 701), 5), generate("other", prompt(40, 702), 5))
    rig.engine.work.step(2.0, 4)
    work = rig.engine.work.take()
    context = sum(range(24, 28)) + sum(range(41, 45))
    assert work == Work(busy_s=2.0, prefill_tokens=63, steps=4, decode_tokens=8, context_tokens=context)
    assert rig.engine.work.take() is None


def test_urgent_requests_join_the_batch_before_others_that_wait_and_each_kind_in_its_order(rig: Rig) -> None:
    running = [generate(f"running{i}", prompt(6, i), 6) for i in range(MAX_SEQUENCES)]
    for request in running:
        rig.engine.add(request)
    assert not rig.engine.step()
    waiting = [generate(f"w{i}", prompt(6, 10 + i), 3) for i in range(MAX_SEQUENCES)]
    urgent = [
        msgspec.structs.replace(generate(f"u{i}", prompt(6, 20 + i), 3), urgent=True) for i in range(MAX_SEQUENCES)
    ]
    answers = list(rig.run(*waiting[:2], *urgent, *waiting[2:]))
    assert set(answers[:MAX_SEQUENCES]) == {request.request_id for request in running}
    assert answers[MAX_SEQUENCES:] == ["u0", "u1", "u2", "u3", "w0", "w1", "w2", "w3"]


def test_an_urgent_request_that_waits_can_be_aborted(rig: Rig) -> None:
    for number in range(MAX_SEQUENCES):
        rig.engine.add(generate(f"r{number}", prompt(6, number), 4))
    rig.engine.step()
    rig.engine.add(msgspec.structs.replace(generate("u", prompt(6, 9), 4), urgent=True))
    aborted = rig.engine.abort("u")
    assert aborted is not None
    assert (aborted.finish_reason, len(aborted.tokens)) == ("aborted", 0)
    assert "u" not in finish(rig.engine)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.9])
@pytest.mark.parametrize("allowed", [None, ALLOWED], ids=["whole", "masked"])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    rig: Rig, temperature: float, allowed: tuple[int, ...] | None
) -> None:
    requests = [
        generate(f"r{i}", prompt(4 + 9 * i, i), 10, temperature=temperature, allowed=allowed, seed=i) for i in range(4)
    ]
    answers = rig.run(*requests)
    for request in requests:
        rig.check_logprobs(request, answers[request.request_id])


def test_rows_of_one_batch_keep_their_own_temperature_and_mask(head_rig: Rig) -> None:
    kinds = [(0.0, None), (1.0, ALLOWED), (0.5, ALLOWED[:2]), (1.7, None)]
    requests = [
        generate(f"r{i}", prompt(6, 5), 12, temperature=temperature, allowed=allowed, seed=3)
        for i, (temperature, allowed) in enumerate(kinds)
    ]
    answers = head_rig.run(*requests)
    for request in requests:
        head_rig.check_logprobs(request, answers[request.request_id])


def test_greedy_tokens_are_those_of_transformers_generate(head_rig: Rig) -> None:
    requests = [generate(f"r{i}", prompt(7 + 5 * i, 20 + i), 16, temperature=0.0) for i in range(4)]
    answers = head_rig.run(*requests)
    for request in requests:
        assert answers[request.request_id].tokens.tolist() == head_rig.reference.greedy(0, request.prompt, 16)


def test_one_seed_repeats_and_another_differs(rig: Rig) -> None:
    tokens = prompt(9, 1)
    first = rig.run(generate("a", tokens, 20, seed=5), generate("b", tokens, 20, seed=6))
    again = rig.run(generate("c", tokens, 20, seed=5))
    assert first["a"].tokens.tolist() == again["c"].tokens.tolist()
    assert first["a"].tokens.tolist() != first["b"].tokens.tolist()


def test_requests_without_a_seed_differ(rig: Rig) -> None:
    answers = rig.run(*[generate(f"r{i}", prompt(9, 1), 20) for i in range(3)])
    assert len({tuple(answer.tokens.tolist()) for answer in answers.values()}) == 3


def test_sampled_frequencies_are_the_probabilities(rig: Rig) -> None:
    tokens, count = prompt(12, 2), 600
    answers = rig.run(*[generate(f"r{i}", tokens, 1, allowed=ALLOWED, seed=i) for i in range(count)])
    logits = rig.reference.logits(0, tokens)[-1][list(ALLOWED)]
    expected = torch.softmax(logits, -1).numpy() * count
    seen = np.array([sum(int(answer.tokens[0]) == token for answer in answers.values()) for token in ALLOWED])
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < 20.5  # 99.9th percentile for 5 degrees of freedom


def test_only_allowed_tokens_are_sampled(rig: Rig) -> None:
    answers = rig.run(*[generate(f"r{i}", prompt(8, i), 30, allowed=ALLOWED) for i in range(4)])
    assert {int(token) for answer in answers.values() for token in answer.tokens} <= set(ALLOWED)


def test_a_single_allowed_token_has_probability_one(rig: Rig) -> None:
    answer = rig.run(generate("r", prompt(8), 3, allowed=(42,)))["r"]
    assert answer.tokens.tolist() == [42, 42, 42]
    assert answer.logprobs.tolist() == [0.0, 0.0, 0.0]


def test_a_stop_token_ends_generation_and_is_kept(rig: Rig) -> None:
    path = rig.reference.greedy(0, prompt(10, 3), 12)
    stop = path[5]
    answer = rig.run(generate("r", prompt(10, 3), 12, temperature=0.0, stop=(stop, 1)))["r"]
    assert answer.tokens.tolist() == path[: path.index(stop) + 1]
    assert answer.finish_reason == "stop"


def test_the_models_own_end_token_does_not_stop_a_request_that_does_not_name_it(rig: Rig) -> None:
    answer = rig.run(generate("r", prompt(10, 3), 4, allowed=(1,)))["r"]
    assert answer.tokens.tolist() == [1, 1, 1, 1]
    assert answer.finish_reason == "length"


def test_a_stop_token_as_the_last_allowed_one_reports_stop(rig: Rig) -> None:
    answer = rig.run(generate("r", prompt(10, 3), 1, allowed=(9,), stop=(9,)))["r"]
    assert (answer.tokens.tolist(), answer.finish_reason) == ([9], "stop")


def test_abort_returns_the_tokens_so_far_and_ends_the_request(rig: Rig) -> None:
    request = generate("r", prompt(10, 4), 40)
    rig.engine.add(request)
    for _ in range(5):
        assert not rig.engine.step()
    answer = rig.engine.abort("r")
    assert answer is not None
    assert answer.finish_reason == "aborted"
    assert len(answer.tokens) == 5
    rig.check_logprobs(request, answer)
    assert rig.engine.unfinished() == 0
    assert rig.engine.abort("r") is None


def test_abort_before_the_first_step_returns_no_token(rig: Rig) -> None:
    rig.engine.add(generate("r", prompt(10), 4))
    answer = rig.engine.abort("r")
    assert answer is not None
    assert (len(answer.tokens), len(answer.logprobs), len(answer.versions)) == (0, 0, 0)


def test_abort_of_an_unknown_request_is_none(rig: Rig) -> None:
    assert rig.engine.abort("nobody") is None


def test_a_request_goes_on_from_the_tokens_that_it_brings_as_if_it_had_never_stopped(head_rig: Rig) -> None:
    request = generate("r", prompt(10, 4), 40, temperature=0.0)
    begun = aborted_after(head_rig, request, 7)
    others = [generate(f"o{i}", prompt(12 + i, i), 9) for i in range(2)]
    answer = head_rig.run(*others, msgspec.structs.replace(request, begun=begun))["r"]
    assert answer.tokens.tolist() == head_rig.reference.greedy(0, request.prompt, 40)
    assert answer.logprobs[:7].tolist() == begun.logprobs.tolist()
    head_rig.check_logprobs(request, answer)


def test_tokens_that_are_brought_keep_their_versions_and_new_ones_have_the_engines(rig: Rig) -> None:
    request = generate("r", prompt(10, 4), 12, seed=5)
    begun = aborted_after(rig, request, 5)
    rig.load(2)
    answer = rig.run(msgspec.structs.replace(request, begun=begun))["r"]
    assert answer.versions.tolist() == [0] * 5 + [2] * 7
    assert answer.tokens[:5].tolist() == begun.tokens.tolist()
    rig.check_logprobs(request, answer)


def test_what_a_request_has_sampled_can_be_read_while_it_goes_on(rig: Rig) -> None:
    request = generate("r", prompt(10, 4), 30, temperature=0.0)
    begun = aborted_after(rig, request, 5)
    rig.engine.add(msgspec.structs.replace(request, begun=begun))
    assert rig.engine.sampled("r", 5) is None
    assert rig.engine.sampled("unknown", 0) is None
    for _ in range(6):
        rig.engine.step()
    whole, behind = rig.engine.sampled("r", 0), rig.engine.sampled("r", 8)
    assert whole is not None
    assert behind is not None
    answer = finish(rig.engine)["r"]
    assert answer.tokens.tolist() == rig.reference.greedy(0, request.prompt, 30)
    for found, place in ((whole, slice(0, 11)), (behind, slice(8, 11))):
        assert found.tokens.tolist() == answer.tokens[place].tolist()
        assert found.logprobs.tolist() == answer.logprobs[place].tolist()
        assert found.versions.tolist() == answer.versions[place].tolist()


def test_a_request_that_is_stopped_again_before_it_goes_on_gives_back_what_it_brought(rig: Rig) -> None:
    request = generate("r", prompt(10, 4), 12)
    begun = aborted_after(rig, request, 5)
    rig.engine.add(msgspec.structs.replace(request, begun=begun))
    again = rig.engine.abort("r")
    assert again is not None
    assert again.tokens.tolist() == begun.tokens.tolist()
    assert again.logprobs.tolist() == begun.logprobs.tolist()
    assert again.versions.tolist() == begun.versions.tolist()


def test_a_stop_token_ends_a_request_that_went_on(rig: Rig) -> None:
    path = rig.reference.greedy(0, prompt(10, 3), 12)
    stop = path[5]
    request = generate("r", prompt(10, 3), 12, temperature=0.0, stop=(stop,))
    begun = aborted_after(rig, request, path.index(stop))
    answer = rig.run(msgspec.structs.replace(request, begun=begun))["r"]
    assert (answer.tokens.tolist(), answer.finish_reason) == (path[: path.index(stop) + 1], "stop")


def test_aborting_one_leaves_the_others_right(rig: Rig) -> None:
    requests = [generate(f"r{i}", prompt(6 + i, i), 20, temperature=0.0) for i in range(4)]
    for request in requests:
        rig.engine.add(request)
    for _ in range(3):
        rig.engine.step()
    rig.engine.abort("r1")
    answers = finish(rig.engine)
    assert set(answers) == {"r0", "r2", "r3"}
    for name in answers:
        index = int(name[1:])
        assert answers[name].tokens.tolist() == rig.reference.greedy(0, requests[index].prompt, 20)


def test_requests_that_join_a_running_batch_change_nothing_for_it(rig: Rig) -> None:
    early = [generate(f"early{i}", prompt(30 + i, i), 20, temperature=0.0) for i in range(2)]
    late = [generate(f"late{i}", prompt(3 + 20 * i, 50 + i), 6, temperature=0.0) for i in range(2)]
    for request in early:
        rig.engine.add(request)
    answers: dict[str, Completion] = {}
    for _ in range(4):
        answers |= {answer.request_id: answer for answer in rig.engine.step()}
    answers |= rig.run(*late)
    for request in [*early, *late]:
        expected = rig.reference.greedy(0, request.prompt, request.max_tokens)
        assert answers[request.request_id].tokens.tolist() == expected


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


def going_on(
    tokens: int, max_tokens: int, *, logprobs: int | None = None, stop: tuple[int, ...] = ()
) -> GenerateRequest:
    """Brings so many tokens (7) and log-probabilities."""
    count = tokens if logprobs is None else logprobs
    begun = Begun(np.full(tokens, 7, np.int32), np.zeros(count, np.float32), np.zeros(tokens, np.int32))
    return msgspec.structs.replace(generate("bad", prompt(5), max_tokens, stop=stop), begun=begun)


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
