"""Every preset takes real steps with the torch backend, and they do not depend on how a batch is split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.settings import TrainSettings
from actors.trainer.algorithms.presets import PRESETS, resolve
from actors.trainer.backends import make_backend
from actors.trainer.backends.protocol import Backend, NotFinite, TrainBatch
from tests.trainer import plain
from tests.trainer.samples import SETS, batch, policy, tree_batch

TRAINED = [name for name in PRESETS if name != "ppo"]


def make(directory: Path, **settings: Any) -> Backend:
    given: dict[str, Any] = {"length": 30, "max_grad_norm": 1e9} | settings
    if settings.get("algorithm") == "distillation":
        given.setdefault("reference", "initial")
    return make_backend(directory, seed=0, settings=TrainSettings(**given), dtype="float32", from_scratch=True)


def weights(backend: Backend) -> dict[str, torch.Tensor]:
    return dict(backend.export())


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    return max(float((before[name] - after[name]).abs().max()) for name in before)


def with_turns(given: TrainBatch) -> TrainBatch:
    """Advantages of their own for tokens, as GiGPO has them."""
    rng = np.random.default_rng(0)
    sequences = [
        msgspec.structs.replace(each, token_advantages=rng.normal(size=len(each.tokens)).astype(np.float32))
        for each in given.sequences
    ]
    return TrainBatch(sequences, given.allowed_sets)


def batch_for(name: str, given: TrainBatch) -> TrainBatch:
    return with_turns(given) if name == "gigpo" else given


@pytest.mark.parametrize("name", TRAINED)
def test_a_step_moves_the_policy_and_its_figures_are_finite(tmp_path: Path, name: str) -> None:
    directory = policy(tmp_path)
    given = batch_for(name, batch(1))
    settings: dict[str, Any] = {"algorithm": name}
    if name == "distillation":  # another policy is the teacher
        teacher = make(directory)
        (tmp_path / "teacher").mkdir()
        torch.manual_seed(1)
        plain.load_exported(teacher, directory, tmp_path / "teacher")  # writes model.safetensors and config.json
        path = tmp_path / "teacher" / "model.safetensors"
        noisy = {key: tensor + 0.1 * torch.randn_like(tensor) for key, tensor in load_file(path).items()}
        save_file(noisy, path, metadata={"format": "pt"})
        settings["reference"] = str(tmp_path / "teacher")
    backend = make(directory, **settings)
    before = weights(backend)
    figures = backend.forward_backward(given) | backend.optim_step(1e-3)
    assert all(np.isfinite(value) for value in figures.values())
    assert figures["grad_norm"] > 0
    assert moved(before, weights(backend)) > 0
    assert (figures["kl_reference"] > 1e-4) == (name == "distillation")


@pytest.mark.parametrize(
    "settings",
    [
        *({"algorithm": name} for name in ("dr_grpo", "cispo", "sapo", "topr", "gigpo")),
        {"algorithm": "gspo", "clip_low": 0.1, "clip_high": 0.1},
        {"correction": "sequence_tis"},
        {"correction": "sequence_mask", "off_policy_kl": 0.2},
        {"kl_coefficient": 0.5, "kl": "k2", "reference": "initial"},
    ],
    ids=str,
)
def test_the_gradient_does_not_depend_on_how_the_batch_is_split(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Trajectories of one and of several segments, padded and as trees. Plain gradient descent in place of Adam's
    normalisation: a large epsilon."""
    directory = policy(tmp_path)
    name = settings.get("algorithm", "grpo")
    for given in (batch(5), tree_batch(3)):
        results = []
        for tokens in (1, 60, 100_000):
            backend = make(directory, micro_batch_tokens=tokens, adam_epsilon=1.0, **settings)
            figures = backend.forward_backward(batch_for(name, given))
            norm = backend.optim_step(1.0)["grad_norm"]
            results.append((figures["loss"], weights(backend)))
        for loss, others in results[1:]:
            assert loss == pytest.approx(results[0][0], rel=1e-4, abs=1e-6)
            assert moved(results[0][1], others) < 1e-6 * max(norm, 1.0)


