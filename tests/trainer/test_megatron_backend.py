"""The megatron backend on meshes of one, two and four processes, against the torch backend and transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from actors.settings import TrainSettings
from actors.trainer.backends import make_backend
from actors.trainer.backends.protocol import Backend
from actors.trainer.model import build_model
from tests.trainer.megatron_rank import CASES, SETTINGS, five_steps, imitation
from tests.trainer.samples import batch, policy

DEADLINE_S = 240.0
ROOT = Path(__file__).parents[2]


class Run:
    """What the ranks of one run recorded."""

    def __init__(self, ranks: int, directory: Path) -> None:
        self.ranks, self.directory = ranks, directory
        self.tensors = [load_file(directory / f"rank-{rank}.safetensors") for rank in range(ranks)]
        self.facts: list[dict[str, Any]] = [
            json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(ranks)
        ]

    def under(self, label: str, rank: int = 0) -> dict[str, torch.Tensor]:
        prefix = label + "/"
        return {k.removeprefix(prefix): t for k, t in self.tensors[rank].items() if k.startswith(prefix)}

    def reference(self, case: str) -> Backend:
        settings = TrainSettings(**SETTINGS)
        return make_backend(self.directory / case, seed=0, settings=settings, dtype="float32", from_scratch=True)

    @property
    def labels(self) -> list[str]:
        return [case.label for case in CASES[self.ranks]]


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["one process", "two ranks", "four ranks"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    ranks: int = request.param
    directory = tmp_path_factory.mktemp("megatron")
    for case in CASES[ranks]:
        policy(directory / case.label, case.kind, tied=case.tied, layers=case.layers)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.trainer.megatron_rank"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(directory)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, f"rank {rank} of {ranks}:\n{output}"
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=10)
    return Run(ranks, directory)


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def test_it_starts_from_the_very_weights_of_the_torch_backend(run: Run) -> None:
    for case in run.labels:
        theirs = dict(run.reference(case).export())
        for rank in range(run.ranks):
            assert largest_difference(run.under(f"{case}/initial", rank), theirs) == 0.0


def test_logprobs_and_score_equal_the_torch_backends(run: Run) -> None:
    given = batch(1)
    for case in run.labels:
        reference = run.reference(case)
        for i, theirs in enumerate(reference.logprobs(given)):
            ours = run.tensors[0][f"{case}/logprobs/{i}"].numpy()
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        theirs = reference.score(given.sequences[0].tokens)
        np.testing.assert_allclose(run.tensors[0][f"{case}/score"].numpy(), theirs, atol=1e-5)


def test_logprobs_equal_those_of_transformers(run: Run) -> None:
    tokens = torch.from_numpy(batch(1).sequences[0].tokens.astype(np.int64))
    for case in run.labels:
        model: Any = build_model(run.directory / case, seed=0, dtype="float32", from_scratch=True)
        with torch.no_grad():
            logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(dim=-1)
        theirs = logprobs.gather(1, tokens[1:, None]).squeeze(1)
        for rank in range(run.ranks):
            torch.testing.assert_close(run.tensors[rank][f"{case}/score"], theirs, atol=1e-5, rtol=0.0)


def test_five_optimiser_steps_equal_the_torch_backends(run: Run) -> None:
    """Clipping and decay included; every rank reports the same figures and exports the same weights."""
    for case in run.labels:
        reference = run.reference(case)
        steps = five_steps(reference)
        assert max(step["grad_norm"] for step in steps) > SETTINGS["max_grad_norm"]
        for rank in range(run.ranks):
            for ours, theirs in zip(run.facts[rank][f"{case}/steps"], steps, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
            assert largest_difference(run.under(f"{case}/five", rank), dict(reference.export())) < 2e-5
            assert largest_difference(run.under(f"{case}/five", rank), run.under(f"{case}/initial", rank)) > 1e-4


def test_inspections_and_steps_of_imitation_equal_the_torch_backends(run: Run) -> None:
    for case in run.labels:
        reference = run.reference(case)
        five_steps(reference)
        theirs = imitation(reference)
        assert theirs["norm t0"] > 0
        for rank in range(run.ranks):
            assert run.facts[rank][f"{case}/imitation"] == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_the_step_after_a_load_is_that_of_an_unbroken_run(run: Run) -> None:
    for rank in range(run.ranks):
        unbroken = run.under("unbroken", rank)
        assert largest_difference(unbroken, run.under("resumed", rank)) < 1e-6
        assert largest_difference(unbroken, run.under(f"{run.labels[0]}/five", rank)) > 1e-5


def test_another_mesh_does_not_resume_from_it(run: Run) -> None:
    first, *others = CASES[run.ranks]
    for case in others:
        for rank in range(run.ranks):
            if case.parts != first.parts:
                assert "resume with the layout" in run.facts[rank][f"{case.label}/other mesh"]


def test_a_truncated_part_is_named(run: Run) -> None:
    for rank in range(run.ranks):
        assert f"rank-{rank:05d}.safetensors" in run.facts[rank]["checkpoint error"]


def test_a_loss_that_is_not_finite_names_its_trajectory_on_every_rank(run: Run) -> None:
    for rank in range(run.ranks):
        expected, *found = run.facts[rank]["not finite"]
        assert found == [expected]
