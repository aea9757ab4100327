"""An agent's messages become tokens, and none that was sampled is tokenised again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from actors.env.agents.conversation import (
    ASKED_AGAIN,
    FIRST,
    HISTORY_CHANGED,
    TOOLS_CHANGED,
    Conversation,
    Message,
    Renderer,
)
from actors.env.agents.tool_calls import Format, ToolCall
from actors.env.chat_template import TemplateRefusal
from actors.env.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokens
from tests.end_to_end.tiny_model import make_model

HERMES = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "calc", "parameters": {"properties": {"x": {}}}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def tokenizer(model: Path, template: str = HERMES) -> HuggingFaceTokenizer:
    (model / "chat_template.jinja").write_text(template)
    return HuggingFaceTokenizer(model)


def renderer(model: Path, template: str = HERMES, tool_calls: Format = "hermes") -> Renderer:
    return Renderer(tokenizer(model, template), tool_calls)


def letters(of: Renderer, text: str, *, ended: bool = True) -> Tokens:
    """A text as a policy may sample it and no tokenizer would: letter by letter."""
    tokens = np.concatenate([of.tokenizer.encode(letter) for letter in text])
    assert tokens.tolist() != of.tokenizer.encode(text).tolist()
    return np.append(tokens, of.tokenizer.eos_ids[0]).astype(np.int32) if ended else tokens


USER, AGAIN = Message("user", "What is 1 + 1?"), Message("user", "And 2 + 2?")


@pytest.mark.parametrize("ended", [True, False])
def test_a_conversation_that_goes_on_is_what_transformers_renders_but_for_the_sampled_ids(
    model: Path, ended: bool
) -> None:
    made = renderer(model)
    conversation = Conversation(made)
    first = conversation.plan([USER], [])
    assert first.new_segment == FIRST
    sampled, answer = letters(made, "Guess 2.", ended=ended), Message("assistant", "Guess 2.")
    conversation.answered([USER], [], answer, sampled)
    second = conversation.plan([USER, answer, AGAIN], [])
    assert (second.new_segment, second.text) == ("", "And 2 + 2?")
    reference = AutoTokenizer.from_pretrained(model)
    told = [{"role": m.role, "content": m.content} for m in (USER, answer, AGAIN)]
    expected = reference.apply_chat_template(told, chat_template=HERMES, add_generation_prompt=True, tokenize=False)
    whole = np.concatenate([first.tokens, sampled, second.tokens])
    assert reference.decode(whole) == expected
    assert whole[len(first.tokens) : len(first.tokens) + len(sampled)].tolist() == sampled.tolist()


def test_an_answer_with_calls_is_known_by_what_was_returned_not_by_how_it_renders(model: Path) -> None:
    made = renderer(model)
    conversation = Conversation(made)
    text = '<tool_call>{"arguments":{"x":  1},"name":"calc"}</tool_call>'  # the template would write it differently
    sampled = letters(made, text)
    answer = Message("assistant", "", (ToolCall("call_0_0", "calc", '{"x": 1}'),))
    first = conversation.plan([USER], [TOOL])
    conversation.answered([USER], [TOOL], answer, sampled)
    result = Message("tool", "2", (), "call_0_0")
    second = conversation.plan([USER, answer, result], [TOOL])
    assert second.new_segment == ""
    assert made.tokenizer.encode("\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n").tolist() == (
        second.tokens.tolist()
    )
    assert json.dumps(TOOL["function"]["name"]) in AutoTokenizer.from_pretrained(model).decode(first.tokens)


def test_a_changed_history_begins_a_segment_in_which_answers_keep_their_ids(model: Path) -> None:
    made = renderer(model)
    conversation = Conversation(made)
    one, two = letters(made, "Guess one."), letters(made, "Guess two.", ended=False)
    answers = Message("assistant", "Guess one."), Message("assistant", "Guess two.")
    conversation.answered([USER], [], answers[0], one)
    conversation.answered([USER, answers[0], AGAIN], [], answers[1], two)
    edited = [Message("user", "In short:"), answers[0], AGAIN, answers[1], USER]
    planned = conversation.plan(edited, [])
    assert planned.new_segment == HISTORY_CHANGED
    encode = made.tokenizer.encode
    parts = [
        encode("<|im_start|>user\nIn short:<|im_end|>\n<|im_start|>assistant\n"),
        one,  # which ends its turn itself
        encode(f"\n<|im_start|>user\n{AGAIN.content}<|im_end|>\n<|im_start|>assistant\n"),
        two,  # which does not
        encode(f"<|im_end|>\n<|im_start|>user\n{USER.content}<|im_end|>\n<|im_start|>assistant\n"),
    ]
    assert planned.tokens.tolist() == np.concatenate(parts).tolist()


def test_answers_that_read_the_same_keep_each_its_own_ids(model: Path) -> None:
    made = renderer(model)
    conversation = Conversation(made)
    said = Message("assistant", "Guess 2.")
    dropped, one, two = (
        letters(made, "Guess 2.", ended=False),
        letters(made, "Guess 2."),
        np.append(made.tokenizer.encode("Guess 2."), made.tokenizer.eos_ids[0]).astype(np.int32),
    )
    assert one.tolist() != two.tolist()
    conversation.answered([USER], [], said, dropped)
    conversation.answered([USER], [], said, one)  # asked again
    conversation.answered([USER, said, AGAIN], [], said, two)
    planned = conversation.plan([AGAIN, said, AGAIN, said, AGAIN, said, USER], [])
    encode = made.tokenizer.encode
    begin, between = f"<|im_start|>user\n{AGAIN.content}<|im_end|>\n<|im_start|>assistant\n", "\n"
    end = f"\n<|im_start|>user\n{USER.content}<|im_end|>\n<|im_start|>assistant\n"
    parts = [encode(begin), one, encode(between + begin), two, encode(between + begin), two, encode(end)]
    assert (planned.new_segment, planned.tokens.tolist()) == (HISTORY_CHANGED, np.concatenate(parts).tolist())


def test_what_begins_a_segment_is_told(model: Path) -> None:
    made = renderer(model)
    conversation = Conversation(made)
    answer = Message("assistant", "Guess 2.")
    conversation.answered([USER], [], answer, letters(made, "Guess 2."))
    assert conversation.plan([USER], []).new_segment == ASKED_AGAIN
    assert conversation.plan([USER, answer, AGAIN], [TOOL]).new_segment == TOOLS_CHANGED
    assert conversation.plan([USER, Message("assistant", "guess 2."), AGAIN], []).new_segment == HISTORY_CHANGED
    assert conversation.plan([USER, answer], []).new_segment == ""  # the policy is to say more


def test_a_template_that_leaves_old_answers_out_decides_what_a_new_segment_shows(model: Path) -> None:
    shown = "{% if loop.revindex <= 2 %}[{{ m.role }}]{{ m.content }}{% endif %}"
    last_only = f"{{%- for m in messages %}}{shown}{{% endfor %}}[assistant]"
    made = renderer(model, last_only)
    conversation = Conversation(made)
    answer = Message("assistant", "Guess 2.")
    conversation.answered([USER], [], answer, letters(made, "Guess 2."))
    planned = conversation.plan([AGAIN, answer, USER, AGAIN], [])
    assert made.tokenizer.decode(planned.tokens) == f"[user]{USER.content}[user]{AGAIN.content}[assistant]"
    with pytest.raises(TemplateRefusal, match="should show the assistant's last answer once"):
        conversation.plan([USER, answer, AGAIN, USER], [])


def test_tools_that_a_template_does_not_tell_of_are_refused(model: Path) -> None:
    silent = HERMES[HERMES.index("{%- for m in messages") :]
    with pytest.raises(TemplateRefusal, match="does not tell it of tools"):
        Conversation(renderer(model, silent)).plan([USER], [TOOL])
    assert Conversation(renderer(model, silent, "line")).plan([USER], [TOOL]).new_segment == FIRST


def test_results_of_calls_written_as_lines_are_told_as_the_users_words(model: Path) -> None:
    made = renderer(model, tool_calls="line")
    text = made.render([USER, Message("tool", "2", (), "call_0_0")], [TOOL])
    assert text.endswith("<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n")
    assert "calc" not in text


def test_policies_over_bytes_are_told_neither_rules_nor_tools() -> None:
    made = Renderer(ByteTokenizer(), "hermes")
    assert made.render([Message("system", "Rules."), USER, AGAIN], [TOOL]) == f"{USER.content}\n{AGAIN.content}\n"
    with pytest.raises(TemplateRefusal, match="renders to nothing"):
        made.render([Message("system", "Rules.")], [])
