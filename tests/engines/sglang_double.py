"""A server that speaks SGLang's formats, for a machine on which SGLang does not run: HTTP over a real socket, what it
samples and scores from transformers' model on the weights that it was given.

Formats as SGLang 0.5 documents them: https://docs.sglang.io/docs/basic_usage/native_api (``/generate``,
``/model_info``, ``/update_weights_from_disk``) and .../basic_usage/sampling_params (``meta_info``: log-probabilities as
[logprob, id, text]).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

DEFAULTS = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""As ``sampling_params`` documents them."""


class SglangDouble:
    """``original_logprobs``: told before temperature, as with ``SGLANG_RETURN_ORIGINAL_LOGPROB``; ``incremental``:
    events have new tokens alone; ``ignores_weights``: says that it has taken them, and computes with the old ones;
    ``instead``: said in place of a stream's events; ``refuses``: requests whose prompt begins so, by a status or by an
    event in its place; ``preferred``: for sampling parameters that a request leaves out, as with
    ``--preferred-sampling-params``."""

    def __init__(self, policy_dir: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy_dir)).float().eval()
        self.original_logprobs = False
        self.incremental = False
        self.ignores_weights = False
        self.instead: bytes | None = None
        self.refuses: dict[int, int | dict[str, Any]] = {}
        self.preferred: dict[str, float] = {}
        self.refuses_weights = False
        self.weight_version = "default"
        self.asked: list[tuple[str, Any]] = []  # path and body, in order
        self.running = 0
        self.seen_while_loading: list[int] = []  # requests that ran when weights came
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()
        self._random = torch.Generator().manual_seed(3)

    def logprobs(self, tokens: list[int], temperature: float) -> torch.Tensor:
        """float32 [T, V]."""
        with self._lock, torch.no_grad():
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        return torch.log_softmax(logits / (temperature or 1.0), -1)

    def sampled_from(self, tokens: list[int], prompt: int, params: dict[str, Any]) -> torch.Tensor:
        """float32 [V]: the next token's distribution, behind so many tokens of a prompt."""
        counts = torch.bincount(
            torch.tensor(tokens[prompt:], dtype=torch.int64), minlength=self.model.config.vocab_size
        )
        logits = self.logprobs(tokens, 1.0)[-1:]
        logits = logits - params["frequency_penalty"] * counts - params["presence_penalty"] * (counts > 0)
        rules: list[Any] = [TemperatureLogitsWarper(float(params["temperature"]) or 1.0)]
        if params["repetition_penalty"] != 1:
            rules.insert(0, RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
        if params["top_k"] > 0:
            rules.append(TopKLogitsWarper(params["top_k"]))
        rules += [TopPLogitsWarper(params["top_p"]), MinPLogitsWarper(params["min_p"])]
        ids: Any = torch.tensor([tokens])
        for rule in rules:
            logits = rule(ids, logits)
        return torch.log_softmax(logits[0], -1)

    def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """An event for each token."""
        params = DEFAULTS | self.preferred | body["sampling_params"]
        tokens, temperature = list(body["input_ids"]), float(params["temperature"])
        prompt, start = len(tokens), body.get("logprob_start_len", -1)
        inputs = [] if start < 0 else self._inputs(tokens)
        sampled: list[list[Any]] = []
        tops: list[list[list[Any]]] = []
        finish: dict[str, Any] | None = None
        while finish is None:
            self.gate.wait(10.0)
            distribution = self.sampled_from(tokens, prompt, params)
            drawn = int(torch.multinomial(distribution.exp(), 1, generator=self._random))
            token = drawn if temperature else int(distribution.argmax())
            told = self.logprobs(tokens, 1.0)[-1] if self.original_logprobs else distribution
            best = told.topk(max(1, body.get("top_logprobs_num", 0)))
            tokens.append(token)
            sampled.append([float(told[token]), token, None])
            tops.append(
                [[float(logprob), int(id_), None] for logprob, id_ in zip(best.values, best.indices, strict=True)]
            )
            count = len(tokens) - prompt
            if token in params.get("stop_token_ids", ()):
                finish = {"type": "stop", "matched": token}
            elif count == params["max_new_tokens"]:
                finish = {"type": "length", "length": count}
            since = count - 1 if self.incremental else 0
            yield {
                "text": "",
                "output_ids": tokens[prompt + since :],
                "meta_info": {
                    "id": body.get("rid", ""),
                    "finish_reason": finish,
                    "prompt_tokens": prompt,
                    "completion_tokens": count,
                    "weight_version": self.weight_version,
                    "input_token_logprobs": inputs,
                    "output_token_logprobs": sampled[since:],
                    "output_top_logprobs": tops[since:] if body.get("top_logprobs_num") else [],
                },
            }

    def _inputs(self, tokens: list[int]) -> list[list[Any]]:
        told = self.logprobs(tokens, 1.0)
        rest = [[float(told[place, token]), token, None] for place, token in enumerate(tokens[1:])]
        return [[None, tokens[0], None], *rest]

    def update(self, body: dict[str, Any]) -> dict[str, Any]:
        self.seen_while_loading.append(self.running)
        self.gate.wait(10.0)
        if self.refuses_weights:
            return {"success": False, "message": "no such architecture", "num_paused_requests": 0}
        weights = load_file(Path(body["model_path"]) / "model.safetensors")
        assert (Path(body["model_path"]) / "config.json").is_file()
        if not self.ignores_weights:
            with self._lock, torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(weights[name])
        self.weight_version = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


def _handler(double: SglangDouble) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing is printed."""

        def do_GET(self) -> None:
            double.asked.append((self.path, None))
            self._answer({"model_path": "double", "weight_version": double.weight_version})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            double.asked.append((self.path, body))
            if self.path == "/update_weights_from_disk":
                self._answer(double.update(body))
            elif body.get("stream"):
                self._stream(body)
            else:
                self._answer(list(double.generate(body))[-1])

        def _answer(self, content: dict[str, Any], status: int = 200) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, body: dict[str, Any]) -> None:
            refusal = double.refuses.get(body["input_ids"][0])
            if isinstance(refusal, int):
                self._answer({"message": "no such request"}, refusal)
                return
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            double.running += 1
            try:
                if double.instead is not None:
                    self.wfile.write(b"data: " + double.instead + b"\n\n")
                    return
                for event in double.generate(body) if refusal is None else [refusal]:
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                    self.wfile.flush()
                    time.sleep(0.001)
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                return  # whoever asked is gone, which SGLang takes as an abort
            finally:
                double.running -= 1

    return Handler


@contextmanager
def serving(double: SglangDouble) -> Iterator[str]:
    """Its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(double))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
