"""Tool calls in what a policy wrote.

``hermes`` (the format of Hermes, Qwen and many others; their chat templates tell the policy of it)::

    I look it up. <tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>

``line`` (for small policies, which are told of their tools by the agent's own words): a line that begins with the
name of a tool; what stands behind the colon is its only argument, or the object of all of them::

    calc: 12 + 30

Invariant: what is no well-formed call of one of the tools that the agent has named stays part of the text, which
nothing else is done to: an agent sees all that was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

Tool = Mapping[str, Any]
"""As the API has it: ``{"type": "function", "function": {"name": ..., "parameters": {...}}}``."""

Format = Literal["hermes", "line"]


class ToolCall(msgspec.Struct, frozen=True):
    """One call; ``arguments`` is JSON, as the API has it."""

    id: str
    name: str
    arguments: str


class Written(msgspec.Struct, frozen=True):
    """What a policy wrote, taken apart."""

    content: str
    calls: tuple[ToolCall, ...] = ()


_HERMES = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_LINE = re.compile(r"^[ \t]*(\w+)[ \t]*(?::[ \t]*(.*?))?[ \t]*$", re.MULTILINE)


def written(text: str, tools: Sequence[Tool], format_: Format, turn: int) -> Written:
    """The calls in ``text``, named after ``turn``, and what was written before them."""
    found = _FORMATS[format_](text, {tool["function"]["name"]: tool["function"] for tool in tools})
    if not found:
        return Written(text)
    calls = tuple(ToolCall(f"call_{turn}_{index}", name, args) for index, (_, name, args) in enumerate(found))
    return Written(text[: found[0][0]].strip(), calls)


def _hermes(text: str, functions: Mapping[str, Tool]) -> list[tuple[int, str, str]]:
    found = []
    for match in _HERMES.finditer(text):
        try:
            call = msgspec.json.decode(match[1], type=dict[str, Any])
        except msgspec.DecodeError:
            return []
        name, arguments = call.get("name"), call.get("arguments", {})
        if name not in functions or not isinstance(arguments, dict):
            return []
        found.append((match.start(), str(name), json.dumps(arguments, ensure_ascii=False)))
    return found


def _line(text: str, functions: Mapping[str, Tool]) -> list[tuple[int, str, str]]:
    for match in _LINE.finditer(text):
        function = functions.get(match[1])
        if function is not None:
            arguments = _arguments(match[2] or "", (function.get("parameters") or {}).get("properties") or {})
            return [] if arguments is None else [(match.start(), match[1], arguments)]
    return []


def _arguments(text: str, properties: Mapping[str, Any]) -> str | None:
    if not properties:
        return None if text else "{}"
    if len(properties) == 1:
        ((name, schema),) = properties.items()
        return json.dumps({name: _value(text, schema)}, ensure_ascii=False)
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    return text


def _value(text: str, schema: Any) -> Any:
    """A number where one is asked for and written; else the text."""
    kinds = {"integer": int, "number": float}
    kind = kinds.get(str(schema.get("type"))) if isinstance(schema, dict) else None
    try:
        return text if kind is None else kind(text)
    except ValueError:
        return text


_FORMATS: dict[Format, Callable[[str, Mapping[str, Tool]], list[tuple[int, str, str]]]] = {
    "hermes": _hermes,
    "line": _line,
}
