"""One rank of the megatron backend, for ``test_megatron_backend``: makes every collective call and records results.

``python -m tests.trainer.megatron_rank RANK WORLD DIRECTORY``: reads the policies in ``DIRECTORY`` and writes
``rank-RANK.safetensors`` and ``rank-RANK.json`` there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from actors.settings import TrainSettings
from actors.trainer.backends import make_backend
from actors.trainer.backends.protocol import Backend, CheckpointError, NotFinite, TrainBatch
from tests.trainer.samples import SETS, batch

LEARNING_RATE = 1e-4
SETTINGS: dict[str, Any] = {"weight_decay": 0.1, "max_grad_norm": 0.5}
CASES = {1: ["qwen3", "llama-untied"], 2: ["qwen3", "qwen2-untied"]}  # ranks -> policies


def five_steps(backend: Backend) -> list[dict[str, float]]:
    """What both sides do with fresh weights."""
    return [backend.forward_backward(batch(i)) | backend.optim_step(LEARNING_RATE) for i in range(5)]


def imitation(backend: Backend) -> dict[str, float]:
    """What a batch would do, and a step of imitation on it."""
    given = batch(8)
    inspection = backend.inspect(given)
    figures = {f"norm {ticket}": norm for ticket, norm in inspection.gradient_norms.items()}
    figures |= {"inspected loss": float(sum(losses.sum() for losses in inspection.losses))}
    figures |= {"inspected norm": inspection.gradient_norm}
    demonstrations = TrainBatch(given.sequences, given.allowed_sets, "imitation")
    return figures | backend.forward_backward(demonstrations) | backend.optim_step(LEARNING_RATE)


class Recorder:
    """What a rank saw, written at the end."""

    def __init__(self, rank: int, ranks: int, directory: Path) -> None:
        self.rank, self.ranks, self.directory = rank, ranks, directory
        self.tensors: dict[str, torch.Tensor] = {}
        self.facts: dict[str, Any] = {}

    def backend(self, case: str) -> Backend:
        return make_backend(
            self.directory / case,
            seed=0,
            settings=TrainSettings(
                backend="megatron", tensor_parallel=self.ranks, threads=1, micro_batch_tokens=64, **SETTINGS
            ),
            dtype="float32",
            from_scratch=True,
            rank=self.rank,
            world_size=self.ranks,
            rendezvous=self.directory / f"rendezvous-{case}",
            timeout_s=60.0,
        )

    def export(self, label: str, backend: Backend) -> None:
        self.tensors |= {f"{label}/{name}": tensor for name, tensor in backend.export()}

    def parity(self, case: str, backend: Backend) -> None:
        self.export(f"{case}/initial", backend)
        given = batch(1)
        for i, values in enumerate(backend.logprobs(given)):
            self.tensors[f"{case}/logprobs/{i}"] = torch.from_numpy(values)
        self.tensors[f"{case}/score"] = torch.from_numpy(backend.score(given.sequences[0].tokens))
        self.facts[f"{case}/steps"] = five_steps(backend)
        self.export(f"{case}/five", backend)
        self.facts[f"{case}/imitation"] = imitation(backend)

    def resume(self, backend: Backend) -> None:
        checkpoint = self.directory / "checkpoint"
        backend.save(checkpoint)
        for label in ("unbroken", "resumed"):
            backend.forward_backward(batch(6))
            backend.optim_step(LEARNING_RATE)
            self.export(label, backend)
            backend.load(checkpoint)
        path = checkpoint / f"rank-{self.rank:05d}.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        try:
            backend.load(checkpoint)
        except CheckpointError as error:
            self.facts["checkpoint error"] = str(error)

    def not_finite(self, backend: Backend) -> None:
        sequences = batch(7).sequences
        broken = msgspec.structs.replace(sequences[2], logprobs=np.full_like(sequences[2].logprobs, np.nan))
        try:
            backend.forward_backward(TrainBatch(sequences=[*sequences[:2], broken, *sequences[3:]], allowed_sets=SETS))
        except NotFinite as error:
            self.facts["not finite"] = [broken.ticket, *error.tickets]

    def write(self) -> None:
        save_file(self.tensors, self.directory / f"rank-{self.rank}.safetensors")
        (self.directory / f"rank-{self.rank}.json").write_text(json.dumps(self.facts))


def main(rank: int, ranks: int, directory: Path) -> None:
    """Run the cases, the first one with checkpoints and faults."""
    recorder = Recorder(rank, ranks, directory)
    for number, case in enumerate(CASES[ranks]):
        backend = recorder.backend(case)
        recorder.parity(case, backend)
        if number == 0:
            recorder.resume(backend)
            recorder.not_finite(backend)
        backend.close()
        backend.close()
    recorder.write()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
