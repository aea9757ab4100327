"""An agent's messages as the segments of a trajectory.

Invariant: what an engine sampled is never tokenised again. As long as the agent sends back all that was said, the
answers as it got them, and adds to it, only what it adds is rendered and appended. Where it has changed something, a
new segment begins, with the whole conversation as its prompt; answers that are still in it keep their sampled ids
there, too.

Answers are recognised by what was returned to the agent, compared message by message, not by rendering them: templates
render the same words differently (a call's spaces, a thought that is left out later). What follows an answer is found
as in ``actors.env.framing``: by rendering the conversation with a mark in place of each answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from actors.env.agents.tool_calls import Format, Tool, ToolCall
from actors.env.chat_template import ChatTemplate, TemplateRefusal
from actors.env.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokens

BYTES_TEMPLATE = (
    "{% for message in messages if message.role != 'system' %}{{ message.content }}\n{% endfor %}"
    "{% if not add_generation_prompt %}{{ raise_exception('a prompt ends in a turn of the assistant') }}{% endif %}"
)
"""For policies over bytes that start from random weights: as in ``TextFraming``, they are told neither rules nor tools,
and roles are left out; each message ends in a newline."""


class Message(msgspec.Struct, frozen=True):
    """One message, in the one form in which equal ones are equal."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class Continuation(msgspec.Struct, frozen=True):
    """What to append before an engine goes on."""

    tokens: Tokens
    new_segment: str  # why one begins with these tokens; empty: they go behind what there is
    text: str  # for people


FIRST = "first"
ASKED_AGAIN = "asked again"
TOOLS_CHANGED = "tools changed"
HISTORY_CHANGED = "history changed"


class Renderer:
    """A policy's template and tokenizer; shared by all conversations."""

    def __init__(self, tokenizer: ByteTokenizer | HuggingFaceTokenizer, tool_calls: Format) -> None:
        self.tokenizer = tokenizer
        self.tool_calls = tool_calls
        if isinstance(tokenizer, HuggingFaceTokenizer):
            self._template, self._tells_tools = tokenizer.chat_template, tool_calls == "hermes"
        else:
            self._template, self._tells_tools = ChatTemplate(BYTES_TEMPLATE, {}), False

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """The prompt of the assistant's next turn. Raises ``TemplateRefusal``."""
        plain = [self._plain(message) for message in messages]
        told = list(tools) if tools and self._tells_tools else None
        text = self._template.render_chat(plain, told, add_generation_prompt=True)
        if told and text == self._template.render_chat(plain, None, add_generation_prompt=True):
            raise TemplateRefusal(
                "the policy's chat template does not tell it of tools: describe them in the agent's own words and set "
                "environment.agent.tool_calls to line, or use a policy whose template does"
            )
        if not text:
            raise TemplateRefusal("the conversation renders to nothing: expected a message that is no system message")
        return text

    def _plain(self, message: Message) -> dict[str, Any]:
        """As templates expect it. Results of calls that are written as lines are told as the user's words."""
        role = "user" if message.role == "tool" and self.tool_calls == "line" else message.role
        plain: dict[str, Any] = {"role": role, "content": message.content}
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
        for key in ("tool_call_id", "name"):
            if value := getattr(message, key):
                plain[key] = value
        return plain


class Conversation:
    """One agent's; see the module docstring."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._said: list[Message] = []  # in the current segment, the last answer included
        self._tools: list[Tool] = []
        self._answers: dict[Message, list[Tokens]] = {}  # those that read the same in the order in which they are told

    def plan(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Continuation:
        """What these messages add; nothing changes yet. Raises ``TemplateRefusal``."""
        said = self._said
        reason = self._break(messages, tools)
        if reason:
            return Continuation(self._whole(messages, tools), reason, _told(messages))
        added = messages[len(said) :]
        answer = self._answers[said[-1]][-1]
        text = self._renderer.render([*said[:-1], _mark(0), *added], tools)
        _, _, after = text.partition(_mark(0).content)
        if text.count(_mark(0).content) != 1:
            raise TemplateRefusal(f"the chat template should show the assistant's last answer once: it made {text!r}")
        return Continuation(self._behind(after, int(answer[-1])), "", _told(added))

    def answered(self, messages: Sequence[Message], tools: Sequence[Tool], answer: Message, sampled: Tokens) -> None:
        """What was planned was said, and the policy answered."""
        self._said = [*messages, answer]
        self._tools = list(tools)
        self._answers[answer] = [*self._answers.get(answer, [])[: messages.count(answer)], sampled]

    def _break(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Why the conversation does not just go on."""
        said = self._said
        if not said:
            return FIRST
        if list(tools) != self._tools:
            return TOOLS_CHANGED
        if list(messages[: len(said)]) == said:
            return ""
        return ASKED_AGAIN if list(messages) == said[:-1] else HISTORY_CHANGED

    def _whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Tokens:
        """All of a conversation, with the sampled ids of the answers in it."""
        marked, answers = list(messages), list[Tokens]()
        seen = Counter[Message]()
        for index, message in enumerate(messages):
            sampled = self._answers.get(message)
            if sampled is not None:
                marked[index] = _mark(len(answers))
                answers.append(sampled[min(seen[message], len(sampled) - 1)])
                seen[message] += 1
        text = self._renderer.render(marked, tools)
        if all(text.count(_mark(index).content) == 1 for index in range(len(answers))):
            return np.concatenate(list(self._spliced(text, answers)))
        return self._renderer.tokenizer.encode(self._renderer.render(messages, tools))  # old answers are left out

    def _spliced(self, text: str, answers: Sequence[Tokens]) -> Iterator[Tokens]:
        last = -1
        for index, sampled in enumerate(answers):
            before, _, text = text.partition(_mark(index).content)
            yield self._behind(before, last)
            yield sampled
            last = int(sampled[-1])
        yield self._behind(text, last)

    def _behind(self, text: str, last: int) -> Tokens:
        """The tokens of a text; the end of a turn is left out where it was sampled just before."""
        tokens = self._renderer.tokenizer.encode(text)
        return tokens[1:] if len(tokens) and int(tokens[0]) == last else tokens


def _mark(index: int) -> Message:
    """Stands for an answer: no template writes it by itself, and it neither begins nor ends in a blank."""
    return Message("assistant", f"\u2063answer {index}\u2063")


def _plain_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _told(messages: Sequence[Message]) -> str:
    return "\n".join(message.content for message in messages if message.role != "assistant")
