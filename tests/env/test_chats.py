"""Chats become the tokens that transformers' own chat template gives, and what an engine would have sampled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from actors.env.chats import Chat, ChatError, Message, chat_trajectory, read_chats
from actors.env.framing import ChatFraming, TextFraming
from actors.env.recorder import check_trajectory
from actors.env.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from tests.end_to_end.tiny_model import make_model

TALK = [
    {"role": "system", "content": "Guess a number from 1 to 9."},
    {"role": "user", "content": "Your guess?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Higher."},
    {"role": "assistant", "content": "7, then."},
]


def chat(messages: list[dict[str, str]]) -> Chat:
    return Chat([Message(**message) for message in messages])  # type: ignore[arg-type]


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def test_tokens_are_those_of_the_chat_template_and_only_the_assistants_carry_a_loss(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    theirs = AutoTokenizer.from_pretrained(model)
    framing = ChatFraming(HuggingFaceTokenizer(model))
    trajectory = chat_trajectory(chat(TALK), 3, framing, max_tokens_per_turn=64)
    check_trajectory(trajectory)
    (segment,) = trajectory.segments
    text = theirs.apply_chat_template(TALK, tokenize=False)
    expected = theirs(text.removesuffix("\n"), add_special_tokens=False)["input_ids"]
    assert segment.tokens.tolist() == expected
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    answers = [[*theirs("5")["input_ids"], end], [*theirs("7, then.")["input_ids"], end]]
    assert segment.tokens[segment.loss_mask == 1].tolist() == answers[0] + answers[1]
    assert trajectory.temperature == 1.0
    assert not trajectory.allowed_sets


def test_bytes_follow_each_other_and_a_turn_ends_with_the_end_token_if_there_is_room() -> None:
    framing = TextFraming(ByteTokenizer())
    (segment,) = chat_trajectory(chat(TALK), 0, framing, max_tokens_per_turn=8).segments
    first, second = [*bytes_of("5"), 257], bytes_of("7, then.")  # eight bytes: no room
    assert segment.tokens.tolist() == bytes_of("Your guess?") + first + bytes_of("Higher.") + second
    places = np.flatnonzero(segment.loss_mask).tolist()
    assert places == [11, 12, *range(20, 28)]


def test_a_turn_of_one_token_has_no_end_as_where_actions_are_listed() -> None:
    framing = TextFraming(ByteTokenizer())
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "R"}]
    (segment,) = chat_trajectory(chat(talk), 0, framing, max_tokens_per_turn=1).segments
    assert segment.tokens.tolist() == bytes_of("?R")


def test_a_turn_that_an_engine_would_have_cut_is_refused() -> None:
    framing = TextFraming(ByteTokenizer())
    with pytest.raises(ChatError, match=r"has 8 tokens, engines sample at most 7 \(rollout\.max_tokens_per_turn\)"):
        chat_trajectory(chat(TALK), 0, framing, max_tokens_per_turn=7)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}', "the assistant last, found user"),
        (json.dumps({"messages": TALK[1:4]}), "found user, assistant, user"),
        (json.dumps({"messages": TALK[2:]}), "found assistant, user, assistant"),
        ('{"messages": []}', "the assistant last, found "),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "Invalid enum value 'tool'"),
        ('{"messages": [{"role": "user", "content": null}]}', "Expected `str`"),
        ('{"messages": [{"role": "user", "content": "a", "tool_calls": []}]}', "unknown field `tool_calls`"),
        ("not json", "JSON is malformed"),
        ('{"text": "a"}', "missing required field `messages`"),
    ],
)
def test_a_line_that_is_no_chat_is_named(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": TALK, "source": "by hand"}) + "\n\n" + line + "\n")
    with pytest.raises(ChatError) as raised:
        read_chats(path)
    assert str(raised.value).startswith(f"{path}, line 3: ")
    assert expected in str(raised.value)


def test_a_file_without_chats_and_one_that_is_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="cannot be read: No such file"):
        read_chats(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ChatError, match="there is no chat in it"):
        read_chats(tmp_path / "empty.jsonl")
