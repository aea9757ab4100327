"""Renders a model's chat template as transformers does, without transformers.

Invariant: for messages of roles and texts the result equals ``tokenizer.apply_chat_template(..., tokenize=False)``;
templates come with models from anywhere, so they run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = tuple[str, str]
"""(role, text); roles are "system", "user" and "assistant"."""


class TemplateRefusal(ValueError):
    """The template refused the conversation, or failed on it."""


class ChatTemplate:
    """A compiled template together with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ``ValueError`` for a template that is not valid Jinja."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as one text. Raises ``TemplateRefusal``."""
        plain = [{"role": role, "content": content} for role, content in messages]
        return self.render_chat(plain, None, add_generation_prompt=add_generation_prompt)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The same for messages and tools in transformers' format (a call's arguments are an object, no text)."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise TemplateRefusal(f"the chat template refused the roles [{roles}]: {error}") from None


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts ``{% generation %} ... {% endgeneration %}``, which marks assistant text, and renders its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; templates expect plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    """Today, as a few templates tell the model; the one thing in a prompt that a rerun does not repeat."""
    return datetime.now().strftime(pattern)
