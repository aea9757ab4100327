"""The engine for servers with OpenAI's interface, against vLLM's own server in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import save_file

from actors.proxy.engines import make_engine
from actors.proxy.engines.http_server import Server, ServerError
from actors.proxy.engines.openai_engine import WeightsAreFixed
from actors.proxy.engines.protocol import Engine, EngineRefusal, LateRefusal
from tests.engines.reference import MAX_MODEL_LEN, MAX_SEQUENCES, Reference, finish, prompt, spelled, write_tiny_policy
from tests.engines.rigs import ALLOWED, TOLERANCE, generate

pytestmark = pytest.mark.deep  # each server starts for half a minute

START_S = 900.0

PREFERRED = {
    "do_sample": True,
    "temperature": 0.3,
    "top_p": 0.7,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "max_new_tokens": 2,
}
"""Of the model's ``generation_config.json``: none of it may be seen in any answer."""


@contextmanager
def vllm_server(policy_dir: Path, log: Path, *, logprobs_mode: str) -> Iterator[str]:
    """The URL of vLLM's server for a model directory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "--model": policy_dir,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--max-model-len": MAX_MODEL_LEN + 1,
        "--max-num-seqs": MAX_SEQUENCES,
        "--block-size": 32,
        "--logprobs-mode": logprobs_mode,
    }
    switches = ["--skip-tokenizer-init", "--enforce-eager", "--no-enable-chunked-prefill", "--disable-log-stats"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *switches]
    for name, value in options.items():
        command += [name, str(value)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | environment)
        try:
            url = f"http://127.0.0.1:{port}/v1"
            _wait(url, server, log)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:  # it is still starting
                server.kill()
                server.wait(30)


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            Server(url).ask("/models")
        except ServerError:
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"no server within {START_S:g} s: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """With the weights of version 0, and with what vLLM's server takes for parameters that a request leaves out."""
    pytest.importorskip("vllm")
    policy_dir = write_tiny_policy(tmp_path_factory.mktemp("policy"), tied=True)
    reference = Reference(policy_dir)
    weights = {name: tensor.contiguous() for name, tensor in reference.weights(0)}
    save_file(weights, policy_dir / "model.safetensors", metadata={"format": "pt"})
    (policy_dir / "generation_config.json").write_text(json.dumps(PREFERRED))
    return policy_dir, reference


def make(policy_dir: Path, url: str) -> Engine:
    return make_engine(
        "openai", policy_dir, url=url, max_sequences=MAX_SEQUENCES, max_model_len=MAX_MODEL_LEN, seed=11, texts=spelled
    )


@pytest.fixture(scope="module")
def engine(policy: tuple[Path, Reference], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("server") / "log"
    with vllm_server(policy[0], log, logprobs_mode="processed_logprobs") as url:
        made = make(policy[0], url)
        made.load_weights(0, policy[1].weights(0))
        yield made
        made.close()


def test_tokens_and_logprobs_are_those_of_the_distribution_sampled_from(
    engine: Engine, policy: tuple[Path, Reference]
) -> None:
    requests = [
        generate(
            f"r{i}",
            prompt(9 + i, i),
            10,
            temperature=0.6 + i / 10,
            allowed=ALLOWED if i % 2 else None,
            seed=i,
            logprobs=i,
        )
        for i in range(3 * MAX_SEQUENCES)
    ]
    for request in requests:
        engine.add(request)
    answers = finish(engine)
    for request in requests:
        answer = answers[request.request_id]
        assert (len(answer.tokens), answer.finish_reason) == (10, "length")
        expected = policy[1].behaviour(request, answer)
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=TOLERANCE)
        if request.logprobs:
            assert answer.alternatives is not None
            possible = min(request.logprobs, len(ALLOWED)) if request.allowed_token_ids else request.logprobs
            best = policy[1].distributions(request, answer).sort(-1, descending=True).values.numpy()
            told = answer.alternatives.logprobs
            np.testing.assert_allclose(told[:, :possible], best[:, :possible], rtol=0, atol=TOLERANCE)
            assert np.isneginf(told[:, possible:]).all()


