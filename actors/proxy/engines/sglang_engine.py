"""SGLang over its own HTTP interface: ``/generate`` with token ids, weights from a directory that both sides see.

Invariant: as ``actors.proxy.engines.served_engine``: the server works on nothing while weights are loaded, and has
dropped its prefix cache (``flush_cache``) before it samples again. Digests are those of the tensors as they were
written for the server to read; that it computes with them is proven by the canary, which it scores itself.

Formats: https://docs.sglang.io/docs/basic_usage/native_api and .../basic_usage/sampling_params; what weights need,
.../advanced_features/sglang_for_rl.

What this server cannot do: sample from allowed tokens only (such requests are refused), and repeat itself by a seed
unless it was started with ``--enable-deterministic-inference``. It must not be started with
``SGLANG_RETURN_ORIGINAL_LOGPROB``, which tells log-probabilities before temperature (found out by ``probe``).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from http.client import BAD_REQUEST
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import save_file

from actors.proxy.engines.held import Asked
from actors.proxy.engines.http_server import ServerError, Stream
from actors.proxy.engines.progress import LOADING_TIMEOUT_S
from actors.proxy.engines.sampled import Ranked
from actors.proxy.engines.served_engine import WHOLE_DISTRIBUTION, Piece, ServedEngine, Token, field

if TYPE_CHECKING:
    import torch

COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""What a model's directory has beside its weights."""


class SglangEngine(ServedEngine):
    """See the module docstring. ``url``: as ``http://host:30000``. The directory for weights is one for temporary files
    (``TMPDIR``): a server on another host has to see it under the same path."""

    masks = False
    unsaid = BAD_REQUEST  # its streams say no status, and mean this

    def meet(self, longest: int) -> int:
        self.server.ask("/model_info")
        return longest

    def probe(self) -> None:
        self.check_temperature(self._apart, "unset SGLANG_RETURN_ORIGINAL_LOGPROB")

    def _apart(self, temperature: float) -> float:
        """The best two tokens' log-probabilities."""
        told = self.server.ask("/generate", self._body(Asked([1], temperature=temperature, logprobs=2)))
        best = field(told, "meta_info", "output_top_logprobs", 0)
        return float(best[0][0]) - float(best[1][0])

    def _body(self, asked: Asked) -> dict[str, Any]:
        own = {
            "max_new_tokens": asked.left,
            "temperature": asked.temperature,
            "stop_token_ids": asked.stop,
            "ignore_eos": True,
            "sampling_seed": asked.seed % 2**31,
        }
        return {
            "input_ids": asked.tokens,
            "sampling_params": WHOLE_DISTRIBUTION | own,
            "return_logprob": True,
            "top_logprobs_num": asked.logprobs,
        }

    def open(self, asked: Asked, name: str) -> Stream:
        return self.server.stream("/generate", self._body(asked) | {"rid": name, "stream": True})

    def pieces(self, events: Iterator[Any], alternatives: int) -> Iterator[Piece]:
        seen = 0
        for event in events:
            told = field(event, "meta_info")
            end = told.get("finish_reason") or {}
            if end.get("status_code"):  # what its scheduler refuses is told here
                raise self.told_error(end, int(end["status_code"]))
            tokens, seen = _new_tokens(told, seen, alternatives)
            yield Piece(tokens, str(end.get("type", "")))

    def take_weights(self, version: int, arrived: list[tuple[str, torch.Tensor]]) -> None:
        directory = Path(tempfile.mkdtemp(prefix=f"rollart-v{version:05d}-"))
        try:
            for name in COMPANIONS:
                if (self.policy_dir / name).is_file():
                    shutil.copy(self.policy_dir / name, directory / name)
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

    def ask_scores(self, tokens: list[int]) -> list[float]:
        body = self._body(Asked(tokens)) | {"logprob_start_len": 0}
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
