"""What every real engine samples, against plain transformers on the same weights."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from tests.engines.reference import VOCABULARY, prompt, spelled
from tests.engines.rigs import ALLOWED, TOLERANCE, Rig, aborted_after, generate


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


def test_a_stop_string_ends_generation_with_the_token_that_completes_it(rig: Rig) -> None:
    """It lies across two tokens here; what was sampled is kept whole."""
    path = rig.reference.greedy(0, prompt(10, 3), 12)
    stop = f"{path[4]}><{path[5]}"
    place = spelled(np.array(path)).index(stop) + len(stop)
    kept = next(count for count in range(1, 13) if len(spelled(np.array(path[:count]))) >= place)
    answer = rig.run(generate("r", prompt(10, 3), 12, temperature=0.0, texts=("never", stop)))["r"]
    assert (answer.tokens.tolist(), answer.finish_reason) == (path[:kept], "stop")


def test_a_stop_string_in_the_last_token_reports_stop_and_one_that_never_comes_length(rig: Rig) -> None:
    path = rig.reference.greedy(0, prompt(10, 3), 6)
    requests = [
        generate("stopped", prompt(10, 3), 1, temperature=0.0, texts=(f"<{path[0]}>",)),
        generate("whole", prompt(10, 3), 6, temperature=0.0, texts=("<999>",)),
        generate("of the prompt", prompt(10, 3), 6, allowed=(7,), texts=(spelled(prompt(10, 3)[-1:]) + "<7>",)),
    ]
    reasons = {name: answer.finish_reason for name, answer in rig.run(*requests).items()}
    assert reasons == {"stopped": "stop", "whole": "length", "of the prompt": "length"}


def test_a_stop_string_that_began_on_another_engine_ends_the_request(rig: Rig) -> None:
    path = rig.reference.greedy(0, prompt(83, 1), 12)
    assert len(set(path[:6])) == 6
    stop = spelled(np.array(path[3:6]))
    request = generate("r", prompt(83, 1), 12, temperature=0.0, texts=(stop,))
    begun = aborted_after(rig, request, 5)
    answer = rig.run(msgspec.structs.replace(request, begun=begun))["r"]
    assert (answer.tokens.tolist(), answer.finish_reason) == (path[:6], "stop")


@pytest.mark.parametrize("allowed", [None, ALLOWED[:4]], ids=["whole", "masked"])
def test_alternatives_are_the_most_probable_tokens_of_the_distribution_sampled_from(
    rig: Rig, allowed: tuple[int, ...] | None
) -> None:
    """Rows of one batch that want different numbers of them; of four allowed tokens no fifth has any probability."""
    requests = [
        generate(f"r{count}", prompt(9 + count, count), 6, temperature=0.8, allowed=allowed, seed=count, logprobs=count)
        for count in (0, 1, 5, 20)
    ]
    answers = rig.run(*requests)
    assert answers["r0"].alternatives is None
    for request in requests[1:]:
        answer = answers[request.request_id]
        rig.check_logprobs(request, answer)
        found = answer.alternatives
        assert found is not None
        assert found.tokens.shape == found.logprobs.shape == (6, request.logprobs)
        possible = min(request.logprobs, VOCABULARY if allowed is None else len(allowed))
        expected = rig.reference.distributions(request, answer)
        best = expected.sort(-1, descending=True).values[:, :possible].numpy()
        np.testing.assert_allclose(found.logprobs[:, :possible], best, rtol=0, atol=TOLERANCE)
        of_tokens = expected.gather(1, torch.from_numpy(found.tokens[:, :possible].astype(np.int64))).numpy()
        np.testing.assert_allclose(of_tokens, best, rtol=0, atol=TOLERANCE)
        assert (found.tokens[:, possible:] == -1).all()
        assert np.isneginf(found.logprobs[:, possible:]).all()


def test_alternatives_that_were_told_before_a_move_come_back_with_the_others(rig: Rig) -> None:
    request = generate("r", prompt(10, 4), 12, temperature=0.0, logprobs=3)
    begun = aborted_after(rig, request, 5)
    assert begun.alternatives is not None
    rig.load(2)
    answer = rig.run(msgspec.structs.replace(request, begun=begun))["r"]
    assert answer.alternatives is not None
    assert answer.alternatives.tokens.shape == (12, 3)
    assert answer.alternatives.tokens[:5].tolist() == begun.alternatives.tokens.tolist()
    best = rig.reference.distributions(request, answer).sort(-1, descending=True).values[:, :3].numpy()
    np.testing.assert_allclose(answer.alternatives.logprobs, best, rtol=0, atol=TOLERANCE)
