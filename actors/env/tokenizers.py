"""Text to token ids and back, without loading a model library.

Invariant: a tokenizer is a pure function of its files; ``encode`` adds no special tokens of its own (a chat template
writes them into the text where they belong).

How texts become the turns of a conversation is ``actors.env.framing``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from actors.env.chat_template import ChatTemplate
from actors.policy import Policy

Tokens = NDArray[np.int32]

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names that transformers passes to a chat template where tokenizer_config.json has them."""


class TokenizerError(ValueError):
    """A tokenizer that cannot be used: one line naming the file, what is wrong with it and what to do."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int  # ids are below it
    eos_ids: tuple[int, ...]  # ascending; sampling one of them ends a turn

    def encode(self, text: str) -> Tokens:
        """int32 [T]; no special tokens are added, those spelled out in the text are recognised."""

    def decode(self, tokens: NDArray[np.integer]) -> str:
        """The text, without special tokens."""


class ByteTokenizer:
    """UTF-8 bytes, for policies that start from random weights: ids 0-255 are bytes, 256 pads, 257 ends a text.

    The vocabulary is that of ``actors.policy.Qwen3Shape``: 264, a multiple of 8 for tensor parallelism.
    """

    vocab_size = 264
    pad_id = 256
    eos_ids: tuple[int, ...] = (257,)

    def encode(self, text: str) -> Tokens:
        """One id a byte."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, tokens: NDArray[np.integer]) -> str:
        """Bytes that are not UTF-8 become U+FFFD; other ids are left out."""
        return bytes(token for token in tokens.tolist() if token < 256).decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """The tokenizer and chat template of a Hugging Face model directory (``tokenizer.json`` and its companions)."""

    def __init__(self, directory: Path) -> None:
        """Raises ``TokenizerError``."""
        self._tokenizer = _read_tokenizer(directory / "tokenizer.json")
        config = _read_json(directory / "tokenizer_config.json", required=True)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        special = {name: _content(config[name]) for name in SPECIAL_TOKEN_NAMES if config.get(name) is not None}
        self.eos_ids = self._end_tokens(directory, special.get("eos_token"))
        source, text = _chat_template(directory, config)
        try:
            self.chat_template = ChatTemplate(text, special)
        except ValueError as error:
            raise TokenizerError(f"{source}: {error}") from None

    def encode(self, text: str) -> Tokens:
        """See ``Tokenizer.encode``."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: NDArray[np.integer]) -> str:
        """See ``Tokenizer.decode``."""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def _end_tokens(self, directory: Path, eos_token: str | None) -> tuple[int, ...]:
        """The tokenizer's own and those that the model's generation settings name."""
        found: set[int] = set()
        if eos_token is not None:
            own = self._tokenizer.token_to_id(eos_token)
            if own is None:
                raise TokenizerError(
                    f"{directory / 'tokenizer_config.json'}: eos_token {eos_token!r} is not in tokenizer.json"
                )
            found.add(own)
        for name in ("generation_config.json", "config.json"):
            ids = _read_json(directory / name, required=False).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        if not found:
            raise TokenizerError(
                f"{directory / 'tokenizer_config.json'}: expected an eos_token, without which no turn ends; found "
                f"none there, nor an eos_token_id in generation_config.json or config.json"
            )
        return tuple(sorted(found))


def load_tokenizer(policy: Policy) -> ByteTokenizer | HuggingFaceTokenizer:
    """The tokenizer that a policy names: bytes for a shape, the model's own for a path, unless it says otherwise.

    Raises ``TokenizerError``.
    """
    source = policy.tokenizer or policy.path or "bytes"
    if source != "bytes":
        return HuggingFaceTokenizer(Path(source))
    if policy.path is None and policy.shape.vocab_size < ByteTokenizer.vocab_size:
        raise TokenizerError(
            f"policy.shape.vocab_size: the byte tokenizer needs at least {ByteTokenizer.vocab_size}, "
            f"found {policy.shape.vocab_size}"
        )
    return ByteTokenizer()


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise TokenizerError(
            f"{path}: expected a fast tokenizer's file, found none; a model with another tokenizer format is "
            f"converted with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception, whatever is wrong with the file
        raise TokenizerError(f"{path}: not a readable tokenizer: {' '.join(str(error).split())}") from None


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if required:
            raise TokenizerError(f"{path}: expected the tokenizer's settings, found no such file") from None
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _content(token: object) -> str:
    """A special token is spelled as text, or as an object whose "content" is the text."""
    return str(token["content"]) if isinstance(token, dict) and "content" in token else str(token)


def _chat_template(directory: Path, config: dict[str, Any]) -> tuple[Path, str]:
    """The file that holds the template and its text; a file of its own wins over the settings, as in transformers."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path, path.read_text("utf-8")
    source = directory / "tokenizer_config.json"
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if not isinstance(template, str):
        raise TokenizerError(
            f"{source}: expected a chat_template (or a file {path.name} beside it), found none; a base model needs one "
            f"to be told whose turn it is"
        )
    return source, template
