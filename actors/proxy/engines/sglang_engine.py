"""SGLang over its own HTTP interface: ``/generate`` with token ids, weights from a directory that both sides see.

Invariant: as ``actors.proxy.engines.served_engine``: the server works on nothing while weights are loaded, and has
dropped its prefix cache (``flush_cache``) before it samples again. Digests are those of the tensors as they were
written for the server to read; that it computes with them is proven by the canary, which it scores itself.

Formats: https://docs.sglang.io/docs/basic_usage/native_api and .../basic_usage/sampling_params; what weights need,
.../advanced_features/sglang_for_rl.

What this server cannot do: sample from allowed tokens only (such requests are refused), and repeat itself by a seed
unless it was started with ``--enable-deterministic-inference``. It must not be started with
``SGLANG_RETURN_ORIGINAL_LOGPROB``, which tells log-probabilities before temperature (found out by ``_probe``).
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from http.client import BAD_REQUEST
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import save_file

from actors.proxy.engines.http_server import Server, ServerError, Stream
from actors.proxy.engines.progress import LOADING_TIMEOUT_S
from actors.proxy.engines.protocol import EngineLimits, GenerateRequest
from actors.proxy.engines.sampled import Ranked, Texts
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

COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""What a model's directory has beside its weights."""


class SglangEngine(ServedEngine):
    """See the module docstring. ``url``: as ``http://host:30000``. ``exchange``: a directory that the server sees under
    the same path, for weights; default: one for temporary files, which is right on the server's own host."""

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
        exchange: Path | None = None,
    ) -> None:
        server = Server(url, key)
        limits = EngineLimits(max_sequences, max_model_len, vocabulary_of(policy_dir), texts is not None, masks=False)
        super().__init__(server, limits, seed=seed, texts=texts)
        self._policy_dir = policy_dir
        self._exchange = exchange
        server.ask("/model_info")  # it is there
        self._probe()

    def _probe(self) -> None:
        """Two tokens' log-probabilities lie twice as far apart at temperature 0.5 as at 1 where temperature is in them.
        Raises ``ServerError`` where it is not."""
        apart = {}
        for temperature in (0.5, 1.0):
            body = self._body([1], 1, 1, temperature=temperature, logprobs=2)
            best = field(self.server.ask("/generate", body), "meta_info", "output_top_logprobs", 0)
            apart[temperature] = float(best[0][0]) - float(best[1][0])
        if not math.isclose(apart[0.5], 2 * apart[1.0], rel_tol=1e-2, abs_tol=1e-3):
            raise ServerError(
                f"{self.server.url}: the best tokens' log-probabilities lie {apart[0.5]:.4g} apart at temperature 0.5 "
                f"and {apart[1.0]:.4g} at 1, expected twice as much: they are not those of the distribution sampled "
                f"from (unset SGLANG_RETURN_ORIGINAL_LOGPROB)"
            )

    def _body(
        self,
        tokens: Sequence[int],
        left: int,
        seed: int,
        *,
        temperature: float,
        logprobs: int = 0,
        stop: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        return {
            "input_ids": list(tokens),
            "sampling_params": WHOLE_DISTRIBUTION
            | {
                "max_new_tokens": left,
                "temperature": temperature,
                "stop_token_ids": list(stop),
                "ignore_eos": True,
                "sampling_seed": seed % 2**31,
            },
            "return_logprob": True,
            "top_logprobs_num": logprobs,
        }

    def open(self, request: GenerateRequest, tokens: Sequence[int], left: int, seed: int, name: str) -> Stream:
        body = self._body(
            tokens,
            left,
            seed,
            temperature=request.temperature,
            logprobs=request.logprobs,
            stop=request.stop_token_ids,
        )
        return self.server.stream("/generate", body | {"rid": name, "stream": True})

    def pieces(self, request: GenerateRequest, stream: Stream) -> Iterator[Piece]:
        seen = 0
        for event in stream.events():
            if "error" in event:
                raise told_error(self.server.url, event["error"], BAD_REQUEST)  # it does not say, and means this
            told = field(event, "meta_info")
            end = told.get("finish_reason") or {}
            if end.get("status_code"):  # what its scheduler refuses is told here
                raise told_error(self.server.url, end, int(end["status_code"]))
            tokens, seen = _new_tokens(told, seen, request.logprobs)
            yield Piece(tokens, str(end.get("type", "")))

    def take_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        arrived = gather(version, tensors, policy_tensors(self._policy_dir))
        directory = Path(tempfile.mkdtemp(prefix=f"rollart-v{version:05d}-", dir=self._exchange))
        try:
            for name in COMPANIONS:
                if (self._policy_dir / name).is_file():
                    shutil.copy(self._policy_dir / name, directory / name)
            save_file({name: tensor.contiguous() for name, tensor in arrived}, directory / "model.safetensors")
            body = {
                "model_path": str(directory),
                "weight_version": str(version),
                "abort_all_requests": True,  # what it has not yet noticed to be withdrawn
                "flush_cache": True,
            }
            answer = self.server.ask("/update_weights_from_disk", body, silence_s=LOADING_TIMEOUT_S)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        if not field(answer, "success"):
            raise ServerError(f"version {version}: {self.server.url} did not take it: {answer.get('message')}")
        has = str(field(self.server.ask("/model_info"), "weight_version"))
        if has != str(version):
            raise ServerError(f"version {version}: {self.server.url} says that it has version {has}")
        return {name: tensor_digest(tensor) for name, tensor in arrived}

    def ask_scores(self, tokens: list[int]) -> list[float]:
        body = self._body(tokens, 1, 0, temperature=1.0) | {"logprob_start_len": 0}
        told = field(self.server.ask("/generate", body), "meta_info", "input_token_logprobs")
        if [int(each[1]) for each in told] != tokens:
            raise ServerError(f"{self.server.url}: {len(tokens)} tokens were to be scored, and {len(told)} others were")
        return [float(each[0]) for each in told[1:]]


def _new_tokens(told: dict[str, Any], seen: int, alternatives: int) -> tuple[list[Token], int]:
    """Those behind the first ``seen``. Events have all tokens so far, or (``--incremental-streaming-output``) the new
    ones: ``completion_tokens`` counts all, either way."""
    all_told = told.get("output_token_logprobs") or []
    ranks = told.get("output_top_logprobs") or [None] * len(all_told)
    count = int(field(told, "completion_tokens"))
    first = count - len(all_told)
    tokens = []
    for place in range(max(0, seen - first), len(all_told)):
        logprob, token = all_told[place][:2]
        tokens.append(Token(int(token), float(logprob), _ranked(ranks[place]) if alternatives else None))
    return tokens, max(seen, first + len(all_told))


def _ranked(told: Any) -> Ranked:
    best = [(float(each[0]), int(each[1])) for each in told or ()]
    return np.array([token for _, token in best], np.int32), np.array([logprob for logprob, _ in best], np.float32)
