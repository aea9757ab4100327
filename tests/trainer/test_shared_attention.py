"""Computing shared prefixes once, against a plain transformers forward pass of every segment on its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from actors.settings import TrainSettings
from actors.trainer.backends import make_backend, shared_attention
from actors.trainer.backends.forward import Modules, tree_forward
from actors.trainer.backends.lean_decoder import LeanDecoder
from actors.trainer.backends.packing import MicroBatch, Packer
from actors.trainer.backends.protocol import TrainBatch
from actors.trainer.backends.scoring import sampled_logprobs
from actors.trainer.backends.torch_backend import TorchBackend
from actors.trainer.model import build_model
from tests.trainer import plain
from tests.trainer.samples import SETS, batch, policy, sequence, tree_batch

KINDS = [("qwen3", True), ("qwen2", False), ("llama", True)]


@pytest.fixture
def short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to which size attention is plain products: 0 is always the fused kernel."""
    monkeypatch.setattr(shared_attention, "SHORT", request.param)


def rows(given: TrainBatch, budget: int) -> list[MicroBatch]:
    everything = list(range(len(given.sequences)))
    packer = Packer(given, np.ones(len(everything)), torch.device("cpu"), trees=True)
    micros = list(packer.micro_batches(everything, budget))
    assert all(micro.row is not None for micro in micros)
    return micros


def gradients(model: nn.Module, values: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(values, list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


def double_model(directory: Path, attention: str) -> Any:
    model: Any = build_model(directory, seed=0, dtype="float32", from_scratch=True).double().eval()
    model.set_attn_implementation(attention)
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):  # transformers' own computes in float32 whatever it is given
                replacement = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=torch.float64)
                replacement.variance_epsilon = norm.variance_epsilon
                replacement.weight = norm.weight
                setattr(parent, name, replacement)
    return model


def plain_sum(model: Any, given: TrainBatch, weight: list[np.ndarray]) -> tuple[torch.Tensor, list[np.ndarray]]:
    """The log-probabilities of each segment, and their sum with weights."""
    logprobs = [plain.logprobs(model, each, SETS) for each in given.sequences]
    total = torch.stack([(p * torch.from_numpy(w)).sum() for p, w in zip(logprobs, weight, strict=True)]).sum()
    return total, [p.detach().numpy() for p in logprobs]


