"""Imitation against transformers' own ``labels=`` loss and gradient, and against masks written from the definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from actors.settings import TrainSettings
from actors.trainer.backends.protocol import Backend, TrainBatch, TrainSequence
from actors.trainer.backends.torch_backend import TorchBackend
from actors.trajectory import FULL_VOCABULARY
from tests.trainer import plain
from tests.trainer.samples import VOCABULARY, batch, policy

SETTINGS = TrainSettings(max_grad_norm=1e9, threads=1, micro_batch_tokens=60)
IGNORED = -100


def backend(directory: Path) -> Backend:
    return TorchBackend(policy(directory), seed=1, settings=SETTINGS, dtype="float32", from_scratch=True)


def demonstration(rng: np.random.Generator, ticket: str, length: int) -> TrainSequence:
    """Random tokens, half of them the assistant's; nothing masked, temperature 1."""
    mask = (rng.random(length) < 0.5).astype(np.uint8)
    mask[0], mask[-1] = 0, 1
    nothing = np.zeros(length, np.float32)
    tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
    return TrainSequence(ticket, tokens, mask, nothing, np.full(length, FULL_VOCABULARY, np.int32), 0.0, 1.0)


def test_loss_and_gradient_are_those_of_transformers_labels(tmp_path: Path) -> None:
    ours = backend(tmp_path / "policy")
    theirs = plain.load_exported(ours, tmp_path / "policy", tmp_path / "exported")
    rng = np.random.default_rng(3)
    length = 24  # of all: transformers takes the mean over the tokens of one padded batch
    sequences = [demonstration(rng, f"d{index}", length) for index in range(5)]
    tokens = torch.from_numpy(np.stack([sequence.tokens for sequence in sequences]).astype(np.int64))
    masks = torch.from_numpy(np.stack([sequence.loss_mask for sequence in sequences]).astype(np.int64))
    expected = theirs(input_ids=tokens, labels=torch.where(masks == 1, tokens, IGNORED)).loss
    expected.backward()
    gradients = [parameter.grad for parameter in theirs.parameters()]
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())

    statistics = ours.forward_backward(TrainBatch(sequences, [], "imitation"))
    stepped = ours.optim_step(0.0)

    assert statistics["loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert statistics["tokens"] == masks.sum().item()
    assert stepped["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_step_of_imitation_moves_every_weight_as_torch_would(tmp_path: Path) -> None:
    ours = backend(tmp_path / "policy")
    theirs = plain.load_exported(ours, tmp_path / "policy", tmp_path / "exported")
    demonstrated = batch(5)  # with allowed sets, temperatures, several segments of one trajectory
    imitation = TrainBatch(demonstrated.sequences, demonstrated.allowed_sets, "imitation")
    logprobs = [plain.logprobs(theirs, sequence, imitation.allowed_sets) for sequence in imitation.sequences]
    expected = -torch.cat(logprobs).mean()
    expected.backward()  # type: ignore[no-untyped-call]
    adamw = torch.optim.AdamW(
        theirs.parameters(),
        lr=0.01,
        betas=(SETTINGS.adam_beta1, SETTINGS.adam_beta2),
        eps=SETTINGS.adam_epsilon,
        weight_decay=0.0,
    )
    adamw.step()

    statistics = ours.forward_backward(imitation)
    ours.optim_step(0.01)

    assert statistics["loss"] == pytest.approx(expected.item(), abs=1e-6)
    state = theirs.state_dict()
    for name, tensor in ours.export():
        # Adam's first step is the gradient's sign: entries that are almost 0 may go either way
        assert (tensor - state[name]).abs().mean() < 1e-5, name


def test_neither_advantages_nor_rollout_probabilities_matter(tmp_path: Path) -> None:
    one, other = batch(7, advantage=0.0), batch(7, advantage=2.5)
    far = [
        TrainSequence(s.ticket, s.tokens, s.loss_mask, s.logprobs - 3.0, s.allowed, 2.5, s.temperature)
        for s in one.sequences
    ]
    ours = backend(tmp_path / "policy")
    losses = []
    for sequences in (one.sequences, other.sequences, far):
        statistics = ours.forward_backward(TrainBatch(sequences, one.allowed_sets, "imitation"))
        losses.append((statistics["loss"], ours.optim_step(0.0)["grad_norm"]))
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][1] > 0


def test_an_inspection_takes_a_batch_apart_as_the_plain_trainer_computes_it(tmp_path: Path) -> None:
    ours = backend(tmp_path / "policy")
    theirs = plain.load_exported(ours, tmp_path / "policy", tmp_path / "exported")
    whole = batch(11)
    found = ours.inspect(whole)
    expected = plain.loss(theirs, whole, SETTINGS)
    expected.backward()  # type: ignore[no-untyped-call]
    norm = torch.stack([parameter.grad.norm() for parameter in theirs.parameters()]).norm()

    assert sum(float(losses.sum()) for losses in found.losses) == pytest.approx(expected.item(), abs=1e-6)
    assert found.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    for sequence, logprobs, ratios in zip(whole.sequences, found.logprobs, found.ratios, strict=True):
        sampled = sequence.loss_mask == 1
        by_hand = plain.logprobs(theirs, sequence, whole.allowed_sets).detach().numpy()
        np.testing.assert_allclose(logprobs[sampled], by_hand, atol=1e-5)
        np.testing.assert_allclose(ratios[sampled], np.exp(by_hand - sequence.logprobs[sampled]), rtol=1e-4)
        assert not logprobs[~sampled].any()
    assert found.gradient_norms["t-flat"] == 0.0
    assert ours.optim_step(1.0)["grad_norm"] == 0.0  # nothing is left behind


def test_an_inspection_shows_what_is_not_finite_and_whose_it_is(tmp_path: Path) -> None:
    ours = backend(tmp_path / "policy")
    good = batch(13)
    bad = good.sequences[2]
    place = int(np.flatnonzero(bad.loss_mask)[-1])
    bad.logprobs[place] = np.nan
    found = ours.inspect(good)
    assert [index for index, losses in enumerate(found.losses) if not np.isfinite(losses).all()] == [2]
    assert np.flatnonzero(~np.isfinite(found.losses[2])).tolist() == [place]
    assert not np.isfinite(found.gradient_norms[bad.ticket])
    assert np.isfinite(found.gradient_norms[good.sequences[0].ticket])
    assert not np.isfinite(found.gradient_norm)
