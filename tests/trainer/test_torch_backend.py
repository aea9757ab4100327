"""The torch backend against a plain transformers forward pass and torch's own optimiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch

from actors.settings import TrainSettings
from actors.trainer.backends import make_backend
from actors.trainer.backends.packing import BatchError, rows_by_length
from actors.trainer.backends.protocol import Backend, NotFinite, TrainBatch
from tests.trainer import plain
from tests.trainer.samples import SETS, VOCABULARY, batch, policy


def make(policy_dir: Path, seed: int = 0, dtype: str = "float32", **settings: Any) -> Backend:
    return make_backend(policy_dir, seed=seed, settings=TrainSettings(**settings), dtype=dtype, from_scratch=True)


def weights(backend: Backend) -> dict[str, torch.Tensor]:
    return dict(backend.export())


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def with_rollout_logprobs(given: TrainBatch, logprobs: list[np.ndarray]) -> TrainBatch:
    pairs = zip(given.sequences, logprobs, strict=True)
    return TrainBatch(
        sequences=[msgspec.structs.replace(sequence, logprobs=values) for sequence, values in pairs],
        allowed_sets=given.allowed_sets,
    )


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen3", False), ("qwen2", False), ("llama", True)])
def test_logprobs_and_score_equal_a_plain_forward_pass(tmp_path: Path, kind: str, tied: bool) -> None:
    directory = policy(tmp_path / "policy", kind, tied=tied)
    backend = make(directory)
    given = batch(1)
    model = plain.load_exported(backend, directory, tmp_path / "exported")
    with torch.no_grad():
        for sequence, ours in zip(given.sequences, backend.logprobs(given), strict=True):
            theirs = plain.logprobs(model, sequence, SETS).numpy()
            np.testing.assert_allclose(ours[sequence.loss_mask == 1], theirs, atol=1e-5)
            assert not ours[sequence.loss_mask == 0].any()
        tokens = given.sequences[0].tokens
        logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    expected = torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), torch.from_numpy(tokens[1:]).long()]
    np.testing.assert_allclose(backend.score(tokens), expected.numpy(), atol=1e-5)


def test_an_architecture_without_a_known_structure_runs_whole(tmp_path: Path) -> None:
    """Mistral has the llama layout, but is not on the list of models whose last layer is trimmed."""
    directory = policy(tmp_path / "policy", "mistral")
    backend = make(directory)
    model = plain.load_exported(backend, directory, tmp_path / "exported")
    given = batch(1, segments=3)
    with torch.no_grad():
        theirs = plain.logprobs(model, given.sequences[0], SETS).numpy()
    ours = backend.logprobs(given)[0]
    np.testing.assert_allclose(ours[given.sequences[0].loss_mask == 1], theirs, atol=1e-5)


def test_with_unchanged_weights_every_ratio_is_one(tmp_path: Path) -> None:
    backend = make(policy(tmp_path))
    given = batch(2)
    # Scored in other micro-batches than it is trained in.
    recorded = make(policy(tmp_path), micro_batch_tokens=30).logprobs(given)
    figures = backend.forward_backward(with_rollout_logprobs(given, recorded))
    assert figures["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert figures["ratio_min"] == pytest.approx(1.0, abs=1e-4)
    assert figures["kl_rollout"] == pytest.approx(0.0, abs=1e-6)
    assert figures["tokens"] == sum(int(s.loss_mask.sum()) for s in given.sequences)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_five_steps_equal_plain_torch(tmp_path: Path, aggregation: Literal["token", "sequence"]) -> None:
    """Loss, clipped gradients, AdamW with decay on matrices, and a step where nothing has an advantage."""
    settings = TrainSettings(aggregation=aggregation, weight_decay=0.1, max_grad_norm=0.5)
    directory = policy(tmp_path / "policy")
    backend = make_backend(directory, seed=0, settings=settings, dtype="float32", from_scratch=True)
    model = plain.load_exported(backend, directory, tmp_path / "exported")
    batches = [batch(i) for i in range(3)] + [batch(3, advantage=0.0), batch(4)]
    with torch.no_grad():
        expected_loss = float(plain.loss(model, batches[0], settings))
    norms = plain.train(model, batches, settings, learning_rate=1e-4)
    losses, ours = [], []
    for given in batches:
        losses.append(backend.forward_backward(given)["loss"])
        ours.append(backend.optim_step(1e-4)["grad_norm"])
    assert losses[0] == pytest.approx(expected_loss, abs=1e-6)
    assert max(norms) > 0.5 > min(norms)  # some are clipped, the one without advantages is not
    np.testing.assert_allclose(ours, norms, rtol=1e-4, atol=1e-7)
    assert largest_difference(weights(backend), state(model)) < 1e-5


def test_an_exploding_gradient_moves_the_weights_as_far_as_its_steps_bound_and_no_further(tmp_path: Path) -> None:
    """With plain gradient descent in place of Adam's normalisation: a large epsilon, no momentum."""
    directory, given = policy(tmp_path), batch(5)
    exploding = [msgspec.structs.replace(each, advantage=1e6 * each.advantage) for each in given.sequences]
    for clip in (2.0, 0.5):
        backend = make(directory, adam_epsilon=1e6, adam_beta1=0.0, adam_beta2=0.0)
        before = weights(backend)
        backend.forward_backward(msgspec.structs.replace(given, sequences=exploding))
        assert backend.optim_step(1e6, clip)["grad_norm"] > 1e4
        moved = [(weights(backend)[name] - tensor).square().sum().item() for name, tensor in before.items()]
        assert sum(moved) ** 0.5 == pytest.approx(clip, rel=1e-3)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("entropy_bonus", [0.0, 0.1])
