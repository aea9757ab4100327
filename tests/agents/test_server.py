"""The endpoint as a client sees it: OpenAI's own, unmodified, and some that behave badly."""

from __future__ import annotations

import gzip
import json
import logging
import select
import socket
import time
import urllib.error
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from actors.env.agents import server
from actors.env.agents.protocol import Session
from actors.env.messages import Outcome
from actors.env.tokenizers import ByteTokenizer
from actors.proxy.engines.protocol import Alternatives, Completion
from actors.proxy.messages import Finished
from tests.agents.support import ASK, CHAT, World, post, world
from tests.support.loops import run, until

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "open", "parameters": {"properties": {"door": {"type": "string"}}}}}
]
SAYS = "Let me see.\nopen: left"


def answers(made: World, text: str, *, ended: bool) -> None:
    """The engine that was asked says this, and ends its turn with the token for that, or with a stop text."""
    (id_,) = made.proxy.held
    tokens = np.append(ByteTokenizer().encode(text), [257] * ended).astype(np.int32)
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 8
    alternatives = None
    if made.proxy.requests[-1].logprobs:
        best = np.array([ord("y"), ord("n"), -1], np.int32), np.array([-0.25, -2.0, -np.inf], np.float32)
        alternatives = Alternatives(*(np.tile(each, (len(tokens), 1)) for each in best))
    completion = Completion(id_, tokens, logprobs, 0 * tokens, "stop", alternatives)
    made.node.tell(made.proxy.held.pop(id_), Finished("e0", [completion]))


def played(agent: Any, *says: str, ended: bool = True, **settings: Any) -> tuple[Outcome, World]:
    """Run an agent; the engine answers with these texts one after another, and with "R" where there are none."""

    async def test() -> tuple[Outcome, World]:
        async with world(agent, **settings) as made:
            made.proxy.holds = lambda request: bool(says)
            made.start("t1")
            for text in says:
                await until(lambda: made.proxy.held or made.coordinator.outcomes)
                if made.proxy.held:
                    answers(made, text, ended=ended)
            return await made.outcome("t1"), made

    return run(test())


def test_openais_client_sees_text_calls_logprobs_ids_and_usage() -> None:
    openai = pytest.importorskip("openai")
    seen: list[Any] = []

    def agent(told: Session) -> float:
        client = openai.OpenAI(base_url=told.base_url, api_key=told.api_key, max_retries=0)
        seen.append(client.chat.completions.create(**ASK, model="any", tools=TOOLS, logprobs=True))
        messages = [*ASK["messages"], seen[0].choices[0].message]
        messages.append({"role": "tool", "tool_call_id": seen[0].choices[0].message.tool_calls[0].id, "content": "ok"})
        seen.append(client.chat.completions.create(messages=messages, model="any", tools=TOOLS))
        seen.append([model.id for model in client.models.list()])
        seen.append(client.models.retrieve("tiny").id)
        return 1.0

    outcome, made = played(agent, SAYS, "Done.", tool_calls="line")
    assert outcome.state == "stored", outcome
    first, second, models, model = seen
    choice = first.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "Let me see.",
        "tool_calls",
    )
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "open",
        {"door": "left"},
    )
    sampled = [*SAYS.encode(), 257]
    assert choice.model_extra["token_ids"] == sampled
    assert [each.logprob for each in choice.logprobs.content] == [-(n + 1) / 8 for n in range(len(sampled))]
    assert bytes(byte for each in choice.logprobs.content for byte in each.bytes) == SAYS.encode()
    prompt = len("left or right?\n")
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (prompt, len(sampled))
    assert (first.object, first.model, first.id) == ("chat.completion", "tiny", "chatcmpl-t1/0")
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("Done.", "stop")
    assert second.choices[0].message.tool_calls is None
    assert (models, model) == (["tiny"], "tiny")
    (segment,) = made.store.kept["t1"].segments
    assert segment.tokens.tolist() == [*b"left or right?\n", *sampled, *b"\nok\n", *b"Done.", 257]
    assert segment.logprobs[segment.loss_mask == 1][: len(sampled)].tolist() == [
        -(n + 1) / 8 for n in range(len(sampled))
    ]


