"""What an agent asks, read from the bodies of OpenAI's API.

Invariant: a parameter is honoured, or it changes nothing (its neutral value, or it is only a note), or it is refused by
name; a job may list those that its agents send and that are to be ignored.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any, NoReturn

import msgspec

from actors.env.agents.conversation import Message
from actors.env.agents.tool_calls import Tool, ToolCall


class Refused(Exception):
    """An answer that is an error: as OpenAI's API has it."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of request have in common."""

    max_tokens: int | None
    temperature: float | None
    allowed: tuple[int, ...] | None
    stream: bool
    stream_usage: bool
    stop: tuple[str, ...]
    logprobs: bool  # those of the sampled tokens
    alternatives: int  # as many of the most probable ones beside them, at each place
    token_ids: bool  # of the prompt; the answer's always come along


class Chat(msgspec.Struct, frozen=True):
    """``POST /v1/chat/completions``"""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    calls: bool  # whether tool calls are taken out of the text
    sampling: Sampling


class Text(msgspec.Struct, frozen=True):
    """``POST /v1/completions``"""

    prompt: str | tuple[int, ...]
    sampling: Sampling


NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "store": False,
    "echo": False,
    "suffix": "",
    "modalities": ["text"],
}
"""Parameters that may be sent with this value: it is what happens anyway."""

NOTES = frozenset({"model", "user", "metadata", "safety_identifier", "prompt_cache_key"})
"""These change no answer: the key alone says which policy and which session answer."""

_COMMON = {"max_tokens", "temperature", "stop", "stream", "stream_options", "logprobs"}
_COMMON |= {"allowed_token_ids", "return_token_ids"}  # as vLLM's server has them
_CHAT = _COMMON | {"messages", "tools", "tool_choice", "max_completion_tokens", "top_logprobs"}
_TEXT = _COMMON | {"prompt"}
DEFAULT_TEXT_TOKENS = 16
"""Of a completion that names no limit, as in OpenAI's API."""


def read_chat(body: bytes, ignore: Container[str]) -> Chat:
    """Raises ``Refused``."""
    fields = _fields(body, _CHAT, ignore)
    messages = _of(list[Any], fields, "messages")
    if not messages:
        _wrong("messages", "expected at least one")
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(_of(list[Any], fields, "tools", [])))
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        _wrong("tool_choice", f'expected "auto" or "none" (no call can be forced here), found {choice!r}')
    limit = fields.get("max_completion_tokens", fields.get("max_tokens"))
    logprobs, alternatives = _of(bool, fields, "logprobs", False), _of(int, fields, "top_logprobs", 0)
    if alternatives and not logprobs:
        _wrong("top_logprobs", "expected logprobs to be true with it")
    return Chat(
        tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages)),
        tools,
        bool(tools) and choice == "auto",
        _sampling(fields, limit, logprobs=logprobs, alternatives=alternatives),
    )


def read_text(body: bytes, ignore: Container[str]) -> Text:
    """Raises ``Refused``."""
    fields = _fields(body, _TEXT, ignore)
    prompt = _of(str | list[int], fields, "prompt")
    if not prompt:
        _wrong("prompt", "expected one text, or one list of token ids, that is not empty")
    asked = _of(int | None, fields, "logprobs", None)
    limit = fields.get("max_tokens", DEFAULT_TEXT_TOKENS)
    sampling = _sampling(fields, limit, logprobs=asked is not None, alternatives=asked or 0)
    return Text(prompt if isinstance(prompt, str) else tuple(prompt), sampling)