def test_micro_batches_do_not_change_the_step(
    tmp_path: Path, aggregation: Literal["token", "sequence"], entropy_bonus: float
) -> None:
    """With plain gradient descent in place of Adam's normalisation: a large epsilon."""
    directory, given = policy(tmp_path), batch(5)
    results = []
    for tokens in (1, 40, 100, 100_000):
        backend = make(
            directory,
            aggregation=aggregation,
            entropy_bonus=entropy_bonus,
            micro_batch_tokens=tokens,
            adam_epsilon=1.0,
            max_grad_norm=1e9,
        )
        figures = backend.forward_backward(given)
        backend.optim_step(1.0)
        results.append((figures, weights(backend)))
    first_figures, first = results[0]
    for figures, moved in results[1:]:
        assert largest_difference(first, moved) < 1e-6
        for name, value in figures.items():
            assert value == pytest.approx(first_figures[name], rel=1e-4, abs=1e-6), name


def test_an_entropy_bonus_raises_the_entropy(tmp_path: Path) -> None:
    backend = make(policy(tmp_path), entropy_bonus=1.0)
    given = batch(6, advantage=0.0)
    before = backend.forward_backward(given)
    backend.optim_step(1e-2)
    assert before["loss"] == pytest.approx(-before["entropy"], rel=1e-5)
    assert backend.forward_backward(given)["entropy"] > before["entropy"]


@pytest.mark.parametrize("broken", ["behaviour", "advantage"])
def test_a_loss_that_is_not_finite_names_its_trajectories_and_moves_nothing(tmp_path: Path, broken: str) -> None:
    directory = policy(tmp_path)
    backend, untouched = make(directory, micro_batch_tokens=50), make(directory, micro_batch_tokens=50)
    good = batch(7)
    sequences = list(good.sequences)
    for index in (1, 5):
        poisoned = sequences[index].logprobs.copy()
        poisoned[sequences[index].loss_mask == 1] = np.nan
        change = {"logprobs": poisoned} if broken == "behaviour" else {"advantage": float("inf")}
        sequences[index] = msgspec.structs.replace(sequences[index], **change)
    with pytest.raises(NotFinite) as caught:
        backend.forward_backward(TrainBatch(sequences=sequences, allowed_sets=SETS))
    assert caught.value.tickets == (sequences[1].ticket, sequences[5].ticket)
    assert sequences[1].ticket in str(caught.value)
    for each in (backend, untouched):
        each.forward_backward(good)
        each.optim_step(1e-3)
    assert largest_difference(weights(backend), weights(untouched)) == 0.0