def test_openais_client_reads_streams() -> None:
    openai = pytest.importorskip("openai")
    seen: list[Any] = []

    def agent(told: Session) -> float:
        client = openai.OpenAI(base_url=told.base_url, api_key=told.api_key, max_retries=0)
        asked = {"model": "any", "stream": True, "stream_options": {"include_usage": True}}
        seen.append(list(client.chat.completions.create(**ASK, tools=TOOLS, **asked)))
        with client.chat.completions.stream(model="any", tools=TOOLS, **ASK) as stream:
            seen.append(stream.get_final_completion())
        seen.append(list(client.completions.create(prompt="once", max_tokens=4, **asked)))
        return 1.0

    outcome, _ = played(agent, SAYS, SAYS, "upon", tool_calls="line")
    assert outcome.state == "stored", outcome
    pieces, whole, texts = seen
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == "Let me see."
    (call,) = pieces[0].choices[0].delta.tool_calls
    assert (call.index, call.function.name, call.function.arguments) == (0, "open", '{"door": "left"}')
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices] == [None, "tool_calls"]
    assert pieces[-1].usage.completion_tokens == len(SAYS) + 1
    assert whole.choices[0].message.tool_calls[0].function.arguments == '{"door": "left"}'
    assert "".join(piece.choices[0].text for piece in texts if piece.choices) == "upon"
    assert texts[-1].usage.total_tokens == len("once") + len("upon") + 1


def test_what_ends_with_a_stop_is_told_without_it_and_recorded_with_it() -> None:
    seen: list[Any] = []

    def agent(told: Session) -> float:
        _, first = post(told, "/completions", {"prompt": "Think.", "stop": ["\nSaw:", "\nEnd"], "max_tokens": 20})
        said = first["choices"][0]["text"]
        seen.append(said)
        seen.append(post(told, "/completions", {"prompt": f"Think.{said}\nSaw: a box", "stop": "#"})[0])
        return 1.0

    outcome, made = played(agent, "I look.\nSaw:", " so", ended=False, max_tokens=20)
    assert (outcome.state, seen) == ("stored", ["I look.", 200]), outcome
    assert [request.stop for request in made.proxy.requests] == [("\nSaw:", "\nEnd"), ("#",)]
    (segment,) = made.store.kept["t1"].segments
    assert bytes(segment.tokens.tolist()) == b"Think.I look.\nSaw: a box so"
    assert bytes(segment.tokens[segment.loss_mask == 1].tolist()) == b"I look.\nSaw: so"


def test_alternatives_are_told_beside_what_was_sampled() -> None:
    seen: list[Any] = []

    def agent(told: Session) -> float:
        seen.append(post(told, body={**ASK, "logprobs": True, "top_logprobs": 2})[1]["choices"][0]["logprobs"])
        seen.append(post(told, "/completions", {"prompt": "x", "logprobs": 2})[1]["choices"][0]["logprobs"])
        seen.append(post(told, body={**ASK, "logprobs": True, "top_logprobs": 21})[1]["error"]["message"])
        return 1.0

    outcome, made = played(agent, "ab", "c", ended=False)
    assert outcome.state == "stored", outcome
    chat, text, refused = seen
    best = [{"token": "y", "logprob": -0.25, "bytes": [121]}, {"token": "n", "logprob": -2.0, "bytes": [110]}]
    assert [each["top_logprobs"] for each in chat["content"]] == [best, best]
    assert text["top_logprobs"] == [{"y": -0.25, "n": -2.0}]
    assert [request.logprobs for request in made.proxy.requests] == [2, 2]
    assert "logprobs is 21, expected 0..20 alternatives" in refused


