"""Tool calls are read out of what a policy wrote, and nothing else of it is touched."""

from __future__ import annotations

from typing import Any

import pytest

from actors.env.agents.tool_calls import Format, ToolCall, Written, written


def tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {key: {"type": kind} for key, kind in properties.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schema}}}


TOOLS = [
    tool("weather", city="string"),
    tool("calc", expression="string"),
    tool("wait"),
    tool("open-box"),
    tool("add", a="number", b="number"),
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def read(text: str, format_: Format) -> tuple[str, list[tuple[str, str]]]:
    found = written(text, TOOLS, format_, turn=4)
    return found.content, [(call.name, call.arguments) for call in found.calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [("weather", '{"city": "Köln"}')]),
        (f"I look.\n{CALL}", "I look.", [("weather", '{"city": "Köln"}')]),
        (f'{CALL}\n<tool_call>{{"name": "wait"}}</tool_call>', "", [("weather", '{"city": "Köln"}'), ("wait", "{}")]),
        ('<tool_call>{"name": "add", "arguments": {"a": {"b": 1}}}</tool_call>', "", [("add", '{"a": {"b": 1}}')]),
        (f"<tool_call>[]</tool_call> {CALL}", "<tool_call>[]</tool_call>", [("weather", '{"city": "Köln"}')]),
        (f"{CALL} so <tool_call>{{", "", [("weather", '{"city": "Köln"}')]),
    ],
)
def test_calls_between_marks_are_taken_out(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(text, "hermes") == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        '<tool_call>{"name": "weather", "arguments": {"city": </tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "Ulm"}</tool_call>',
        '<tool_call>{"name": "weather"}',
        f'{CALL}<tool_call>{{"name": "nobody"}}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": 1e999}}</tool_call>',
        f'<tool_call>{{"name": "weather", "arguments": {{"city": {"[" * 990}{"]" * 990}}}}}</tool_call>',
        f'<tool_call>{{"name": "weather", "arguments": {{"city": {"[" * 5000}{"]" * 5000}}}}}</tool_call>',
    ],
)
def test_what_is_no_call_of_a_tool_that_was_named_stays_as_it_was_written(text: str) -> None:
    assert read(text, "hermes") == (text, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("calc: 12 + 30", "", [("calc", '{"expression": "12 + 30"}')]),
        ("Use it.\ncalc: 2*3\nignored", "Use it.", [("calc", '{"expression": "2*3"}')]),
        ("wait", "", [("wait", "{}")]),
        (" \twait \t:\t \nmore", "", [("wait", "{}")]),
        ("first\n\tcalc :\t 1 : 2 \t", "first", [("calc", '{"expression": "1 : 2"}')]),
        ("open-box", "", [("open-box", "{}")]),
        ('add: {"a": 1, "b": 2}', "", [("add", '{"a": 1, "b": 2}')]),
        ("calculator: 3", "calculator: 3", []),
        ("I calc: 3", "I calc: 3", []),
        ("wait: long", "wait: long", []),
        ("add: 1 2", "add: 1 2", []),
    ],
)
def test_a_line_that_begins_with_a_tools_name_is_a_call(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(text, "line") == (content, calls)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", "7", "7"),
        ("number", "0.5", "0.5"),
        ("integer", "x", '"x"'),
        ("number", "nan", '"nan"'),
        ("number", "1e999", '"1e999"'),
        ("integer", "9" * 400, "9" * 400),
    ],
)
def test_a_lines_argument_has_the_type_that_is_asked_for_where_it_can(kind: str, text: str, value: str) -> None:
    assert written(f"n: {text}", [tool("n", of=kind)], "line", 0).calls[0].arguments == f'{{"of": {value}}}'


def test_calls_are_named_by_turn_and_place() -> None:
    assert written(f"{CALL}{CALL}", TOOLS, "hermes", turn=4) == Written(
        "", (ToolCall("call_4_0", "weather", '{"city": "Köln"}'), ToolCall("call_4_1", "weather", '{"city": "Köln"}'))
    )


@pytest.mark.parametrize(
    ("text", "format_"),
    [
        ("<tool_call>{" * 200_000, "hermes"),
        ("<tool_call> {" + "} " * 1_000_000, "hermes"),
        ("<tool_call>{}" + " " * 2_000_000, "hermes"),
        (" " * 2_000_000 + "x", "line"),
        ("calc" + " \t" * 1_000_000 + "x", "line"),
        ("calc:" + " x" * 1_000_000 + " " * 1_000_000 + "\rx", "line"),
        (" \n" * 1_000_000, "line"),
    ],
    ids=lambda text: repr(text[:8]),
)
def test_reading_costs_no_more_than_there_is_to_read(text: str, format_: Format) -> None:
    """Two megabytes: what took time with the square of its length would outlast any patience."""
    read(text, format_)
