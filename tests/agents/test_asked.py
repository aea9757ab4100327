"""Requests are read strictly: a parameter is honoured, changes nothing, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actors.env.agents.asked import Chat, Refused, Text, read_chat, read_text
from actors.env.agents.conversation import Message
from actors.env.agents.tool_calls import ToolCall

HELLO = [{"role": "user", "content": "hello"}]


def chat(ignore: tuple[str, ...] = (), **fields: Any) -> Chat:
    return read_chat(json.dumps({"messages": HELLO, "model": "any", **fields}).encode(), ignore)


def text(**fields: Any) -> Text:
    return read_text(json.dumps({"prompt": "once", **fields}).encode(), ())


def refusal(**fields: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        chat(**fields)
    assert refused.value.status == 400
    return refused.value


def test_messages_are_read_into_one_form() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": [], "audio": None},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "user", "name": "ann", "content": "so?"},
    ]
    assert chat(messages=messages).messages == (
        Message("system", "Be brief."),
        Message("assistant", "", (ToolCall("c1", "f", "{}"),)),
        Message("tool", "3", (), "c1"),
        Message("user", "so?", (), "", "ann"),
    )


def test_limits_and_flags_are_read() -> None:
    sampling = chat(max_tokens=5, max_completion_tokens=4, stream=True, stream_options={"include_usage": True}).sampling
    assert (sampling.max_tokens, sampling.stream, sampling.stream_usage, sampling.logprobs) == (4, True, True, False)
    assert chat(allowed_token_ids=[7, 3, 7]).sampling.allowed == (3, 7)
    assert chat(temperature=1).sampling.temperature == 1.0
    assert (chat(stop="x").sampling.stop, chat(stop=["x", "y"]).sampling.stop) == (("x",), ("x", "y"))
    assert chat(logprobs=True, top_logprobs=3).sampling.alternatives == 3
    assert (text(logprobs=2).sampling.alternatives, text(logprobs=2).sampling.logprobs) == (2, True)


def test_a_completion_without_a_limit_has_that_of_openais_api() -> None:
    assert text().sampling.max_tokens == 16
    assert text(prompt=[1, 2], max_tokens=3).prompt == (1, 2)
    assert (text().sampling.logprobs, text(logprobs=0).sampling.logprobs) == (False, True)


def test_what_happens_anyway_and_what_is_only_a_note_may_be_said() -> None:
    assert chat(n=1, top_p=1.0, presence_penalty=0, logit_bias={}, stop=None, user="me", metadata={"a": "b"}) == chat()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("n", 2, "only 1 is supported here, found 2"),
        ("logit_bias", {"5": 1}, "only {} is supported"),
        ("echo", True, "only false is supported"),
        ("response_format", {"type": "json_object"}, "json_object"),
        ("seed", 7, "not supported here; leave it out, or let the job ignore it (environment.agent.ignore: [seed])"),
        ("guided_json", {}, "not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_unless_the_job_ignores_it(name: str, value: Any, says: str) -> None:
    refused = refusal(**{name: value})
    assert refused.message.startswith(f"{name}: ")
    assert says in refused.message
    assert refused.param == name
    assert chat((name,), **{name: value}) == chat()


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "", "audio": {"id": 1}}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [{}]}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}]},
            "tools[0].function.parameters.properties",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": 5}, "stop"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stream_options": {"rate": 1}}, "stream_options"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], where: str) -> None:
    assert refusal(**fields).param == where


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"\xff"', b'{"a":' + b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="no JSON object"):
        read_chat(body, ())