def test_openais_client_raises_its_own_errors() -> None:
    openai = pytest.importorskip("openai")
    seen: list[Any] = []

    def agent(told: Session) -> float:
        client = openai.OpenAI(base_url=told.base_url, api_key=told.api_key)
        with pytest.raises(openai.BadRequestError, match=r"temperature: the run samples at 1 .*found 0\.5") as caught:
            client.chat.completions.create(**ASK, model="any", temperature=0.5)
        seen.append(caught.value.param)
        with pytest.raises(openai.BadRequestError, match="only 1 is supported here, found 3"):
            client.chat.completions.create(**ASK, model="any", n=3)
        with pytest.raises(openai.BadRequestError, match="allowed_token_ids: expected token ids from 0 to 263"):
            client.chat.completions.create(**ASK, model="any", extra_body={"allowed_token_ids": [264]})
        with pytest.raises(openai.AuthenticationError, match="belongs to no session"):
            openai.OpenAI(base_url=told.base_url, api_key="sk-guess").models.list()
        with pytest.raises(openai.NotFoundError, match="no such model: gpt"):
            client.models.retrieve("gpt")
        with pytest.raises(openai.NotFoundError, match="no such path: /v1/embeddings"):
            client.embeddings.create(model="any", input="x")
        client.chat.completions.create(**ASK, model="any", temperature=1.0)
        return 1.0

    outcome, _ = played(agent)
    assert (outcome.state, outcome.turns, seen) == ("stored", 1, ["temperature"]), outcome


def test_what_the_job_ignores_may_be_sent() -> None:
    def agent(told: Session) -> float:
        return float(post(told, body={**ASK, "temperature": 0.2, "seed": 3})[0])

    assert played(agent, ignore=("temperature", "seed"))[0].reward == 2000.0


def test_bad_keys_methods_and_bodies_are_answered_and_cost_the_session_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_BYTES", 1000)
    monkeypatch.setattr(server, "BODY_S", 1.0)
    seen: list[int] = []

    def agent(told: Session) -> float:
        head = (
            f"POST {urlsplit(told.base_url).path}{CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {told.api_key}\r\n"
        )
        seen.append(post(told, body=b"x" * 1001)[0])
        seen.append(post(told, body=b"{")[0])
        seen.append(raw(told, head + "Content-Length: 10\r\n\r\n{"))
        seen.append(raw(told, f"GET /v1{CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {told.api_key}\r\n\r\n"))
        seen.append(raw(told, f"POST /v1{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"))
        seen.append(raw(told, "no HTTP at all\r\n\r\n"))
        seen.append(post(told)[0])
        return 1.0

    assert played(agent)[0].state == "stored"
    assert seen == [413, 400, 408, 405, 401, 400, 200]


def test_clients_that_hang_hold_up_nobody_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CLIENTS", 3)

    def agent(told: Session) -> float:
        url = urlsplit(told.base_url)
        hanging = [socket.create_connection((url.hostname, url.port), 10) for _ in range(2)]
        status = post(told)[0]
        hanging += [socket.create_connection((url.hostname, url.port), 10) for _ in range(4)]
        refused = set[socket.socket]()
        while len(refused) < 3:  # a connection that was cut is readable, one that is held is not
            cut, _, _ = select.select([each for each in hanging if each not in refused], [], [], 5)
            if not cut:
                raise TimeoutError(f"{len(refused)} of 6 clients were refused, where 3 may be there")
            refused.update(cut)
        for connection in hanging:
            connection.close()
        return float(status == 200)

    assert played(agent)[0].reward == 10.0


def test_a_client_that_never_asks_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.1)

    def agent(told: Session) -> float:
        url = urlsplit(told.base_url)
        with socket.create_connection((url.hostname, url.port), 10) as silent:
            let_go = silent.recv(1) == b""
        return float(let_go and post(told)[0] == 200)

    assert played(agent)[0].reward == 10.0


def test_a_client_that_has_asked_and_asks_nothing_more_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.2)

    def agent(told: Session) -> float:
        url = urlsplit(told.base_url)
        with socket.create_connection((url.hostname, url.port), 5) as silent:
            silent.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")  # answered, though it has no key
            answered = silent.recv(64)
            while silent.recv(4096):  # to its end; raises ``TimeoutError`` where the connection is kept
                pass
        return float(answered.startswith(b"HTTP/1.1 401") and post(told)[0] == 200)

    assert played(agent)[0].reward == 10.0