@pytest.mark.parametrize(("kind", "tied"), KINDS)
@pytest.mark.parametrize("budget", [60, 10_000])
@pytest.mark.parametrize("forward", [LeanDecoder, Modules])
@pytest.mark.parametrize("short", [0, shared_attention.SHORT], indirect=True)
@pytest.mark.usefixtures("short")
def test_gradients_equal_the_plain_ones_in_float64(
    tmp_path: Path, kind: str, tied: bool, budget: int, forward: Any
) -> None:
    seed = budget % 7
    directory = policy(tmp_path / "policy", kind, tied=tied)
    given = tree_batch(seed)
    # Temperatures that float32 holds exactly.
    rng = np.random.default_rng(seed)
    given = TrainBatch(
        [msgspec.structs.replace(each, temperature=float(rng.choice([0.75, 1.0, 1.25]))) for each in given.sequences],
        SETS,
    )
    weight = [rng.normal(size=int(each.loss_mask.sum())) for each in given.sequences]
    reference = double_model(directory, "sdpa")
    total, logprobs = plain_sum(reference, given, weight)
    expected = gradients(reference, total)

    model = double_model(directory, shared_attention.NAME)
    micros, sums = rows(given, budget), []
    for micro in micros:
        assert micro.tokens.numel() <= max(budget, *(len(each.tokens) for each in given.sequences))
        head = model.lm_head

        def logits(hidden: torch.Tensor, ids: torch.Tensor | None, head: Any = head) -> torch.Tensor:
            return nn.functional.linear(hidden, head.weight if ids is None else head.weight[ids])

        new, _ = sampled_logprobs(tree_forward(forward(model.base_model), micro, torch.float64), logits, micro)
        for i in np.unique(micro.sequence):
            mine = new[torch.from_numpy(micro.sequence == i)]
            np.testing.assert_allclose(mine.detach().numpy(), logprobs[i], rtol=1e-11)
            sums.append((mine * torch.from_numpy(weight[i])).sum())
    assert len(sums) == len(given.sequences)
    assert (len(micros) > 1) == (budget == 60)
    ours = gradients(model, torch.stack(sums).sum())
    for name, gradient in expected.items():
        assert float((ours[name] - gradient).norm()) <= 1e-9 * float(gradient.norm()), name


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_a_batch_of_trees_has_the_loss_and_the_gradients_of_plain_torch(tmp_path: Path, kind: str, tied: bool) -> None:
    directory, settings = policy(tmp_path / "policy", kind, tied=tied), TrainSettings(aggregation="sequence")
    backend = make_backend(directory, seed=0, settings=settings, dtype="float32", from_scratch=True)
    model = plain.load_exported(backend, directory, tmp_path / "exported")
    given = tree_batch(3)
    assert len(rows(given, settings.micro_batch_tokens)) == 1
    loss = plain.loss(model, given, settings)
    expected = gradients(model, loss)
    assert backend.forward_backward(given)["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert isinstance(backend, TorchBackend)
    ours = backend._optimizer.gradients()
    assert ours.keys() == expected.keys()
    difference = torch.stack([(ours[name] - expected[name]).norm() for name in expected]).norm()
    assert float(difference) <= 1e-5 * float(torch.stack([g.norm() for g in expected.values()]).norm())


def test_logprobs_of_trees_equal_a_plain_forward_pass_and_those_without_sharing(tmp_path: Path) -> None:
    directory = policy(tmp_path / "policy")
    backend = make_backend(directory, seed=0, settings=TrainSettings(), dtype="float32", from_scratch=True)
    assert isinstance(backend, TorchBackend)
    model = plain.load_exported(backend, directory, tmp_path / "exported")
    given = tree_batch(4)
    shared = backend.logprobs(given)
    backend.computes_trees = False
    whole = backend.logprobs(given)
    for each, ours, theirs in zip(given.sequences, shared, whole, strict=True):
        with torch.no_grad():
            expected = plain.logprobs(model, each, SETS).numpy()
        np.testing.assert_allclose(ours[each.loss_mask == 1], expected, atol=1e-5)
        np.testing.assert_allclose(theirs[each.loss_mask == 1], expected, atol=1e-5)
        assert not ours[each.loss_mask == 0].any()


def test_trees_take_less_work_and_unrelated_ones_do_not_meet(tmp_path: Path) -> None:
    """Query-key pairs, padding included: of two trees no more than twice those of one."""
    rng = np.random.default_rng(5)

    def group(name: str) -> list[Any]:
        prompt = sequence(rng, name, 300).tokens
        members = [sequence(rng, f"{name}{i}", 40) for i in range(8)]
        return [
            msgspec.structs.replace(
                member,
                tokens=np.concatenate([prompt, member.tokens]),
                loss_mask=np.concatenate([np.zeros(300, np.uint8), member.loss_mask]),
                logprobs=np.concatenate([np.zeros(300, np.float32), member.logprobs]),
                allowed=np.concatenate([np.full(300, -1, np.int32), member.allowed]),
            )
            for member in members
        ]

    def pairs(members: list[Any]) -> int:
        [micro] = rows(TrainBatch(members, SETS), 100_000)
        assert micro.row is not None
        plan = shared_attention.make_plan(micro.row, torch.device("cpu"), torch.float32)
        return sum(each.queries.numel() * each.keys.shape[1] for each in plan.batches)

    one, other = group("a"), group("b")
    # Root 340 x 340 and seven answers of 40 queries over 340 keys, each at most a few tokens shorter.
    assert pairs(one) <= 340 * 340 + 7 * 40 * 340
    assert pairs(one + other) <= 2 * (340 * 340 + 7 * 40 * 340)


def test_a_policy_of_unknown_structure_computes_segments_whole(tmp_path: Path) -> None:
    directory = policy(tmp_path / "policy", "mistral")
    backend = make_backend(directory, seed=0, settings=TrainSettings(), dtype="float32", from_scratch=True)
    assert isinstance(backend, TorchBackend)
    assert not backend.computes_trees
    model = plain.load_exported(backend, directory, tmp_path / "exported")
    given = tree_batch(6)
    with torch.no_grad():
        expected = plain.logprobs(model, given.sequences[3], SETS).numpy()
    ours = backend.logprobs(given)[3]
    np.testing.assert_allclose(ours[given.sequences[3].loss_mask == 1], expected, atol=1e-5)


def test_segments_that_share_nothing_train_beside_trees(tmp_path: Path) -> None:
    directory, settings = policy(tmp_path / "policy"), TrainSettings()
    backend = make_backend(directory, seed=0, settings=settings, dtype="float32", from_scratch=True)
    model = plain.load_exported(backend, directory, tmp_path / "exported")
    given = TrainBatch(tree_batch(7).sequences + batch(7).sequences, SETS)
    loss = plain.loss(model, given, settings)
    assert backend.forward_backward(given)["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert backend.optim_step(0.0)["grad_norm"] == pytest.approx(norm, rel=1e-5)
