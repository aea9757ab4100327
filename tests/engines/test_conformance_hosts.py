"""What every engine's host does, real or simulated, by its messages: the same requests, orders and answers.

Engines that hold weights are checked against transformers elsewhere (``test_conformance_*``); a simulated one has none,
so what is compared here is what an engine says of itself.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.proxy.engines.protocol import GenerateRequest
from actors.proxy.messages import HostAbort, HostRelease, HostResume, HostSuspend, HostUpdate, Released
from actors.weightsync.manifest import Receipt
from tests.engines.hosts import Hosted, HostKind, hosted
from tests.engines.reference import MAX_MODEL_LEN, MAX_SEQUENCES, prompt
from tests.engines.rigs import Rigs, generate
from tests.support.loops import run, settle, until

Course = Callable[[Hosted], Awaitable[None]]
Play = Callable[[Course], None]
LONG = MAX_MODEL_LEN - 6
"""Tokens of a request that does not end by itself within a test."""


@pytest.fixture(params=["torch", "vllm", "simulated"])
def play(request: pytest.FixtureRequest, rigs: Rigs) -> Play:
    """Runs a course at a host that serves version 0."""
    kind: HostKind = request.param
    if kind == "vllm":
        pytest.importorskip("vllm")

    def played(course: Course) -> None:
        if kind != "simulated":
            rigs(kind, True)  # which may take longer than a course

        async def whole() -> None:
            async with hosted(kind, lambda: rigs(kind if kind != "simulated" else "torch", True)) as made:
                await made.update(0)
                await made.ask(HostResume())
                await course(made)
                assert made.failures == []

        run(whole())

    return played


def like(request: GenerateRequest, **changes: Any) -> GenerateRequest:
    return msgspec.structs.replace(request, **changes)


def test_every_request_is_answered_once_to_whoever_asked_and_told_to_the_proxy(play: Play) -> None:
    async def course(made: Hosted) -> None:
        requests = [generate(f"r{i}", prompt(4 + i, i), 1 + i % 5) for i in range(3 * MAX_SEQUENCES)]
        answers = await made.run(*requests)
        wanted = {request.request_id: request.max_tokens for request in requests}
        assert {id_: len(answer.tokens) for id_, answer in answers.items()} == wanted
        assert {answer.finish_reason for answer in answers.values()} == {"length"}
        assert sorted(made.peer.served) == sorted(wanted)
        assert dict(zip(made.peer.served, made.peer.sampled, strict=True)) == wanted
        assert made.peer.tokens == sum(wanted.values())

    play(course)


def test_urgent_requests_are_answered_before_others_that_wait(play: Play) -> None:
    async def course(made: Hosted) -> None:
        await made.ask(HostSuspend())
        waiting = [generate(f"w{i}", prompt(6, i), 3) for i in range(2 * MAX_SEQUENCES)]
        urgent = [like(generate(f"u{i}", prompt(6, 50 + i), 3), urgent=True) for i in range(MAX_SEQUENCES)]
        made.add(*waiting, *urgent)
        await made.ask(HostResume())
        await until(lambda: len(made.answers) == 3 * MAX_SEQUENCES)
        assert set(list(made.answers)[:MAX_SEQUENCES]) == {request.request_id for request in urgent}

    play(course)


def test_a_seed_repeats_another_differs_and_none_differs_from_the_next(play: Play) -> None:
    async def course(made: Hosted) -> None:
        tokens = prompt(9, 1)
        asked = [("a", 5), ("b", 5), ("c", 6), ("d", None), ("e", None)]
        found = []
        for name, seed in asked:
            found.append((await made.run(generate(name, tokens, 12, seed=seed)))[name].tokens.tolist())
        assert found[0] == found[1]
        assert len({tuple(each) for each in found}) == 4

    play(course)


def test_only_allowed_tokens_are_sampled_and_a_single_one_has_probability_one(play: Play) -> None:
    async def course(made: Hosted) -> None:
        several, single = generate("s", prompt(8), 20, allowed=(3, 17, 40)), generate("o", prompt(8), 3, allowed=(42,))
        answers = await made.run(several, single)
        assert set(answers["s"].tokens.tolist()) <= {3, 17, 40}
        assert (answers["o"].tokens.tolist(), answers["o"].logprobs.tolist()) == ([42] * 3, [0.0] * 3)

    play(course)


def test_a_stop_token_or_string_ends_a_request_and_is_kept(play: Play) -> None:
    async def course(made: Hosted) -> None:
        request = generate("r", prompt(9, 1), 12, seed=5)
        path = (await made.run(request))["r"].tokens.tolist()
        by_id, text = path[4], made.texts(np.array(path[6:8]))
        by_text = next(count for count in range(1, 13) if text in made.texts(np.array(path[:count])))
        answers = await made.run(like(request, request_id="id", stop_token_ids=(by_id,)))
        answers = await made.run(like(request, request_id="text", stop=("never", text)))
        assert answers["id"].tokens.tolist() == path[: path.index(by_id) + 1]
        assert answers["text"].tokens.tolist() == path[:by_text]
        assert {answers["id"].finish_reason, answers["text"].finish_reason} == {"stop"}

    play(course)


def test_alternatives_are_told_best_first_and_no_probability_is_lost(play: Play) -> None:
    """Over as many tokens as are allowed, they are the whole distribution: their probabilities add up to one."""

    async def course(made: Hosted) -> None:
        request = generate("r", prompt(8, 2), 6, allowed=(3, 17, 18, 40, 77), seed=3, logprobs=5)
        answers = await made.run(request, generate("none", prompt(8, 2), 2))
        assert answers["none"].alternatives is None
        found = answers["r"].alternatives
        assert found is not None
        assert found.tokens.shape == (6, 5)
        for ids, logprobs, token, logprob in zip(
            found.tokens, found.logprobs, answers["r"].tokens, answers["r"].logprobs, strict=True
        ):
            assert sorted(ids.tolist()) == [3, 17, 18, 40, 77]
            assert sorted(logprobs.tolist(), reverse=True) == logprobs.tolist()
            assert math.isclose(float(np.exp(logprobs.astype(np.float64)).sum()), 1.0, abs_tol=1e-5)
            assert math.isclose(float(logprobs[ids.tolist().index(int(token))]), float(logprob), abs_tol=1e-6)

    play(course)


def test_what_can_never_run_is_refused_with_the_reason_and_the_others_go_on(play: Play) -> None:
    async def course(made: Hosted) -> None:
        wrong = {
            "logprobs is -1": generate("w0", prompt(5), logprobs=-1),
            "outside the vocabulary": generate("w1", np.array([5, made.vocabulary], np.int32)),
            "stop string": generate("w2", prompt(5), texts=("",)),
            "max_tokens": generate("w3", prompt(5), 0),
            "holds": generate("w4", prompt(MAX_MODEL_LEN - 3), 4),
        }
        answers = await made.run(*wrong.values(), generate("good", prompt(6), 3))
        assert list(answers) == ["good"]
        reasons = dict(made.peer.failed)
        assert list(reasons) == ["w0", "w1", "w2", "w3", "w4"]
        for id_, words in zip(reasons, wrong, strict=True):
            assert words in reasons[id_]

    play(course)


def test_an_aborted_request_gives_its_tokens_back_and_unknown_ones_are_ignored(play: Play) -> None:
    async def course(made: Hosted) -> None:
        await made.sample_some(generate("r", prompt(5, 1), LONG))
        made.node.tell(made.host, HostAbort("nobody"))
        made.node.tell(made.host, HostAbort("r"))
        await until(lambda: made.answers and made.peer.served)
        answer = made.answers["r"]
        assert answer.finish_reason == "aborted"
        assert 0 < len(answer.tokens) == len(answer.logprobs) == len(answer.versions) < LONG
        assert (made.peer.sampled, made.peer.tokens) == ([0], len(answer.tokens))

    play(course)


def test_a_request_that_is_let_go_is_not_answered_and_goes_on_from_its_tokens(play: Play) -> None:
    async def course(made: Hosted) -> None:
        request = generate("r", prompt(5, 1), LONG, seed=4, logprobs=2)
        await made.sample_some(request)
        (released,) = (await made.ask(HostRelease(["r", "nobody"]), Released)).requests
        begun = released.begun
        assert begun is not None
        await made.swap(2)
        assert made.answers == {}
        answer = (await made.run(like(request, begun=begun)))["r"]
        brought = len(begun.tokens)
        assert 0 < brought < LONG == len(answer.tokens)
        assert answer.tokens[:brought].tolist() == begun.tokens.tolist()
        assert answer.logprobs[:brought].tolist() == begun.logprobs.tolist()
        assert answer.versions.tolist() == [0] * brought + [2] * (LONG - brought)
        assert answer.alternatives is not None
        assert answer.alternatives.tokens.shape == (LONG, 2)
        assert made.peer.tokens == LONG, "each is counted once"

    play(course)


def test_a_suspended_host_samples_nothing_and_a_swap_keeps_the_tokens_so_far(play: Play) -> None:
    async def course(made: Hosted) -> None:
        await made.sample_some(generate("r", prompt(5, 1), LONG))
        made.add(generate("later", prompt(6, 2), 2))
        await settle()
        assert made.answers == {}
        await made.update(1)
        await made.ask(HostResume())
        await until(lambda: len(made.answers) == 2)
        versions = made.answers["r"].versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        assert made.answers["later"].versions.tolist() == [1, 1]

    play(course)


def test_a_host_that_serves_takes_no_version(play: Play) -> None:
    async def course(made: Hosted) -> None:
        await made.stage(1)
        with pytest.raises((RuntimeError, ValueError), match="version 1 is for a suspended engine"):
            await made.ask(HostUpdate(1), Receipt)
        assert (await made.run(generate("r", prompt(6), 2)))["r"].versions.tolist() == [0, 0]

    play(course)


def test_a_request_for_a_later_version_waits_for_it(play: Play) -> None:
    async def course(made: Hosted) -> None:
        made.add(like(generate("early", prompt(6, 1), 3), from_version=2))
        await made.run(generate("now", prompt(6, 2), 3))
        await made.swap(1)
        await made.run(generate("then", prompt(6, 2), 3))
        assert "early" not in made.answers
        await made.swap(2)
        await until(lambda: "early" in made.answers)
        assert made.answers["early"].versions.tolist() == [2, 2, 2]

    play(course)


def test_a_request_ends_superseded_with_its_tokens_when_its_last_version_goes(play: Play) -> None:
    async def course(made: Hosted) -> None:
        await made.sample_some(like(generate("r", prompt(5, 1), LONG), to_version=0))
        made.add(like(generate("unsampled", prompt(5, 2), 4), to_version=0), generate("free", prompt(5, 3), 2))
        await made.update(1)
        await until(lambda: len(made.answers) == 2)
        await made.ask(HostResume())
        await until(lambda: len(made.answers) == 3 and len(made.peer.served) == 3)
        reasons = {id_: answer.finish_reason for id_, answer in made.answers.items()}
        assert reasons == {"r": "superseded", "unsampled": "superseded", "free": "length"}
        versions = made.answers["r"].versions.tolist()
        assert 0 < len(versions) < LONG
        assert set(versions) == {0}
        assert made.answers["unsampled"].versions.tolist() == []
        assert sorted(made.peer.sampled) == [0, 0, 2]

    play(course)


def test_a_pinned_request_is_sampled_under_its_version_or_not_at_all(play: Play) -> None:
    async def course(made: Hosted) -> None:
        pinned = like(generate("pinned", prompt(6, 1), 3), from_version=1, to_version=1)
        made.add(pinned)
        await made.swap(1)
        await until(lambda: "pinned" in made.answers)
        assert made.answers["pinned"].versions.tolist() == [1, 1, 1]
        await made.swap(2)
        late = (await made.run(like(pinned, request_id="late")))["late"]
        assert (late.finish_reason, len(late.tokens)) == ("superseded", 0)

    play(course)


def test_a_pinned_request_whose_version_is_passed_over_is_not_sampled(play: Play) -> None:
    async def course(made: Hosted) -> None:
        made.add(like(generate("pinned", prompt(6, 1), 3), from_version=1, to_version=1))
        await made.swap(2)
        await until(lambda: "pinned" in made.answers)
        assert (made.answers["pinned"].finish_reason, len(made.answers["pinned"].tokens)) == ("superseded", 0)

    play(course)


def test_a_host_says_how_loaded_it_is_and_what_it_computed(play: Play) -> None:
    async def course(made: Hosted) -> None:
        await made.run(generate("r", prompt(20, 1), 5))
        await until(lambda: made.peer.loads)
        assert 0.0 <= made.peer.loads[-1].occupancy <= 1.0
        assert 0.0 <= made.peer.loads[-1].busy <= 1.0

    play(course)
