"""Any server with OpenAI's completions interface that takes and tells token ids, as vLLM's does.

Invariant: what is recorded is what the server says of the tokens that it sampled, by their ids; text is never
tokenised again. What the interface itself leaves open is found out by asking, before anything is served: of which
distribution the log-probabilities are (``probe``).

Such a server has no way to be given weights: it serves one version, what it was started with. ``load_weights`` takes
the first version that it is given as what the server has; the digests then prove that the tensors arrived here, and the
canary (``score``, by the server) proves that its weights act alike. Every other version is refused by name: for
rollouts and evaluation, not for training.

Of vLLM's extensions it needs ``return_tokens_as_token_ids``, ``stop_token_ids``, ``allowed_token_ids``, ``ignore_eos``,
``prompt_logprobs``, and the sampling parameters of ``WHOLE_DISTRIBUTION``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.proxy.engines.held import Asked
from actors.proxy.engines.http_server import ServerError, Stream
from actors.proxy.engines.served_engine import WHOLE_DISTRIBUTION, Piece, ServedEngine, Token, field

if TYPE_CHECKING:
    import torch

IMPOSSIBLE = -9999.0
"""What vLLM says for a log-probability of minus infinity, which JSON does not have."""

PROCESSED = "vLLM: start it with --logprobs-mode processed_logprobs"


class WeightsAreFixed(RuntimeError):
    """The server cannot be given other weights."""


class OpenAIEngine(ServedEngine):
    """See the module docstring. ``url``: with the interface's path, as ``http://host:8000/v1``."""

    _fixed: int | None = None  # what the server's weights were taken as

    def meet(self, longest: int) -> int:
        model = field(self.server.ask("/models"), "data", 0)
        self._model = str(field(model, "id"))
        # The server's own limit, where it says one: a whole sequence can still be scored, which samples one token more.
        return min(longest, int(model.get("max_model_len") or longest + 1) - 1)

    def probe(self) -> None:
        self.check_temperature(self._apart, PROCESSED)

    def _apart(self, temperature: float) -> float:
        """Two allowed tokens' log-probabilities: of the distribution sampled from they add up to one."""
        asked = Asked([1], temperature=temperature, logprobs=2, allowed=(0, 1))
        told = self.server.ask("/completions", self._body(asked))
        low, high = sorted(field(told, "choices", 0, "logprobs", "top_logprobs", 0).values())
        total = math.exp(low) + math.exp(high)
        if not math.isclose(total, 1.0, abs_tol=1e-3):
            raise ServerError(
                f"{self.server.url}: of two allowed tokens the probabilities add up to {total:.3g}, expected 1: its "
                f"log-probabilities are not those of the distribution sampled from ({PROCESSED})"
            )
        return float(high - low)

    def _body(self, asked: Asked) -> dict[str, Any]:
        return WHOLE_DISTRIBUTION | {
            "model": self._model,
            "prompt": asked.tokens,
            "max_tokens": asked.left,
            "temperature": asked.temperature,
            "seed": asked.seed,
            "logprobs": asked.logprobs,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
            "stop_token_ids": asked.stop,
            "allowed_token_ids": asked.allowed,
        }

    def open(self, asked: Asked, name: str) -> Stream:
        return self.server.stream("/completions", self._body(asked) | {"stream": True})

    def pieces(self, events: Iterator[Any], alternatives: int) -> Iterator[Piece]:
        for event in events:
            for choice in event.get("choices") or ():
                told = choice.get("logprobs")
                tokens = [] if told is None else list(self._tokens(told, alternatives))
                yield Piece(tokens, choice.get("finish_reason") or "")

    def _tokens(self, told: dict[str, Any], alternatives: int) -> Iterator[Token]:
        ranks = told.get("top_logprobs") or [None] * len(told["tokens"])
        for name, logprob, ranked in zip(told["tokens"], told["token_logprobs"], ranks, strict=True):
            if not alternatives:
                yield Token(_id_of(name), float(logprob), None)
                continue
            best = sorted(field({"top_logprobs": ranked}, "top_logprobs").items(), key=lambda each: -each[1])
            ids = np.array([_id_of(each) for each, _ in best[:alternatives]])
            logprobs = np.array([value if value > IMPOSSIBLE else -np.inf for _, value in best[:alternatives]])
            yield Token(_id_of(name), float(logprob), (ids, logprobs))

    def take_weights(self, version: int, arrived: list[tuple[str, torch.Tensor]]) -> None:
        if self._fixed not in (None, version):
            raise WeightsAreFixed(
                f"version {version}: {self.server.url} serves the weights that it was started with (taken as version "
                f"{self._fixed}) and cannot be given others; use it for rollouts and evaluation, and train with torch, "
                f"vllm or sglang engines"
            )
        self._fixed = version

    def ask_scores(self, tokens: list[int]) -> list[float]:
        body = self._body(Asked(tokens, temperature=0.0)) | {"prompt_logprobs": 0}
        told = field(self.server.ask("/completions", body), "choices", 0, "prompt_logprobs")
        return [float(field(each, str(token), "logprob")) for each, token in zip(told[1:], tokens[1:], strict=True)]


def _id_of(name: str) -> int:
    """``token_id:17``."""
    kind, _, number = name.partition(":")
    if kind != "token_id" or not number.isdecimal():
        raise ServerError(f"expected a token as token_id:NUMBER, found {name!r}: this server does not tell token ids")
    return int(number)
