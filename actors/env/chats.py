"""Chats as trajectories: what an engine would have seen and sampled, had the assistant's words been its own.

    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."},
                  {"role": "assistant", "content": "..."}, ...]}                              one chat a line

Invariant: the tokens are made by the same framing as a rollout's (``actors.env.framing``): an opening, then turns by
the assistant, each followed by what the user says. Only the assistant's tokens carry a loss, among them the one that
ends a turn, unless the turn is as long as an engine would let it be.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from actors.env.framing import ChatFraming, Framing
from actors.env.recorder import TrajectoryRecorder
from actors.env.tokenizers import Tokens
from actors.trajectory import Trajectory


class ChatError(ValueError):
    """A chat that cannot be imitated; one line that names it."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message; a chat with tool calls is not one of these."""

    role: Literal["system", "user", "assistant"]
    content: str


class Chat(msgspec.Struct, frozen=True):
    """One line of the file; other keys than ``messages`` are left alone."""

    messages: list[Message]


def read_chats(path: Path) -> list[Chat]:
    """All chats of a JSONL file; blank lines are skipped. Raises ``ChatError`` naming file and line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ChatError(f"{path}: cannot be read: {error.strerror}") from None
    chats = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                chat = msgspec.json.decode(line, type=Chat)
                _check(chat.messages)
            except (msgspec.MsgspecError, UnicodeDecodeError, ChatError) as error:
                raise ChatError(f"{path}, line {number}: {error}") from None
            chats.append(chat)
    if not chats:
        raise ChatError(f"{path}: there is no chat in it")
    return chats


def _check(messages: Sequence[Message]) -> None:
    """An optional system message, then user and assistant by turns, the assistant last."""
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if len(turns) < 2 or len(turns) % 2 or turns != ["user", "assistant"] * (len(turns) // 2):
        raise ChatError(
            f"expected (system,) user, assistant, user, assistant, ... and the assistant last, found {', '.join(roles)}"
        )


def chat_trajectory(chat: Chat, index: int, framing: Framing, max_tokens_per_turn: int) -> Trajectory:
    """The trajectory of a chat, a group of its own. Raises ``ChatError`` for a turn that an engine would have cut."""
    messages = list(chat.messages)
    system = messages.pop(0).content if messages[0].role == "system" else ""
    recorder = TrajectoryRecorder(f"chat{index}", group=index, task=index, temperature=1.0)
    recorder.start(framing.opening(system, messages[0].content), messages[0].content)
    for turn, message in enumerate(messages[1:]):
        if turn % 2 == 0:
            tokens = _turn(message.content, framing, max_tokens_per_turn)
            nothing = np.zeros(len(tokens))
            recorder.sampled(tokens, nothing, nothing.astype(np.int32), None, message.content)
            last = int(tokens[-1])
        else:
            recorder.observed(framing.following(message.content, last), message.content)
    return recorder.finish(env_return=0.0, reward=0.0, success=False)


def _turn(text: str, framing: Framing, limit: int) -> Tokens:
    """What an engine samples for it: the text and, if there is room, the token that ends a turn."""
    tokens = framing.tokenizer.encode(text)
    if len(tokens) > limit:
        raise ChatError(
            f"an assistant's turn has {len(tokens)} tokens, engines sample at most {limit} "
            f"(rollout.max_tokens_per_turn): {text[:40]!r}"
        )
    if len(tokens) < limit:
        tokens = np.append(tokens, np.int32(end_of_turn(framing)))
    return tokens


def end_of_turn(framing: Framing) -> int:
    """The token by which a policy ends its turn: of those at which engines stop, the one that the chat template puts
    behind the assistant's words."""
    ends = framing.tokenizer.eos_ids
    if isinstance(framing, ChatFraming):
        first = int(framing.following("u", -1)[0])
        if first in ends:
            return first
    return ends[0]
