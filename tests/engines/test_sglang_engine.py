"""SGLang's engine against a server in SGLang's formats (``sglang_double``): SGLang itself could not be started here.
What it samples and says is compared with transformers on the weights that the engine was given."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.proxy.engines import make_engine
from actors.proxy.engines.http_server import ServerError, Stream
from actors.proxy.engines.protocol import Engine, EngineRefusal, LateRefusal
from actors.proxy.engines.served_engine import ServedEngine
from actors.weightsync.manifest import digest
from tests.engines.reference import MAX_MODEL_LEN, MAX_SEQUENCES, Reference, finish, prompt, spelled, write_tiny_policy
from tests.engines.rigs import TOLERANCE, generate
from tests.engines.sglang_double import SglangDouble, serving


class Served:
    def __init__(self, policy_dir: Path, url: str, double: SglangDouble, reference: Reference) -> None:
        self.policy_dir = policy_dir
        self.url = url
        self.double = double
        self.reference = reference
        self.answered: list[str] = []
        self.engine = self.make()
        self.engine.load_weights(0, reference.weights(0))

    def make(self) -> ServedEngine:
        made: Engine = make_engine(
            "sglang",
            self.policy_dir,
            url=self.url,
            max_sequences=MAX_SEQUENCES,
            max_model_len=MAX_MODEL_LEN,
            seed=11,
            texts=spelled,
        )
        assert isinstance(made, ServedEngine)
        return made

    def hold_up(self, for_s: float) -> None:
        """Neither tokens nor weights for so long."""
        self.double.gate.clear()
        threading.Timer(for_s, self.double.gate.set).start()

    def step_until_refused(self) -> None:
        while self.engine.unfinished():
            self.answered += [answer.request_id for answer in self.engine.step()]

    def step_until(self, request_id: str, tokens: int) -> None:
        """The request has at least so many tokens, and goes on."""
        for _ in range(400):
            assert not self.engine.step()
            begun = self.engine.sampled(request_id, 0)
            if begun is not None and len(begun.tokens) >= tokens:
                return
        pytest.fail("no token came")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    policy_dir = write_tiny_policy(tmp_path_factory.mktemp("policy"), tied=True)
    return policy_dir, Reference(policy_dir)


@pytest.fixture
def served(reference: tuple[Path, Reference]) -> Iterator[Served]:
    double = SglangDouble(reference[0])
    with serving(double) as url:
        made = Served(reference[0], url, double, reference[1])
        yield made
        made.engine.close()


@pytest.mark.parametrize("incremental", [False, True], ids=["all tokens so far", "new tokens"])
def test_tokens_and_logprobs_are_those_of_the_distribution_sampled_from(served: Served, incremental: bool) -> None:
    served.double.incremental = incremental
    requests = [generate(f"r{i}", prompt(5 + i, i), 6, temperature=0.7 + i / 10, logprobs=i) for i in range(7)]
    for request in requests:
        served.engine.add(request)
    answers = finish(served.engine)
    for request in requests:
        answer = answers[request.request_id]
        assert (len(answer.tokens), answer.finish_reason) == (6, "length")
        expected = served.reference.behaviour(request, answer)
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=TOLERANCE)
        if request.logprobs:
            assert answer.alternatives is not None
            best = served.reference.distributions(request, answer).sort(-1, descending=True).values.numpy()
            told = answer.alternatives.logprobs
            np.testing.assert_allclose(told, best[:, : request.logprobs], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.7),
        ("top_k", 3),
        ("min_p", 0.2),
        ("repetition_penalty", 1.5),
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
    ],
)
def test_what_a_server_prefers_changes_no_distribution(served: Served, name: str, value: float) -> None:
    served.double.preferred = {name: value}
    request = generate("r", prompt(9, 1), 12, temperature=0.8)
    served.engine.add(request)
    answer = finish(served.engine)["r"]
    np.testing.assert_allclose(answer.logprobs, served.reference.behaviour(request, answer), rtol=0, atol=TOLERANCE)


def test_greedy_tokens_stop_where_a_token_or_a_text_says(served: Served) -> None:
    path = served.reference.greedy(0, prompt(83, 1), 12)
    assert len(set(path[:6])) == 6
    requests = [
        generate("id", prompt(83, 1), 12, temperature=0.0, stop=(path[2],)),
        generate("text", prompt(83, 1), 12, temperature=0.0, texts=(spelled(np.array(path[3:5])),)),
        generate("whole", prompt(83, 1), 12, temperature=0.0),
    ]
    for request in requests:
        served.engine.add(request)
    answers = finish(served.engine)
    assert answers["id"].tokens.tolist() == path[:3]
    assert answers["text"].tokens.tolist() == path[:5]
    assert answers["whole"].tokens.tolist() == path
    assert [answers[name].finish_reason for name in ("id", "text", "whole")] == ["stop", "stop", "length"]


def test_an_aborted_request_keeps_its_tokens_and_leaves_the_server(served: Served) -> None:
    served.engine.add(generate("r", prompt(6, 1), 80))
    served.step_until("r", 3)
    answer = served.engine.abort("r")
    assert answer is not None
    assert answer.finish_reason == "aborted"
    assert 3 <= len(answer.tokens) < 80
    assert served.engine.unfinished() == 0
    deadline = time.monotonic() + 10
    while served.double.running and time.monotonic() < deadline:
        time.sleep(0.005)
    assert served.double.running == 0


def test_new_weights_keep_tokens_and_are_given_to_a_server_that_works_on_nothing(served: Served) -> None:
    request = generate("r", prompt(6, 1), 60, temperature=0.9)
    served.engine.add(request)
    served.step_until("r", 4)
    digests = served.engine.load_weights(1, served.reference.weights(1))
    expected = {name: digest(tensor.numpy().astype("<f4").tobytes()) for name, tensor in served.reference.weights(1)}
    assert digests == expected
    assert served.double.weight_version == "1"
    body = next(body for path, body in reversed(served.double.asked) if path == "/update_weights_from_disk")
    assert (body["flush_cache"], body["abort_all_requests"]) == (True, True)
    assert not Path(body["model_path"]).exists()
    answer = finish(served.engine)["r"]
    versions = answer.versions.tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    expected_logprobs = served.reference.behaviour(request, answer)
    np.testing.assert_allclose(answer.logprobs, expected_logprobs, rtol=0, atol=TOLERANCE)


def test_scores_are_the_servers_and_show_weights_that_it_did_not_use(served: Served) -> None:
    tokens = prompt(30, 5)
    expected = served.reference.score(0, tokens)
    np.testing.assert_allclose(served.engine.score(tokens), expected, rtol=0, atol=TOLERANCE)
    served.double.ignores_weights = True
    served.engine.load_weights(1, served.reference.weights(1))
    assert np.abs(served.engine.score(tokens) - served.reference.score(1, tokens)).max() > 0.1


def test_a_server_that_refuses_weights_serves_nothing_and_says_why(served: Served) -> None:
    served.double.refuses_weights = True
    with pytest.raises(ServerError, match="did not take it: no such architecture"):
        served.engine.load_weights(1, served.reference.weights(1))
    served.engine.add(generate("r", prompt(6, 1), 3))
    assert served.engine.step() == ()
    served.double.refuses_weights = False
    served.engine.load_weights(2, served.reference.weights(2))
    assert finish(served.engine)["r"].versions.tolist() == [2, 2, 2]


def test_what_the_server_cannot_sample_is_refused(served: Served) -> None:
    assert not served.engine.limits.masks
    with pytest.raises(EngineRefusal, match="2 tokens are allowed, but this engine samples from all"):
        served.engine.add(generate("r", prompt(6, 1), 3, allowed=(3, 4)))
    with pytest.raises(EngineRefusal, match="logprobs is 21"):
        served.engine.add(generate("r", prompt(6, 1), 3, logprobs=21))


def test_a_server_whose_logprobs_are_not_of_the_distribution_is_not_used(served: Served) -> None:
    served.double.original_logprobs = True
    with pytest.raises(ServerError, match="not those of the distribution sampled"):
        served.make()


def test_a_request_goes_on_from_the_tokens_that_it_brings(served: Served) -> None:
    request = generate("r", prompt(83, 1), 12, temperature=0.0)
    path = served.reference.greedy(0, request.prompt, 12)
    served.engine.add(generate("first", prompt(83, 1), 5, temperature=0.0))
    begun = finish(served.engine)["first"].begun()
    served.engine.add(msgspec.structs.replace(request, begun=begun))
    answer = finish(served.engine)["r"]
    assert answer.tokens.tolist() == path
    asked = [body for route, body in served.double.asked if route == "/generate" and body.get("stream")]
    assert asked[-1]["input_ids"] == request.prompt.tolist() + path[:5]
    assert asked[-1]["sampling_params"]["max_new_tokens"] == 7


def test_a_server_that_is_gone_ends_the_engine_by_name(reference: tuple[Path, Reference]) -> None:
    double = SglangDouble(reference[0])
    with serving(double) as url:
        made = Served(reference[0], url, double, reference[1])
    made.engine.add(generate("r", prompt(6, 1), 3))
    with pytest.raises(ServerError, match="generate: ConnectionRefusedError"):
        finish(made.engine)
    with pytest.raises(ServerError, match="ConnectionRefusedError"):
        made.make()


@pytest.mark.parametrize(
    "event",
    [
        b"5",
        b'{"meta_info": {"completion_tokens": "many"}}',
        b'{"meta_info": {"completion_tokens": 1, "output_token_logprobs": [5]}}',
        b'{"meta_info": {"completion_tokens": 1, "finish_reason": 7}}',
        b"[DONE]",
    ],
)
def test_an_answer_that_cannot_be_read_or_ends_early_ends_the_engine_by_name(served: Served, event: bytes) -> None:
    served.double.instead = event
    served.engine.add(generate("r", prompt(6, 1), 3))
    with pytest.raises(ServerError, match=r"request r: (cannot be read: |the answer ended before the request)"):
        finish(served.engine, limit=100)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (400, "status 400"),
        (422, "status 422"),
        ({"error": {"message": "too long for me"}}, "too long for me"),
        ({"error": {"message": "too long for me", "code": 400}}, "too long for me"),
        (
            {
                "meta_info": {
                    "completion_tokens": 0,
                    "finish_reason": {"type": "abort", "message": "not with me", "status_code": 400},
                }
            },
            "not with me",
        ),
    ],
)
def test_a_request_that_the_server_refuses_is_refused_by_name_and_the_others_go_on(
    served: Served, refusal: int | dict[str, Any], words: str
) -> None:
    bad, good = prompt(6, 1), prompt(6, 2)
    assert bad[0] != good[0]
    served.double.refuses = {int(bad[0]): refusal}
    served.engine.add(generate("good", good, 5))
    served.engine.add(generate("bad", bad, 5))
    with pytest.raises(LateRefusal, match=f"request bad: .*{words}") as refused:
        served.step_until_refused()
    assert refused.value.request_id == "bad"
    assert [*served.answered, *finish(served.engine)] == ["good"]
    assert served.engine.abort("bad") is None


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "out of memory", "code": 500}},
        {
            "meta_info": {
                "completion_tokens": 0,
                "finish_reason": {"type": "abort", "message": "out of memory", "status_code": 503},
            }
        },
    ],
)
def test_an_error_that_is_not_of_the_request_ends_the_engine(served: Served, event: dict[str, Any]) -> None:
    served.double.refuses = {int(prompt(6, 1)[0]): event}
    served.engine.add(generate("r", prompt(6, 1), 5))
    with pytest.raises(ServerError, match="out of memory"):
        finish(served.engine)


def test_a_status_that_meets_every_request_ends_the_engine(served: Served) -> None:
    served.double.refuses = {int(prompt(6, 1)[0]): 401}
    served.engine.add(generate("r", prompt(6, 1), 5))
    with pytest.raises(ServerError, match="status 401"):
        finish(served.engine)


def test_what_may_take_long_is_waited_for_longer_than_an_answer(served: Served) -> None:
    served.engine.server.silence_s = 0.3
    served.engine.add(generate("r", prompt(6, 1), 80))
    served.step_until("r", 2)
    served.hold_up(0.8)
    assert len(finish(served.engine)["r"].tokens) == 80
    served.hold_up(0.8)
    served.engine.load_weights(1, served.reference.weights(1))
    assert served.double.weight_version == "1"


def test_an_answer_that_is_opened_late_does_not_take_the_place_of_a_newer_one(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one is closed when its request is aborted."""
    opened: list[Stream] = []
    closed: list[Stream] = []
    asked, late = threading.Event(), threading.Event()
    open_stream, close_stream = served.engine.open, Stream.close

    def open_slowly(*arguments: Any) -> Stream:
        if not asked.is_set():
            asked.set()
            late.wait(10.0)
        opened.append(open_stream(*arguments))
        return opened[-1]

    def close(stream: Stream) -> None:
        close_stream(stream)
        closed.append(stream)

    monkeypatch.setattr(served.engine, "open", open_slowly)
    monkeypatch.setattr(Stream, "close", close)
    served.engine.add(generate("r", prompt(6, 1), 80))
    served.engine.step()
    assert asked.wait(10.0)
    served.engine.load_weights(1, served.reference.weights(1))
    served.step_until("r", 1)
    late.set()
    deadline = time.monotonic() + 10
    while (len(opened) < 2 or opened[1] not in closed) and time.monotonic() < deadline:
        time.sleep(0.005)
    served.engine.abort("r")
    assert opened[0] in closed
