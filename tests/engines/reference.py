"""Tiny policies and what plain transformers says about them: the independent side of the engine tests.

Nothing here imports an engine; every figure comes from a whole, uncached, eager forward pass.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from actors.policy import Qwen3Shape, write_config
from actors.proxy.engines.protocol import Completion, Engine, GenerateRequest

VOCABULARY = 120
MAX_MODEL_LEN = 96
MAX_SEQUENCES = 4


def tiny_shape(*, tied: bool) -> Qwen3Shape:
    return Qwen3Shape(
        vocab_size=VOCABULARY,
        hidden_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        intermediate_size=96,
        max_positions=256,
        tied_embeddings=tied,
    )


def write_tiny_policy(directory: Path, *, tied: bool) -> Path:
    """A policy directory as a job would leave it; pad and end tokens fit the small vocabulary."""
    write_config(tiny_shape(tied=tied), directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 1, "pad_token_id": 0}))
    return directory


class Reference:
    """The same policy in transformers, one model a version; weights come from the version as the seed."""

    def __init__(self, policy_dir: Path, versions: tuple[int, ...] = (0, 1, 2), scale: float = 0.12) -> None:
        self.models = {version: _model(policy_dir, version, scale) for version in versions}

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        """Hugging Face names; a tied head is absent because it is no parameter of its own."""
        return [(name, tensor.detach().clone()) for name, tensor in self.models[version].named_parameters()]

    def logits(self, version: int, tokens: np.ndarray) -> torch.Tensor:
        """float32 [T, V]."""
        with torch.no_grad():
            out = self.models[version](input_ids=torch.tensor(tokens.astype(np.int64))[None], use_cache=False)
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def score(self, version: int, tokens: np.ndarray) -> np.ndarray:
        logprobs = torch.log_softmax(self.logits(version, tokens), -1)
        return np.array([float(logprobs[i, int(tokens[i + 1])]) for i in range(len(tokens) - 1)], dtype=np.float32)

    def behaviour(self, request: GenerateRequest, completion: Completion) -> np.ndarray:
        """Log-probability of each completed token under the version stated for it, after temperature and mask."""
        distributions = self.distributions(request, completion)
        chosen = distributions.gather(1, torch.from_numpy(completion.tokens.astype(np.int64))[:, None])
        return np.asarray(chosen[:, 0].numpy())

    def distributions(self, request: GenerateRequest, completion: Completion) -> torch.Tensor:
        """float32 [N, V]: what each completed token was drawn from, as log-probabilities."""
        tokens = np.concatenate([request.prompt, completion.tokens])
        by_version = {version: self.logits(version, tokens) for version in set(completion.versions.tolist())}
        hidden = torch.zeros(by_version[int(completion.versions[0])].shape[1], dtype=torch.bool)
        if request.allowed_token_ids is not None:
            hidden[:] = True
            hidden[list(request.allowed_token_ids)] = False
        result = []
        for index, version in enumerate(completion.versions):
            logits = by_version[int(version)][len(request.prompt) - 1 + index] / (request.temperature or 1.0)
            logits = logits.masked_fill(hidden, -torch.inf)
            result.append(torch.log_softmax(logits, -1))
        return torch.stack(result)

    def greedy(self, version: int, prompt: np.ndarray, count: int) -> list[int]:
        """transformers' own ``generate``."""
        out: Any = self.models[version].generate(
            input_ids=torch.tensor(prompt.astype(np.int64))[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return [int(token) for token in out[0, len(prompt) :]]


def _model(policy_dir: Path, seed: int, scale: float) -> Any:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy_dir), attn_implementation="eager")
    model = model.float().eval()
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for tensor in model.parameters():
            noise = torch.randn(tensor.shape, generator=generator) * scale
            tensor.copy_(noise + 1 if tensor.ndim == 1 else noise)
    return model


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCABULARY, length).astype(np.int32)


def spelled(tokens: np.ndarray) -> str:
    """What tokens read as in these tests: ``<17><4>``."""
    return "".join(f"<{token}>" for token in tokens.tolist())


def finish(engine: Engine, limit: int = 2000) -> dict[str, Completion]:
    """Step until nothing is unfinished; a second answer to one request fails."""
    answers: dict[str, Completion] = {}
    for _ in range(limit):
        if not engine.unfinished():
            return answers
        for completion in engine.step():
            assert completion.request_id not in answers
            answers[completion.request_id] = completion
    raise TimeoutError(f"{engine.unfinished()} requests unfinished after {limit} steps")
