"""Turns as tokens: nothing that was sampled is ever tokenised again."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from actors.env.framing import ActionNotOneToken, ChatFraming, TextFraming, framing_for
from actors.env.tokenizers import ByteTokenizer, HuggingFaceTokenizer, TokenizerError


@pytest.fixture
def chat(model_directory: Path) -> ChatFraming:
    framing = framing_for(HuggingFaceTokenizer(model_directory))
    assert isinstance(framing, ChatFraming)
    return framing


def text_of(framing: ChatFraming, tokens: np.ndarray) -> str:
    """With the special tokens, unlike ``decode``."""
    reference = framing.tokenizer
    assert isinstance(reference, HuggingFaceTokenizer)
    return reference._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def test_a_chat_opens_with_the_template_over_system_and_user(chat: ChatFraming) -> None:
    assert text_of(chat, chat.opening("Be brief.", "0,0>")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n0,0><|im_end|>\n<|im_start|>assistant\n"
    )
    assert text_of(chat, chat.opening("", "0,0>")).startswith("<|im_start|>system\nBe helpful.<|im_end|>\n")


def test_a_turn_that_was_cut_short_is_ended_and_one_that_ended_itself_is_not_ended_twice(chat: ChatFraming) -> None:
    end = chat.tokenizer.eos_ids[0]
    after = "\n<|im_start|>user\n0,1><|im_end|>\n<|im_start|>assistant\n"
    assert text_of(chat, chat.following("0,1>", last_sampled=40)) == "<|im_end|>" + after
    assert text_of(chat, chat.following("0,1>", last_sampled=end)) == after


def test_the_concatenation_is_the_conversation_that_transformers_renders(
    chat: ChatFraming, model_directory: Path
) -> None:
    end = chat.tokenizer.eos_ids[0]
    sampled = np.append(chat.tokenizer.encode("right"), end).astype(np.int32)
    pieces = [chat.opening("Rules.", "start"), sampled, chat.following("0,1>", end)]
    reference = AutoTokenizer.from_pretrained(model_directory)
    messages = [
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": "start"},
        {"role": "assistant", "content": "right"},
        {"role": "user", "content": "0,1>"},
    ]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert np.concatenate(pieces).tolist() == expected


def test_a_sampled_tokenisation_that_no_tokenizer_would_choose_survives(chat: ChatFraming) -> None:
    letters = np.concatenate([chat.tokenizer.encode(letter) for letter in "right"])
    assert letters.tolist() != chat.tokenizer.encode("right").tolist()
    assert chat.action(letters) == "right"
    assert chat.action(np.append(letters, chat.tokenizer.eos_ids[0])) == "right"


def rewrite(directory: Path, template: str) -> HuggingFaceTokenizer:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return HuggingFaceTokenizer(directory)


def test_a_template_without_a_system_role_gets_the_rules_in_the_users_text(model_directory: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}[model]"
    )
    chat = ChatFraming(rewrite(model_directory, template))
    assert text_of(chat, chat.opening("Rules.", "go")) == "[user]Rules.\n\ngo[model]"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}",
    ],
)
def test_a_template_that_cannot_hold_several_turns_is_refused(model_directory: Path, template: str) -> None:
    with pytest.raises(TokenizerError, match="several turns are not possible"):
        ChatFraming(rewrite(model_directory, template))


def test_bytes_are_framed_by_nothing_and_not_told_the_rules() -> None:
    framing = TextFraming(ByteTokenizer())
    assert framing.opening("Rules.", "AB>").tolist() == [65, 66, 62]
    assert framing.following("C>", last_sampled=82).tolist() == [67, 62]
    assert framing.action(np.array([82], np.int32)) == "R"
    with pytest.raises(ValueError, match="first observation"):
        framing.opening("Rules.", "")


def test_legal_actions_become_ascending_token_ids() -> None:
    framing = TextFraming(ByteTokenizer())
    assert framing.allowed(("L", "D", "R", "U")) == (68, 76, 82, 85)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (("L", "up"), r"action 'up' is 2 tokens \[117, 112\]"),
        (("",), "action '' is 0 tokens"),
        (("L", "L"), "actions 'L' and 'L' are the same token"),
        ((), "actions is empty"),
    ],
)
def test_actions_that_no_mask_can_express_are_refused(actions: tuple[str, ...], message: str) -> None:
    with pytest.raises(ActionNotOneToken, match=message):
        TextFraming(ByteTokenizer()).allowed(actions)


def test_cached_tokens_cannot_be_changed(chat: ChatFraming) -> None:
    tokens = chat.following("0,1>", last_sampled=40)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