def test_a_gradient_that_is_not_finite_takes_no_step(tmp_path: Path) -> None:
    backend = make(policy(tmp_path))
    before = weights(backend)
    figures = backend.forward_backward(batch(8, segments=3, advantage=1e36))  # its square is beyond float32
    assert np.isfinite(figures["loss"])
    with pytest.raises(NotFinite, match="no step was taken"):
        backend.optim_step(1e-3)
    assert largest_difference(before, weights(backend)) == 0.0
    backend.forward_backward(batch(8))
    assert np.isfinite(backend.optim_step(1e-3)["grad_norm"])


def test_exported_tensors_are_private_copies(tmp_path: Path) -> None:
    backend = make(policy(tmp_path))
    exported = weights(backend)
    kept = {name: tensor.clone() for name, tensor in exported.items()}
    backend.forward_backward(batch(9))
    backend.optim_step(1e-2)
    assert "lm_head.weight" not in exported  # tied
    assert all(tensor.is_contiguous() for tensor in exported.values())
    assert largest_difference(exported, kept) == 0.0
    assert largest_difference(exported, weights(backend)) > 1e-3


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    directory = policy(tmp_path)
    assert largest_difference(weights(make(directory, seed=3)), weights(make(directory, seed=3))) == 0.0
    assert largest_difference(weights(make(directory, seed=3)), weights(make(directory, seed=4))) > 0.0


def test_small_steps_add_up_in_bfloat16(tmp_path: Path) -> None:
    """Between 1/64 and 1/32 neighbouring bfloat16 numbers are 1.2e-4 apart: a step of 1e-6 is lost without masters,
    while 80 of them cross the half-way mark."""
    backend = make(policy(tmp_path), dtype="bfloat16", adam_beta1=0.0)
    before = weights(backend)
    given = batch(10, segments=4)
    for _ in range(80):
        backend.forward_backward(given)
        backend.optim_step(1e-6)
    after = weights(backend)
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    name = "model.layers.0.mlp.up_proj.weight"
    size = before[name].float().abs()
    moved = after[name] != before[name]
    assert float(moved[(size > 1 / 64) & (size < 1 / 32)].float().mean()) > 0.5


def test_batches_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    backend = make(policy(tmp_path))
    good = batch(11, segments=3)

    def changed(**fields: Any) -> TrainBatch:
        sequences = [*good.sequences[:-1], msgspec.structs.replace(good.sequences[-1], **fields)]
        return TrainBatch(sequences=sequences, allowed_sets=SETS)

    last = good.sequences[-1]
    elsewhere = np.where(last.loss_mask, 2, last.tokens).astype(np.int32)  # 2 is in neither set
    first_sampled = last.loss_mask.copy()
    first_sampled[0] = 1
    cases = {
        "not in its allowed set": changed(tokens=elsewhere, allowed=np.where(last.loss_mask, 0, -1).astype(np.int32)),
        "nothing precedes it": changed(loss_mask=first_sampled),
        "logprobs has shape": changed(logprobs=last.logprobs[:-1]),
        "temperature is 0": changed(temperature=0.0),
        f"the vocabulary has {VOCABULARY}": changed(tokens=np.full_like(last.tokens, VOCABULARY)),
        "allowed set 2 of 2": changed(allowed=np.where(last.loss_mask, 2, -1).astype(np.int32)),
    }
    for message, wrong in cases.items():
        with pytest.raises(BatchError, match=message) as caught:
            backend.forward_backward(wrong)
        assert last.ticket in str(caught.value)
    nothing = [msgspec.structs.replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in good.sequences]
    with pytest.raises(BatchError, match="no sampled token"):
        backend.forward_backward(TrainBatch(sequences=nothing, allowed_sets=SETS))


def test_rows_of_like_length_share_a_micro_batch_within_the_budget() -> None:
    # Longest first: 9 alone (2 x 9 > 12), then 6 and 5 (2 x 6 = 12), then 3, 2, 2 (3 x 3).
    assert list(rows_by_length([2, 9, 3, 6, 5, 2], 12)) == [[1], [3, 4], [2, 0, 5]]
    assert list(rows_by_length([50, 4], 12)) == [[0], [1]]
