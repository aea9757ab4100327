"""An independent trainer: a plain transformers forward pass per segment, masks by -inf, torch's AdamW and clipping.

Written from the definitions, without the code under test and without its tricks (no padding, no gathering).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from actors.settings import TrainSettings
from actors.trainer.algorithms.presets import resolve
from actors.trainer.backends.protocol import Backend, TrainBatch, TrainSequence
from actors.trajectory import FULL_VOCABULARY


def load_exported(backend: Backend, policy_dir: Path, scratch: Path) -> Any:
    """The model that transformers itself loads from what the backend exports."""
    scratch.mkdir(exist_ok=True)
    (scratch / "config.json").write_bytes((policy_dir / "config.json").read_bytes())
    save_file(dict(backend.export()), scratch / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def logprobs(model: Any, sequence: TrainSequence, allowed_sets: list[np.ndarray]) -> torch.Tensor:
    """Of the sampled tokens of one segment, in order."""
    logits = model(input_ids=torch.from_numpy(sequence.tokens.astype(np.int64))[None]).logits[0]
    values = []
    for place in np.flatnonzero(sequence.loss_mask):
        row = logits[place - 1] / sequence.temperature
        if sequence.allowed[place] != FULL_VOCABULARY:
            mask = torch.full_like(row, -torch.inf)
            mask[torch.from_numpy(allowed_sets[sequence.allowed[place]].astype(np.int64))] = 0.0
            row = row + mask
        values.append(torch.log_softmax(row, dim=-1)[int(sequence.tokens[place])])
    return torch.stack(values)


def loss(model: Any, batch: TrainBatch, settings: TrainSettings) -> torch.Tensor:
    """The policy-gradient loss with a truncated importance weight (before the first step nothing is clipped)."""
    algorithm = resolve(settings)
    per_trajectory: dict[str, list[torch.Tensor]] = {}
    for sequence in batch.sequences:
        new = logprobs(model, sequence, batch.allowed_sets)
        behaviour = torch.from_numpy(sequence.logprobs[sequence.loss_mask == 1])
        weight = torch.exp(new.detach() - behaviour).clamp(max=algorithm.tis_cap)
        per_trajectory.setdefault(sequence.ticket, []).append(
            -torch.exp(new - new.detach()) * sequence.advantage * weight
        )
    joined = [torch.cat(parts) for parts in per_trajectory.values()]
    if algorithm.aggregation == "token":
        return torch.cat(joined).mean()
    return torch.stack([part.mean() for part in joined]).mean()


def train(model: Any, batches: list[TrainBatch], settings: TrainSettings, learning_rate: float) -> list[float]:
    """One optimiser step a batch; returns the gradient norms before clipping."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups, lr=learning_rate, betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_epsilon
    )
    norms = []
    for batch in batches:
        adamw.zero_grad()
        loss(model, batch, settings).backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)))
        adamw.step()
    return norms
