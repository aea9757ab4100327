"""Log-probabilities computed anew under the versions that sampled the tokens, against plain forward passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from actors.settings import TrainSettings
from actors.trainer.backends import make_backend
from actors.trainer.backends.protocol import Backend, NotFinite, TrainBatch
from actors.trainer.backends.torch_backend import TorchBackend
from tests.trainer import plain
from tests.trainer.samples import SETS, batch, policy


def make(directory: Path, **settings: Any) -> Backend:
    return make_backend(directory, seed=0, settings=TrainSettings(**settings), dtype="float32", from_scratch=True)


def train(backend: Backend, version: int) -> None:
    """To ``version``, in big steps."""
    backend.forward_backward(batch(version))
    backend.optim_step(1e-2)
    backend.keep(version)


def sampled_under(given: TrainBatch, *versions: int) -> TrainBatch:
    """The first sampled token of each segment under the first version and so on, what remains under the last."""
    sequences = []
    for sequence in given.sequences:
        marks = np.full(len(sequence.tokens), -1, np.int32)
        places = np.flatnonzero(sequence.loss_mask)
        marks[places] = [versions[min(i, len(versions) - 1)] for i in range(len(places))]
        sequences.append(replace(sequence, versions=marks))
    return replace(given, sequences=sequences)


def under(model: Any, given: TrainBatch) -> list[np.ndarray]:
    with torch.no_grad():
        return [plain.logprobs(model, sequence, SETS).numpy() for sequence in given.sequences]


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Backend, dict[int, Any]]:
    """A backend at version 3 that keeps three versions, and all four as plain models."""
    directory = policy(tmp_path / "policy")
    backend = make(directory, recompute_versions=3)
    models = {}
    backend.keep(0)
    for version in range(4):
        if version:
            train(backend, version)
        models[version] = plain.load_exported(backend, directory, tmp_path / f"v{version}")
    return backend, models


def test_a_batch_is_scored_under_any_kept_version(trained: tuple[Backend, dict[int, Any]]) -> None:
    backend, models = trained
    given = batch(7)
    for version in (1, 2, 3):
        for ours, theirs, sequence in zip(
            backend.logprobs(given, version), under(models[version], given), given.sequences, strict=True
        ):
            np.testing.assert_allclose(ours[sequence.loss_mask == 1], theirs, atol=1e-5)
    assert np.abs(backend.logprobs(given, 1)[0] - backend.logprobs(given, 3)[0]).max() > 1e-2
    with pytest.raises(ValueError, match="version 0 is not kept; kept are: 1, 2, 3"):
        backend.logprobs(given, 0)
    for now, last in zip(backend.logprobs(given), backend.logprobs(given, 3), strict=True):
        np.testing.assert_array_equal(now, last)


def test_each_token_is_recomputed_under_the_version_that_sampled_it(trained: tuple[Backend, dict[int, Any]]) -> None:
    """The engines are said to have recorded 0.1 nats less than the trainer, so kl_engine is e^0.1 - 0.1 - 1."""
    backend, models = trained
    given = sampled_under(batch(7), 1, 3, 2)
    of = {version: under(models[version], given) for version in (1, 2, 3)}
    expected, recorded = [], []
    for i, sequence in enumerate(given.sequences):
        versions = sequence.versions
        assert versions is not None
        sampled = versions[sequence.loss_mask == 1]
        values = np.array([of[version][i][place] for place, version in enumerate(sampled)], np.float32)
        logprobs = np.zeros(len(sequence.tokens), np.float32)
        logprobs[sequence.loss_mask == 1] = values - np.float32(0.1)
        expected.append(np.exp(of[3][i] - values))
        recorded.append(replace(sequence, logprobs=logprobs))
    figures = backend.forward_backward(replace(given, sequences=recorded))
    assert figures["recomputed_fraction"] == 1.0
    assert figures["kl_engine"] == pytest.approx(0.1051709 - 0.1, rel=1e-3)
    ratios = np.concatenate(expected)
    assert figures["ratio_mean"] == pytest.approx(float(ratios.mean()), rel=1e-4)
    assert figures["ratio_max"] == pytest.approx(float(ratios.max()), rel=1e-4)


def test_what_an_older_version_sampled_keeps_what_its_engine_recorded(trained: tuple[Backend, dict[int, Any]]) -> None:
    backend, _ = trained
    given = sampled_under(batch(7), 0)
    recorded = make_plain(backend, given)
    figures = backend.forward_backward(given)
    assert "recomputed_fraction" not in figures
    assert figures["ratio_mean"] == pytest.approx(recorded, rel=1e-4)
    half = sampled_under(batch(7), 0, 2)
    tokens = sum(int(sequence.loss_mask.sum()) for sequence in half.sequences)
    share = backend.forward_backward(half)["recomputed_fraction"]
    assert share == pytest.approx(1.0 - len(half.sequences) / tokens)


def make_plain(backend: Backend, given: TrainBatch) -> float:
    """The mean ratio to what engines recorded."""
    pairs = zip(backend.logprobs(given), given.sequences, strict=True)
    return float(np.concatenate([np.exp(new - s.logprobs)[s.loss_mask == 1] for new, s in pairs]).mean())


def test_the_model_has_its_own_weights_again_whatever_happens(trained: tuple[Backend, dict[int, Any]]) -> None:
    backend, _ = trained
    before = dict(backend.export())
    given = sampled_under(batch(7), 1)
    broken = replace(given.sequences[0], logprobs=given.sequences[0].logprobs * np.float32("nan"), versions=None)
    with pytest.raises(NotFinite):
        backend.forward_backward(replace(given, sequences=[broken, *given.sequences[1:]]))
    assert isinstance(backend, TorchBackend)
    kept = backend._kept

    def out_of_memory(_batch: TrainBatch, _indices: list[int]) -> list[np.ndarray]:
        assert any(not torch.equal(before[name], tensor) for name, tensor in backend.export())
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        kept.recompute(given, out_of_memory)
    after = dict(backend.export())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_that_is_loaded_begins_another_history(tmp_path: Path) -> None:
    backend = make(policy(tmp_path / "policy"), recompute_versions=2)
    backend.keep(0)
    train(backend, 1)
    (tmp_path / "saved").mkdir()
    backend.save(tmp_path / "saved")
    train(backend, 2)
    backend.load(tmp_path / "saved")
    with pytest.raises(ValueError, match="version 2 is not kept; kept are: none"):
        backend.logprobs(batch(1), 2)
