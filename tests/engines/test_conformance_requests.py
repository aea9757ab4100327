"""What every real engine does with requests: each is answered once, joins, goes on and ends, beside others."""

from __future__ import annotations

import msgspec

from actors.proxy.engines.protocol import Completion
from hwprobe.fitting import Work
from tests.engines.reference import MAX_SEQUENCES, finish, prompt
from tests.engines.rigs import Rig, aborted_after, generate


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
