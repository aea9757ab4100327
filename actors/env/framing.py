"""How observations and actions become the tokens of one growing sequence.

Invariant: framing only ever appends. The tokens of an episode are ``opening`` + sampled + ``following`` + sampled +
``following`` + ...; what came before is never rendered or tokenised again, because the same text may have other token
ids when it is tokenised in another context, and the trainer must see the ids that were sampled.

``TextFraming`` (byte tokenizer): observations as they are, actions right behind them. ``ChatFraming`` (Hugging Face
models): the opening is the chat template over [system, user] with the generation prompt. What follows a sampled turn
is found once per text by rendering a whole conversation, ::

    [user "u", assistant SENTINEL, user TEXT] + generation prompt

and keeping what comes after the sentinel: the end of the assistant's turn, the user's message, the start of the next
assistant turn. If the model has sampled the end-of-turn token itself, its copy at the front is left out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from actors.env.chat_template import TemplateRefusal
from actors.env.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, TokenizerError, Tokens

SENTINEL = "\u2063assistant\u2063"
"""Stands for the assistant's text: no template writes it by itself, and it neither begins nor ends in a blank."""

_CACHED_TEXTS = 4096


class Framing(Protocol):
    """See the module docstring."""

    tokenizer: Tokenizer

    def opening(self, system_prompt: str, observation: str) -> Tokens:
        """int32 [T], T >= 1: the first prompt of an episode."""

    def following(self, observation: str, last_sampled: int) -> Tokens:
        """int32 [T]: what to append after a sampled turn whose last token was ``last_sampled``."""

    def allowed(self, actions: tuple[str, ...]) -> tuple[int, ...]:
        """Ascending token ids of the legal actions. Raises ``ActionNotOneToken``."""

    def action(self, tokens: NDArray[np.integer]) -> str:
        """The text that the environment gets for a sampled turn: without special tokens."""


class ActionNotOneToken(ValueError):
    """An action that cannot be sampled under a mask of allowed tokens; the message says which and why."""


class TextFraming:
    """Observations as they are, for the byte tokenizer. Environments' system prompts are not told (see
    ``actors.env.protocol.Environment``)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._following = lru_cache(_CACHED_TEXTS)(self._encode)
        self._actions = _ActionTokens(tokenizer)

    def opening(self, system_prompt: str, observation: str) -> Tokens:
        """See ``Framing.opening``. Raises ``ValueError`` for an empty observation: there is no prompt without it."""
        if not observation:
            raise ValueError("first observation: expected a text of at least one character, found an empty one")
        return self._following(observation)

    def following(self, observation: str, last_sampled: int) -> Tokens:
        """See ``Framing.following``."""
        return self._following(observation)

    def allowed(self, actions: tuple[str, ...]) -> tuple[int, ...]:
        """See ``Framing.allowed``."""
        return self._actions.ids(actions)

    def action(self, tokens: NDArray[np.integer]) -> str:
        """See ``Framing.action``."""
        return self.tokenizer.decode(tokens)

    def _encode(self, text: str) -> Tokens:
        return _frozen(self.tokenizer.encode(text))


class ChatFraming:
    """A conversation under the model's own chat template."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        """Raises ``TokenizerError`` for a template that cannot hold a conversation of several turns."""
        self.tokenizer: Tokenizer = tokenizer
        self._template = tokenizer.chat_template
        self._following = lru_cache(_CACHED_TEXTS)(self._delta)
        self._actions = _ActionTokens(tokenizer)
        self._following("probe")

    def opening(self, system_prompt: str, observation: str) -> Tokens:
        """See ``Framing.opening``. Templates without a system role get the rules at the head of the user's text."""
        if system_prompt:
            try:
                text = self._template.render(
                    [("system", system_prompt), ("user", observation)], add_generation_prompt=True
                )
            except TemplateRefusal:
                observation = f"{system_prompt}\n\n{observation}"
            else:
                return self.tokenizer.encode(text)
        return self.tokenizer.encode(self._template.render([("user", observation)], add_generation_prompt=True))

    def following(self, observation: str, last_sampled: int) -> Tokens:
        """See ``Framing.following``."""
        tokens = self._following(observation)
        return tokens[1:] if tokens[0] == last_sampled else tokens

    def allowed(self, actions: tuple[str, ...]) -> tuple[int, ...]:
        """See ``Framing.allowed``."""
        return self._actions.ids(actions)

    def action(self, tokens: NDArray[np.integer]) -> str:
        """See ``Framing.action``."""
        return self.tokenizer.decode(tokens)

    def _delta(self, observation: str) -> Tokens:
        conversation = [("user", "u"), ("assistant", SENTINEL), ("user", observation)]
        try:
            text = self._template.render(conversation, add_generation_prompt=True)
        except TemplateRefusal as error:
            raise TokenizerError(f"several turns are not possible: {error}") from None
        _, found, after = text.partition(SENTINEL)
        if not found or not after:
            raise TokenizerError(
                "several turns are not possible: the chat template should show the assistant's text and the user's "
                f"after it, but rendered {text!r}"
            )
        return _frozen(self.tokenizer.encode(after))


class _ActionTokens:
    """Remembers which token each tuple of legal actions stands for: environments repeat the same few."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, ...], tuple[int, ...]] = {}

    def ids(self, actions: tuple[str, ...]) -> tuple[int, ...]:
        known = self._known.get(actions)
        if known is None:
            if len(self._known) >= _CACHED_TEXTS:
                self._known.clear()
            known = self._known[actions] = self._encode(actions)
        return known

    def _encode(self, actions: tuple[str, ...]) -> tuple[int, ...]:
        tokens: dict[int, str] = {}
        for action in actions:
            encoded = self._tokenizer.encode(action).tolist()
            if len(encoded) != 1:
                raise ActionNotOneToken(
                    f"action {action!r} is {len(encoded)} tokens {encoded} under this tokenizer: listed actions must "
                    f"be one token each (shorten it, or give actions=None and let the agent write freely)"
                )
            if encoded[0] in tokens:
                raise ActionNotOneToken(f"actions {tokens[encoded[0]]!r} and {action!r} are the same token {encoded}")
            tokens[encoded[0]] = action
        if not tokens:
            raise ActionNotOneToken("actions is empty: list at least one, or give None for free text")
        return tuple(sorted(tokens))


def framing_for(tokenizer: ByteTokenizer | HuggingFaceTokenizer) -> Framing:
    """The framing that belongs to a tokenizer. Raises ``TokenizerError``."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return ChatFraming(tokenizer)
    return TextFraming(tokenizer)


def _frozen(tokens: Tokens) -> Tokens:
    """Cached arrays are shared between trajectories, so nobody may write to them."""
    tokens.flags.writeable = False
    return tokens
