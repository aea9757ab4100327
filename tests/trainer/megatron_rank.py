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


class Case(msgspec.Struct, frozen=True):
    """A policy, and how ranks share it."""

    label: str
    mesh: dict[str, Any] = {}
    kind: str = "qwen3"
    tied: bool = True
    layers: int = 2

    @property
    def parts(self) -> dict[str, Any]:
        """What of the mesh a checkpoint depends on: sequence parallelism cuts activations alone."""
        return {key: value for key, value in self.mesh.items() if key != "sequence_parallel"}


TP2, PP2, DP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"data_parallel": 2}
SEQUENCE, SHARDED = {"sequence_parallel": True}, {"distributed_optimizer": True}
CASES = {  # by ranks
    1: [Case("one"), Case("one-llama", kind="llama", tied=False)],
    2: [
        Case("tp2", TP2),
        Case("tp2-qwen2", TP2, kind="qwen2", tied=False),
        Case("tp2-sequence", TP2 | SEQUENCE),
        Case("pp2", PP2),
        Case("pp2-interleaved", PP2 | {"virtual_pipeline": 2}, layers=4),
        Case("dp2", DP2),
        Case("dp2-sharded", DP2 | SHARDED),
    ],
    4: [
        Case("tp2-pp2", TP2 | PP2 | SEQUENCE),
        Case("tp2-dp2", TP2 | DP2 | SHARDED | SEQUENCE, kind="qwen2"),
        Case("pp2-dp2", PP2 | DP2 | SHARDED | {"virtual_pipeline": 2}, kind="llama", tied=False, layers=4),
    ],
}


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

    def backend(self, case: Case) -> Backend:
        return make_backend(
            self.directory / case.label,
            seed=0,
            settings=TrainSettings(backend="megatron", threads=1, micro_batch_tokens=64, **SETTINGS, **case.mesh),
            dtype="float32",
            from_scratch=True,
            rank=self.rank,
            world_size=self.ranks,
            rendezvous=self.directory / f"rendezvous-{case.label}",
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
        backend.save(self.directory / "intact")
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

    def elsewhere(self, label: str, backend: Backend) -> None:
        """Resume with another mesh."""
        try:
            backend.load(self.directory / "intact")
        except CheckpointError as error:
            self.facts[f"{label}/other mesh"] = str(error)

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
        recorder.parity(case.label, backend)
        if number == 0:
            recorder.resume(backend)
            recorder.not_finite(backend)
        elif case.parts != CASES[ranks][0].parts:
            recorder.elsewhere(case.label, backend)
        backend.close()
        backend.close()
    recorder.write()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
