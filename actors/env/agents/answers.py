"""What an agent is answered, in the words of OpenAI's API.

Invariant: an answer tells the texts and tool calls by which the conversation knows it again, and besides the exact
token ids (``token_ids``, as vLLM's server has it) and their log-probabilities. Streams tell the same in pieces: a turn
comes whole from its engine, so there is one piece of content, not one a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.env.agents.asked import Refused, Sampling
from actors.env.agents.tool_calls import ToolCall, Written
from actors.env.tokenizers import Tokenizer
from actors.proxy.engines.protocol import Alternatives

BYTES_OF_ID, BYTES_OF_LOGPROB = 8, 64
"""About what a token takes in an answer: its id, its text and log-probability."""


MOST_TOLD = 2000
"""Characters of an error."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one request."""

    id: str
    created: int  # Unix time
    model: str
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    alternatives: Alternatives | None
    written: Written
    stopped: bool  # the policy ended its turn itself; else it was cut

    @property
    def finish_reason(self) -> str:
        if self.written.calls:
            return "tool_calls"
        return "stop" if self.stopped else "length"


def answer_size(turn: Turn, sampling: Sampling) -> int:
    """About how many bytes of JSON the answer has."""
    of_each = BYTES_OF_ID + (BYTES_OF_LOGPROB * (1 + sampling.alternatives) if sampling.logprobs else 0)
    return of_each * len(turn.tokens) + (BYTES_OF_ID * len(turn.prompt) if sampling.token_ids else 0)


def error_body(refused: Refused) -> dict[str, Any]:
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    param = None if refused.param is None else _shortened(refused.param)
    return {"error": {"message": _shortened(refused.message), "type": kind, "param": param, "code": refused.code}}


def _shortened(text: str) -> str:
    """What was found may be all that was sent."""
    left_out = len(text) - MOST_TOLD
    if left_out <= 0:
        return text
    half = MOST_TOLD // 2
    return f"{text[:half]} [... {left_out} characters ...] {text[-half:]}"


def chat_answer(turn: Turn, sampling: Sampling, tokenizer: Tokenizer) -> dict[str, Any]:
    """The body of a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": _content(turn.written), "refusal": None}
    if turn.written.calls:
        message["tool_calls"] = [_call(call) for call in turn.written.calls]
    choice = {**_choice(turn), "message": message, "logprobs": _chat_logprobs(turn, sampling, tokenizer)}
    return {**_head(turn, sampling, "chat.completion"), "choices": [choice], "usage": _usage(turn)}


def chat_pieces(turn: Turn, sampling: Sampling, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """The same as a stream."""
    head = _head(turn, sampling, "chat.completion.chunk")
    delta: dict[str, Any] = {"role": "assistant", "content": _content(turn.written)}
    if turn.written.calls:
        delta["tool_calls"] = [{"index": index, **_call(call)} for index, call in enumerate(turn.written.calls)]
    logprobs = _chat_logprobs(turn, sampling, tokenizer)
    yield {**head, "choices": [{**_choice(turn), "finish_reason": None, "delta": delta, "logprobs": logprobs}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": turn.finish_reason, "logprobs": None}]}
    if sampling.stream_usage:
        yield {**head, "choices": [], "usage": _usage(turn)}


def text_answer(turn: Turn, sampling: Sampling, tokenizer: Tokenizer) -> dict[str, Any]:
    """The body of a completion; as a stream it is the one piece, but for its usage."""
    choice = {**_choice(turn), "text": turn.written.content, "logprobs": _text_logprobs(turn, sampling, tokenizer)}
    return {**_head(turn, sampling, "text_completion"), "choices": [choice], "usage": _usage(turn)}


def text_pieces(turn: Turn, sampling: Sampling, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """The same as a stream."""
    whole = text_answer(turn, sampling, tokenizer)
    usage = whole.pop("usage")
    yield whole
    if sampling.stream_usage:
        yield {**whole, "choices": [], "usage": usage}


def models(names: list[str]) -> dict[str, Any]:
    """The body of ``GET /v1/models``."""
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rollart"} for name in names],
    }


def _head(turn: Turn, sampling: Sampling, kind: str) -> dict[str, Any]:
    head: dict[str, Any] = {"id": turn.id, "object": kind, "created": turn.created, "model": turn.model}
    if sampling.token_ids:
        head["prompt_token_ids"] = turn.prompt.tolist()
    return head


def _choice(turn: Turn) -> dict[str, Any]:
    return {"index": 0, "finish_reason": turn.finish_reason, "token_ids": turn.tokens.tolist()}


def _content(written: Written) -> str | None:
    return written.content if written.content or not written.calls else None


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(turn: Turn) -> dict[str, int]:
    prompt, sampled = len(turn.prompt), len(turn.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _chat_logprobs(turn: Turn, sampling: Sampling, tokenizer: Tokenizer) -> dict[str, Any] | None:
    if not sampling.logprobs:
        return None
    content = []
    for place, (token, logprob) in enumerate(zip(turn.tokens, turn.logprobs, strict=True)):
        beside = [_told(tokenizer, *each) for each in _alternatives(turn, place)]
        content.append({**_told(tokenizer, token, logprob), "top_logprobs": beside})
    return {"content": content, "refusal": None}


def _told(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = _text(tokenizer, token)
    whole = None if "\ufffd" in text else list(text.encode())  # a part of a character has no text of its own
    return {"token": text, "logprob": float(logprob), "bytes": whole}


def _alternatives(turn: Turn, place: int) -> list[tuple[int, float]]:
    if turn.alternatives is None:
        return []
    tokens, logprobs = turn.alternatives.tokens[place].tolist(), turn.alternatives.logprobs[place].tolist()
    return [(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True) if token >= 0]


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode(np.array([token], np.int32))


def _text_logprobs(turn: Turn, sampling: Sampling, tokenizer: Tokenizer) -> dict[str, Any] | None:
    if not sampling.logprobs:
        return None
    texts = [_text(tokenizer, token) for token in turn.tokens]
    beside = [
        {_text(tokenizer, token): logprob for token, logprob in _alternatives(turn, place)}
        for place in range(len(texts))
    ]
    starts = np.cumsum([0, *map(len, texts)])[:-1]
    return {
        "tokens": texts,
        "token_logprobs": turn.logprobs.astype(float).tolist(),
        "top_logprobs": beside if turn.alternatives is not None else None,
        "text_offset": starts.tolist(),
    }