def head(told: Session, *fields: str) -> bytes:
    """Of a chat's request."""
    lines = [f"POST /v1{CHAT} HTTP/1.1", "Host: x", f"Authorization: Bearer {told.api_key}", *fields]
    return "\r\n".join([*lines, "", ""]).encode()


def connected(told: Session) -> socket.socket:
    url = urlsplit(told.base_url)
    return socket.create_connection((url.hostname, url.port), 10)


def test_clients_that_break_off_or_speak_no_http_are_not_told_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def agent(told: Session) -> float:
        for sent in (
            head(told, "Content-Length: 100") + b"{",
            head(told, "Transfer-Encoding: chunked") + b"5\r\nhel",
            head(told, "Transfer-Encoding: chunked") + b"zz\r\n",
            b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ):
            with connected(told) as rude:
                rude.sendall(sent)
                rude.shutdown(socket.SHUT_WR)
                while rude.recv(4096):
                    pass
        return float(post(told)[0])

    outcome, _ = played(agent)
    assert (outcome.env_return, outcome.turns) == (200.0, 1)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_body_that_is_packed_is_refused_without_unpacking_it() -> None:
    seen: list[int] = []

    def agent(told: Session) -> float:
        body = gzip.compress(json.dumps(ASK).encode())
        for sent in (body, b"not packed at all"):
            with connected(told) as client:
                client.sendall(head(told, "Content-Encoding: gzip", f"Content-Length: {len(sent)}") + sent)
                seen.append(int(client.recv(64).split()[1]))
        return float(post(told)[0])

    assert played(agent)[0].env_return == 200.0
    assert seen == [415, 415]


def test_a_client_that_asks_whether_to_send_its_body_is_told_to() -> None:
    def agent(told: Session) -> float:
        body = json.dumps(ASK).encode()
        with connected(told) as client:
            client.sendall(head(told, "Expect: 100-continue", f"Content-Length: {len(body)}"))
            assert client.recv(1024) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(body)
            return float(client.recv(64).split()[1])

    assert played(agent)[0].env_return == 200.0


def test_an_error_repeats_little_of_what_was_sent() -> None:
    seen: list[Any] = []

    def agent(told: Session) -> float:
        wrong: list[Any] = [{"tool_choice": "x" * 100_000}, {"n": ["x" * 100_000]}, {"x" * 100_000: 1}]
        seen.extend(post(told, body={**ASK, **each}) for each in wrong)
        return float(post(told)[0])

    assert played(agent)[0].env_return == 200.0
    assert [status for status, _ in seen] == [400, 400, 400]
    assert max(len(json.dumps(answer)) for _, answer in seen) < 5000
    assert "found 'xxx" in seen[0][1]["error"]["message"]


def test_a_fault_of_the_endpoint_costs_one_request_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: Any) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(server, "text_answer", fails)

    def agent(told: Session) -> float:
        status, answer = post(told, "/completions", {"prompt": "once"})
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (500, "server_error", "internal_error")
        return float(post(told)[0])

    assert played(agent)[0].env_return == 200.0
    assert "POST /v1/completions failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_client_that_reads_nothing_of_a_long_answer_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READ_S", 0.5)
    monkeypatch.setattr(server, "CLIENTS", 1)
    prompt = json.dumps({"prompt": "x" * 1_000_000, "return_token_ids": True}).encode()  # 5 MB of ids

    def agent(told: Session) -> float:
        url = urlsplit(told.base_url)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(10)
            client.connect((url.hostname, url.port))
            asked = head(told, f"Content-Length: {len(prompt)}").replace(CHAT.encode(), b"/completions")
            client.sendall(asked + prompt)
            for _ in range(100):
                try:
                    return float(post(told)[0])
                except (ConnectionError, urllib.error.URLError):  # the only place is taken
                    time.sleep(0.1)
        return 0.0

    assert played(agent, max_model_len=2_000_000, timeout_s=18.0)[0].env_return == 200.0


def raw(told: Session, text: str) -> int:
    """The status of what is answered to these bytes."""
    url = urlsplit(told.base_url)
    with socket.create_connection((url.hostname, url.port), 10) as connection:
        connection.sendall(text.encode())
        return int(connection.recv(64).split()[1])