def test_a_seed_repeats_and_stops_end_what_is_greedy(engine: Engine, policy: tuple[Path, Reference]) -> None:
    path = policy[1].greedy(0, prompt(83, 1), 12)
    requests = [
        generate("a", prompt(9, 1), 12, seed=5),
        generate("b", prompt(9, 1), 12, seed=5),
        generate("c", prompt(9, 1), 12, seed=6),
        generate("id", prompt(83, 1), 12, temperature=0.0, stop=(path[2],)),
        generate("text", prompt(83, 1), 12, temperature=0.0, texts=(spelled(np.array(path[3:5])),)),
        generate("end", prompt(10, 3), 3, allowed=(1,)),  # the model's own end token, which is not named
    ]
    for request in requests:
        engine.add(request)
    answers = {name: answer.tokens.tolist() for name, answer in finish(engine).items()}
    assert answers["a"] == answers["b"] != answers["c"]
    assert answers["id"] == path[:3]
    assert answers["text"] == path[:5]
    assert answers["end"] == [1, 1, 1]


def test_an_aborted_request_keeps_its_tokens_and_goes_on_from_them(
    engine: Engine, policy: tuple[Path, Reference]
) -> None:
    request = generate("r", prompt(5, 1), 80, temperature=0.0)
    engine.add(request)
    while engine.sampled("r", 0) is None:
        engine.step()
    aborted = engine.abort("r")
    assert aborted is not None
    begun = aborted.begun()
    assert begun is not None
    assert aborted.tokens.tolist() == policy[1].greedy(0, request.prompt, 80)[: len(aborted.tokens)]


def test_scores_are_the_servers(engine: Engine, policy: tuple[Path, Reference]) -> None:
    tokens = prompt(MAX_MODEL_LEN, 5)
    np.testing.assert_allclose(engine.score(tokens), policy[1].score(0, tokens), rtol=0, atol=TOLERANCE)


def test_other_weights_than_the_servers_show_in_the_canary_and_no_second_version_is_taken(
    engine: Engine, policy: tuple[Path, Reference]
) -> None:
    canary = prompt(20, 6)
    assert np.abs(engine.score(canary) - policy[1].score(1, canary)).max() > 0.1
    with pytest.raises(WeightsAreFixed, match="cannot be given others"):
        engine.load_weights(1, policy[1].weights(1))
    assert engine.step() == ()
    engine.load_weights(0, policy[1].weights(0))


def test_what_can_never_run_is_refused_before_the_server_is_asked(engine: Engine) -> None:
    with pytest.raises(EngineRefusal, match="make 97, but this engine holds 96"):
        engine.add(generate("r", prompt(90), 7))


def test_a_request_that_the_server_refuses_is_refused_by_name_and_the_others_go_on(
    engine: Engine, policy: tuple[Path, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the server was started anew, for shorter sequences than its engine knows of."""
    monkeypatch.setattr(engine, "limits", msgspec.structs.replace(engine.limits, max_model_len=2 * MAX_MODEL_LEN))
    engine.add(generate("good", prompt(9, 1), 80, temperature=0.0))
    engine.add(generate("bad", prompt(100), 20))
    with pytest.raises(LateRefusal, match=r"request bad: .*/completions: status 400: "):
        _step_until_refused(engine)
    assert finish(engine)["good"].tokens.tolist() == policy[1].greedy(0, prompt(9, 1), 80)


def _step_until_refused(engine: Engine) -> None:
    while engine.unfinished():
        engine.step()


def test_a_server_that_tells_other_logprobs_is_not_used(policy: tuple[Path, Reference], tmp_path: Path) -> None:
    with (
        vllm_server(policy[0], tmp_path / "log", logprobs_mode="raw_logprobs") as url,
        pytest.raises(ServerError, match="start it with --logprobs-mode processed_logprobs"),
    ):
        make(policy[0], url)
