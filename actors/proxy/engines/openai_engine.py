"""Any server with OpenAI's completions interface that takes and tells token ids, as vLLM's does.

Invariant: what is recorded is what the server says of the tokens that it sampled, by their ids; text is never
tokenised again. What the interface itself leaves open is found out by asking, before anything is served: of which
distribution the log-probabilities are (``_probe``).

Such a server has no way to be given weights: it serves one version, what it was started with. ``load_weights`` takes
the first version that it is given as what the server has; the digests then prove that the tensors arrived here, and the
canary (``score``, by the server) proves that its weights act alike. Every other version is refused by name: for
rollouts and evaluation, not for training.

Of vLLM's extensions it needs ``return_tokens_as_token_ids``, ``stop_token_ids``, ``allowed_token_ids``, ``ignore_eos``,
``prompt_logprobs``, and the sampling parameters of ``WHOLE_DISTRIBUTION``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from http.client import INTERNAL_SERVER_ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.proxy.engines.http_server import Server, ServerError, Stream
from actors.proxy.engines.protocol import EngineLimits, GenerateRequest
from actors.proxy.engines.sampled import Texts
from actors.proxy.engines.served_engine import (
    WHOLE_DISTRIBUTION,
    Piece,
    ServedEngine,
    Token,
    field,
    told_error,
    vocabulary_of,
)
from actors.proxy.engines.torch_weights import gather, policy_tensors, tensor_digest

if TYPE_CHECKING:
    import torch

IMPOSSIBLE = -9999.0
"""What vLLM says for a log-probability of minus infinity, which JSON does not have."""


class WeightsAreFixed(RuntimeError):
    """The server cannot be given other weights."""


class OpenAIEngine(ServedEngine):
    """See the module docstring. ``url``: with the interface's path, as ``http://host:8000/v1``."""

    def __init__(
        self,
        policy_dir: Path,
        *,
        url: str,
        key: str | None = None,
        max_sequences: int,
        max_model_len: int,
        seed: int = 0,
        texts: Texts | None = None,
    ) -> None:
        server = Server(url, key)
        model = field(server.ask("/models"), "data", 0)
        self._model = str(field(model, "id"))
        # The server's own limit, where it says one: a whole sequence can still be scored, which samples one token more.
        longest = min(max_model_len, int(model.get("max_model_len") or max_model_len + 1) - 1)
        limits = EngineLimits(max_sequences, longest, vocabulary_of(policy_dir), texts is not None)
        super().__init__(server, limits, seed=seed, texts=texts)
        self._policy_dir = policy_dir
        self._fixed: int | None = None
        self._probe()

    def _probe(self) -> None:
        """Two allowed tokens' log-probabilities at temperature 0.5: of the distribution sampled from they add up to
        one and lie twice as far apart as at temperature 1. Raises ``ServerError`` where they are of another."""
        apart = {}
        for temperature in (0.5, 1.0):
            body = self._body([1], 1, 1, temperature=temperature, logprobs=2, allowed=(0, 1)) | {"stream": False}
            told = field(self.server.ask("/completions", body), "choices", 0, "logprobs", "top_logprobs", 0)
            logprobs = sorted(told.values())
            total = sum(map(math.exp, logprobs))
            if len(logprobs) != 2 or not math.isclose(total, 1.0, abs_tol=1e-3):
                raise ServerError(
                    f"{self.server.url}: of two allowed tokens the probabilities add up to {total:.3g}, expected 1: "
                    f"its log-probabilities are not those of the distribution sampled from (vLLM: start it with "
                    f"--logprobs-mode processed_logprobs)"
                )
            apart[temperature] = logprobs[1] - logprobs[0]
        if not math.isclose(apart[0.5], 2 * apart[1.0], rel_tol=1e-3, abs_tol=1e-4):
            raise ServerError(
                f"{self.server.url}: two tokens' log-probabilities lie {apart[0.5]:.4g} apart at temperature 0.5 and "
                f"{apart[1.0]:.4g} at 1, expected twice as much: they are not those of the distribution sampled from"
            )

    def _body(
        self,
        tokens: Sequence[int],
        left: int,
        seed: int,
        *,
        temperature: float,
        logprobs: int,
        allowed: tuple[int, ...] | None = None,
        stop: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        return WHOLE_DISTRIBUTION | {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": left,
            "temperature": temperature,
            "seed": seed,
            "logprobs": logprobs,
            "stream": True,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
            "stop_token_ids": list(stop),
            "allowed_token_ids": None if allowed is None else list(allowed),
        }

    def open(self, request: GenerateRequest, tokens: Sequence[int], left: int, seed: int, name: str) -> Stream:
        body = self._body(
            tokens,
            left,
            seed,
            temperature=request.temperature,
            logprobs=request.logprobs,
            allowed=request.allowed_token_ids,
            stop=request.stop_token_ids,
        )
        return self.server.stream("/completions", body)

    def pieces(self, request: GenerateRequest, stream: Stream) -> Iterator[Piece]:
        for event in stream.events():
            if "error" in event:
                raise told_error(self.server.url, event["error"], INTERNAL_SERVER_ERROR)
            for choice in event.get("choices") or ():
                told = choice.get("logprobs")
                tokens = [] if told is None else list(self._tokens(told, request.logprobs))
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

    def take_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        if self._fixed not in (None, version):
            raise WeightsAreFixed(
                f"version {version}: {self.server.url} serves the weights that it was started with (taken as version "
                f"{self._fixed}) and cannot be given others; use it for rollouts and evaluation, and train with torch, "
                f"vllm or sglang engines"
            )
        arrived = gather(version, tensors, policy_tensors(self._policy_dir))
        self._fixed = version
        return {name: tensor_digest(tensor) for name, tensor in arrived}

    def ask_scores(self, tokens: list[int]) -> list[float]:
        body = self._body(tokens, 1, 0, temperature=0.0, logprobs=0) | {"stream": False, "prompt_logprobs": 0}
        told = field(self.server.ask("/completions", body), "choices", 0, "prompt_logprobs")
        return [float(field(each, str(token), "logprob")) for each, token in zip(told[1:], tokens[1:], strict=True)]


def _id_of(name: str) -> int:
    """``token_id:17``."""
    kind, _, number = name.partition(":")
    if kind != "token_id" or not number.isdecimal():
        raise ServerError(f"expected a token as token_id:NUMBER, found {name!r}: this server does not tell token ids")
    return int(number)
