"""Steps of the torch and of the megatron backend beside a bare loop over a transformers model: one part of
``python -m benchmarks.trainer``.

All three train a model of the same shape on the same batch, in turn, in one process with the same number of threads: 16
segments of 128 to 512 tokens that share nothing, of which about half were sampled, in micro-batches of 8,192 padded
tokens; what is timed is a whole step (packing, forward, backward, clipping, AdamW). The bare loop is what one would
write first, and well: segments sorted by length and padded, sdpa attention, logits of all positions, a policy loss over
the sampled ones.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from actors.settings import TrainSettings
from actors.trainer.backends import make_backend
from actors.trainer.backends.packing import rows_by_length
from actors.trainer.backends.protocol import Backend, TrainBatch, TrainSequence
from actors.trajectory import FULL_VOCABULARY

RATE = 1e-5


class Reading(msgspec.Struct, frozen=True):
    """CPU seconds of a step, medians."""

    tokens: int  # of the batch, no padding
    bare_s: float
    torch_s: float
    megatron_s: float
    torch_vs_transformers: float  # of the pairs' ratios of tokens/s, the median
    megatron_vs_transformers: float


def ragged(vocabulary: int) -> TrainBatch:
    """See the module docstring."""
    rng = np.random.default_rng(0)
    sequences = []
    for i in range(16):
        length = int(rng.integers(128, 513))
        mask = (rng.random(length) < 0.5).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        sequences.append(
            TrainSequence(
                ticket=f"s{i}",
                tokens=rng.integers(0, vocabulary, length).astype(np.int32),
                loss_mask=mask,
                logprobs=(-np.log(vocabulary) * mask).astype(np.float32),
                allowed=np.full(length, FULL_VOCABULARY, np.int32),
                advantage=float(rng.normal()),
                temperature=1.0,
            )
        )
    return TrainBatch(sequences=sequences, allowed_sets=[])


class Bare:
    """The loop that the backends are compared with."""

    def __init__(self, directory: Path, settings: TrainSettings) -> None:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        self._model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        self._budget = settings.micro_batch_tokens
        self._max_norm = settings.max_grad_norm
        betas = (settings.adam_beta1, settings.adam_beta2)
        self._adamw = torch.optim.AdamW(self._model.parameters(), lr=RATE, betas=betas, weight_decay=0.0, fused=True)

    def step(self, batch: TrainBatch) -> None:
        sampled = sum(int(sequence.loss_mask.sum()) for sequence in batch.sequences)
        for group in rows_by_length([len(sequence.tokens) for sequence in batch.sequences], self._budget):
            rows = [batch.sequences[i] for i in group]
            width = max(len(row.tokens) for row in rows)
            tokens, mask, behaviour = (np.zeros((len(rows), width), kind) for kind in (np.int64, np.int64, np.float32))
            for i, row in enumerate(rows):
                tokens[i, : len(row.tokens)] = row.tokens
                mask[i, : len(row.tokens)] = row.loss_mask
                behaviour[i, : len(row.tokens)] = row.logprobs
            attended = np.arange(width)[None] < np.array([[len(row.tokens)] for row in rows])
            ids = torch.from_numpy(tokens)
            logits = self._model(input_ids=ids, attention_mask=torch.from_numpy(attended.astype(np.int64))).logits
            logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            ratio = torch.exp(logprobs.detach() - torch.from_numpy(behaviour[:, 1:])).clamp(max=2.0)
            advantage = torch.tensor([[row.advantage] for row in rows])
            loss = -(logprobs * ratio * advantage * torch.from_numpy(mask[:, 1:])).sum() / sampled
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm)
        self._adamw.step()
        self._adamw.zero_grad()


def _step(backend: Backend, batch: TrainBatch) -> None:
    backend.forward_backward(batch)
    backend.optim_step(RATE)


def measure(config: dict[str, Any], rounds: int) -> Reading:
    """``rounds`` steps of each, in turn, after one that is not measured."""
    batch = ragged(config["vocab_size"])
    # Megatron's substitutes for CUDA hold for a thread: it has one of its own.
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(1) as aside:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        bare = Bare(Path(directory), TrainSettings())
        ours = _backend(Path(directory), "torch")
        megatron = aside.submit(_backend, Path(directory), "megatron").result()
        ways: dict[str, Callable[[], object]] = {
            "bare": lambda: bare.step(batch),
            "torch": lambda: _step(ours, batch),
            "megatron": lambda: aside.submit(_step, megatron, batch).result(),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name in list(ways)[:: 1 if turn % 2 else -1]:
                start = time.process_time()
                ways[name]()
                if turn:
                    seconds[name].append(time.process_time() - start)
        aside.submit(megatron.close).result()
    return Reading(
        tokens=sum(len(sequence.tokens) for sequence in batch.sequences),
        bare_s=median(seconds["bare"]),
        torch_s=median(seconds["torch"]),
        megatron_s=median(seconds["megatron"]),
        torch_vs_transformers=_ratio(seconds["bare"], seconds["torch"]),
        megatron_vs_transformers=_ratio(seconds["bare"], seconds["megatron"]),
    )


def _ratio(bare: list[float], other: list[float]) -> float:
    return median(one / two for one, two in zip(bare, other, strict=True))


def _backend(directory: Path, name: Any) -> Backend:
    return make_backend(
        directory,
        seed=0,
        settings=TrainSettings(backend=name, threads=torch.get_num_threads()),
        dtype="float32",
        from_scratch=True,
        rendezvous=directory / "rendezvous",
    )
