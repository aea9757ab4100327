"""Tool calls in what a policy wrote.

``hermes`` (the format of Hermes, Qwen and many others; their chat templates tell the policy of it)::

    I look it up. <tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>

``line`` (for small policies, which are told of their tools by the agent's own words): a line that begins with the
name of a tool; what stands behind the colon is its only argument, or the object of all of them::

    calc: 12 + 30

Invariant: what is no well-formed call of one of the tools that the agent has named stays part of the text, which
nothing else is done to: an agent sees all that was written. Reading takes time in proportion to the text, whatever a
policy makes up.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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


_BEGINS = re.compile(r"<tool_call>\s*(?=\{)")
_ENDS = re.compile(r"\}\s*</tool_call>")
_BLANKS = " \t"


def written(text: str, tools: Sequence[Tool], format_: Format, turn: int) -> Written:
    """The calls in ``text``, named after ``turn``, and what was written before them."""
    try:
        found = _FORMATS[format_](text, {tool["function"]["name"]: tool["function"] for tool in tools})
    except RecursionError:  # nested deeper than can be told again
        found = []
    if not found:
        return Written(text)
    calls = tuple(ToolCall(f"call_{turn}_{index}", name, args) for index, (_, name, args) in enumerate(found))
    return Written(text[: found[0][0]].strip(), calls)


def _hermes(text: str, functions: Mapping[str, Tool]) -> list[tuple[int, str, str]]:
    found = list[tuple[int, str, str]]()
    for start, body in _between_marks(text):
        call = _object(body)
        if call is None:
            return []
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or name not in functions or not isinstance(arguments, dict):
            return []
        found.append((start, name, json.dumps(arguments, ensure_ascii=False)))
    return found


def _between_marks(text: str) -> Iterator[tuple[int, str]]:
    """Where each call begins, and its object. A beginning without an end is the last: no later one has an end."""
    at = 0
    while (begin := _BEGINS.search(text, at)) and (end := _ENDS.search(text, begin.end())):
        yield begin.start(), text[begin.end() : end.start() + 1]
        at = end.end()


def _object(text: str) -> dict[str, Any] | None:
    """What JSON says, where it is an object that can be told again."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def _line(text: str, functions: Mapping[str, Tool]) -> list[tuple[int, str, str]]:
    start = 0
    for line in text.split("\n"):
        name, _, said = line.partition(":")
        name = name.strip(_BLANKS)
        function = functions.get(name)
        if function is not None:
            properties = (function.get("parameters") or {}).get("properties") or {}
            arguments = _arguments(said.strip(_BLANKS), properties)
            return [] if arguments is None else [(start, name, arguments)]
        start += len(line) + 1
    return []


def _arguments(text: str, properties: Mapping[str, Any]) -> str | None:
    if not properties:
        return None if text else "{}"
    if len(properties) == 1:
        ((name, schema),) = properties.items()
        return json.dumps({name: _value(text, schema)}, ensure_ascii=False)
    return None if _object(text) is None else text


def _value(text: str, schema: Any) -> Any:
    """A number where one is asked for and written; else the text."""
    kinds = {"integer": int, "number": float}
    kind = kinds.get(str(schema.get("type"))) if isinstance(schema, dict) else None
    try:
        number = None if kind is None else kind(text)
    except ValueError:
        return text
    if number is None or (isinstance(number, float) and not math.isfinite(number)):  # which JSON has not
        return text
    return number


_FORMATS: dict[Format, Callable[[str, Mapping[str, Tool]], list[tuple[int, str, str]]]] = {
    "hermes": _hermes,
    "line": _line,
}