def _fields(body: bytes, known: set[str], ignore: Container[str]) -> dict[str, Any]:
    """What is neither absent nor neutral nor ignored."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON object: {error}", code="invalid_json") from None
    left = {n: value for n, value in fields.items() if value is not None and n not in NOTES and n not in ignore}
    for name in left.keys() - known:
        if name not in NEUTRAL:
            _wrong(name, "this parameter is not supported here" + _REMEDY.format(name=name), "unsupported_parameter")
        if left[name] != NEUTRAL[name]:
            what = f"only {msgspec.json.encode(NEUTRAL[name]).decode()} is supported here, found {left[name]!r}"
            _wrong(name, what + _REMEDY.format(name=name), "unsupported_value")
    return {name: value for name, value in left.items() if name in known}


_REMEDY = "; leave it out, or let the job ignore it (environment.agent.ignore: [{name}])"


def _sampling(fields: dict[str, Any], limit: Any, *, logprobs: bool, alternatives: int) -> Sampling:
    if limit is not None and (type(limit) is not int or limit < 1):
        _wrong("max_tokens", f"expected a whole number of at least 1, found {limit!r}")
    temperature = _of(float | None, fields, "temperature", None)
    if temperature is not None and not math.isfinite(temperature):
        _wrong("temperature", f"expected a finite number, found {temperature}")
    allowed = _of(list[int] | None, fields, "allowed_token_ids", None)
    if allowed is not None and not allowed:
        _wrong("allowed_token_ids", "expected at least one token id (left out, all are allowed)")
    stop = _of(str | list[str], fields, "stop", [])
    options = _of(dict[str, Any], fields, "stream_options", {})
    if odd := options.keys() - {"include_usage"}:
        _wrong("stream_options", f"expected include_usage alone, found {', '.join(sorted(odd))}")
    return Sampling(
        max_tokens=limit,
        temperature=temperature,
        allowed=None if allowed is None else tuple(sorted(set(allowed))),
        stream=_of(bool, fields, "stream", False),
        stream_usage=bool(options.get("include_usage")),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=logprobs,
        alternatives=alternatives,
        token_ids=_of(bool, fields, "return_token_ids", False),
    )


def _message(value: Any, where: str) -> Message:
    """Raises ``Refused``; fields that are null or unknown notes of the server's own are left alone."""
    fields = _of_type(dict[str, Any], value, where)
    role = fields.get("role")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant", "tool"):
        _wrong(where, f"expected the role system, developer, user, assistant or tool, found {role!r}")
    odd = {name for name, value in fields.items() if value not in (None, [], {})} - _MESSAGE_FIELDS
    if odd:
        _wrong(where, f"{', '.join(sorted(odd))} cannot be told to this policy")
    calls = fields.get("tool_calls") or []
    if calls and role != "assistant":
        _wrong(where, f"only the assistant calls tools, found tool_calls of {role}")
    return Message(
        role,
        _content(fields.get("content"), f"{where}.content"),
        tuple(
            _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(_of_type(list[Any], calls, where))
        ),
        _of(str, fields, "tool_call_id", ""),
        _of(str, fields, "name", ""),
    )


_MESSAGE_FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name"}


def _content(value: Any, where: str) -> str:
    """A text, or the texts of its parts one after another."""
    if value is None or isinstance(value, str):
        return value or ""
    texts = []
    for index, part in enumerate(_of_type(list[Any], value, where)):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            _wrong(f"{where}[{index}]", f"expected a text (nothing else can be told to this policy), found {kind!r}")
        texts.append(_of(str, part, "text"))
    return "".join(texts)


def _call(value: Any, where: str) -> ToolCall:
    fields = _of_type(dict[str, Any], value, where)
    function = _of_type(dict[str, Any], fields.get("function"), f"{where}.function")
    return ToolCall(_of(str, fields, "id", ""), _of(str, function, "name"), _of(str, function, "arguments", ""))


def _tool(value: Any, where: str) -> Tool:
    fields: Tool = _of_type(dict[str, Any], value, where)
    if fields.get("type") != "function":
        _wrong(where, f'expected the type "function", found {fields.get("type")!r}')
    function = _of_type(dict[str, Any], fields.get("function"), f"{where}.function")
    if not _of(str, function, "name", ""):
        _wrong(where, "expected function.name")
    parameters = _of_type(dict[str, Any], function.get("parameters") or {}, f"{where}.function.parameters")
    _of_type(dict[str, Any], parameters.get("properties") or {}, f"{where}.function.parameters.properties")
    return fields


def _of(kind: Any, fields: Mapping[str, Any], name: str, otherwise: Any = ...) -> Any:
    """A field of a type; ``otherwise`` where it is absent or null. Raises ``Refused``."""
    value = fields.get(name)
    if value is None:
        if otherwise is ...:
            _wrong(name, "this field is needed")
        return otherwise
    return _of_type(kind, value, name)


def _of_type(kind: Any, value: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        return _wrong(where, text[0].lower() + text[1:])


def _wrong(where: str, what: str, code: str = "invalid_value") -> NoReturn:
    raise Refused(400, f"{where}: {what}", code=code, param=where)