def test_gspo_has_a_ratio_for_each_segment(tmp_path: Path) -> None:
    """Of a trajectory of several segments each is a sequence, in the context in which it was sampled."""
    directory, given = policy(tmp_path / "policy"), batch(6)
    assert len({sequence.ticket for sequence in given.sequences}) < len(given.sequences)
    backend = make(directory, algorithm="gspo", clip_low=0.3, clip_high=0.3)
    model = plain.load_exported(backend, directory, tmp_path / "exported")
    by_ticket: dict[str, list[tuple[float, int]]] = {}
    for sequence in given.sequences:
        with torch.no_grad():
            new = plain.logprobs(model, sequence, SETS).double().numpy()
        s = float(np.exp((new - sequence.logprobs[sequence.loss_mask == 1]).mean()))
        value = -min(s * sequence.advantage, min(max(s, 0.7), 1.3) * sequence.advantage)
        by_ticket.setdefault(sequence.ticket, []).append((value, len(new)))
    # A trajectory's loss is the mean over its tokens, and those of one segment share its ratio.
    losses = [sum(v * n for v, n in parts) / sum(n for _, n in parts) for parts in by_ticket.values()]
    assert backend.forward_backward(given)["loss"] == pytest.approx(float(np.mean(losses)), abs=1e-5)


def test_the_reference_is_the_policy_that_the_run_began_with(tmp_path: Path) -> None:
    directory, given = policy(tmp_path / "policy"), batch(7)
    backend = make(directory, kl_coefficient=0.1, reference="initial")
    initial = plain.load_exported(backend, directory, tmp_path / "initial")
    assert backend.forward_backward(given)["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    for _ in range(3):
        backend.optim_step(1e-2)
        backend.forward_backward(given)
    backend.optim_step(1e-2)
    now = plain.load_exported(backend, directory, tmp_path / "now")
    values = []
    for sequence in given.sequences:
        with torch.no_grad():
            d = plain.logprobs(initial, sequence, SETS) - plain.logprobs(now, sequence, SETS)
        values.append(torch.exp(d) - d - 1)
    expected = float(torch.cat(values).mean())
    assert expected > 1e-3
    assert backend.forward_backward(given)["kl_reference"] == pytest.approx(expected, rel=1e-3)


def test_a_reference_pulls_the_policy_back(tmp_path: Path) -> None:
    """With nothing but the KL term the distance to the reference shrinks."""
    directory, given = policy(tmp_path), batch(8)
    backend = make(directory, kl_coefficient=1.0, reference="initial", kl="k2")
    for _ in range(2):  # away from it first
        backend.forward_backward(given)
        backend.optim_step(1e-2)
    still = batch(8, advantage=0.0)
    before = backend.forward_backward(still)["kl_reference"]
    backend.optim_step(1e-3)
    for _ in range(5):
        backend.forward_backward(still)
        backend.optim_step(1e-3)
    assert backend.forward_backward(still)["kl_reference"] < before / 2


def test_streams_with_different_algorithms_add_up(tmp_path: Path) -> None:
    """Each part's loss alone, by its share of the trajectories."""
    directory, given = policy(tmp_path), batch(9)
    settings = {"algorithm": "grpo", "algorithms": {"other": "cispo"}}
    algorithms = [resolve(TrainSettings(**settings), stream) for stream in ("", "other")]  # type: ignore[arg-type]
    half = len(given.sequences) // 2
    mixed = [msgspec.structs.replace(each, algorithm=int(i >= half)) for i, each in enumerate(given.sequences)]
    both = make(directory).forward_backward(TrainBatch(mixed, SETS, algorithms=algorithms))["loss"]
    first, second = given.sequences[:half], given.sequences[half:]
    shares = [len({each.ticket for each in part}) for part in (first, second)]
    losses = [
        make(directory, algorithm=name).forward_backward(TrainBatch(part, SETS))["loss"]
        for name, part in (("grpo", first), ("cispo", second))
    ]
    assert both == pytest.approx(np.average(losses, weights=shares), abs=1e-6)


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_not_finite_is_named_and_moves_nothing(tmp_path: Path, name: str) -> None:
    backend = make(policy(tmp_path), algorithm=name)
    given = batch(10)
    sequences = list(given.sequences)
    broken = sequences[1].logprobs.copy()
    broken[sequences[1].loss_mask == 1] = np.nan
    sequences[1] = msgspec.structs.replace(sequences[1], logprobs=broken)
    before = weights(backend)
    with pytest.raises(NotFinite) as caught:
        backend.forward_backward(TrainBatch(sequences, SETS))
    assert caught.value.tickets == (sequences[1].ticket,)
    backend.optim_step(1e-3)
    assert moved(before, weights(backend)) == 0.0
