"""Losses and gradients against TRL's own code on the same random tensors."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from actors.trainer.algorithms.algorithm import Algorithm
from tests.trainer.algorithms.tensors import LONGEST, Case, by_trl, ours, random_case

TOLERANCE = 1e-6


def check(case: Case, algorithm: Algorithm, theirs: tuple[float, torch.Tensor], **changes: Any) -> None:
    loss, gradient, _ = ours(case, algorithm, **changes)
    assert abs(loss - theirs[0]) <= TOLERANCE
    assert (gradient - theirs[1]).abs().max() <= TOLERANCE
    assert gradient.abs().max() > 1e-4  # there is something to compare


def ones(case: Case) -> torch.Tensor:
    return torch.ones_like(case.mask)


@pytest.mark.parametrize(
    ("aggregation", "loss_type"), [("token", "dapo"), ("token", "bnpo"), ("sequence", "grpo"), ("constant", "dr_grpo")]
)
@pytest.mark.parametrize("correction", ["none", "decoupled", "tis", "icepop", "sequence_tis", "sequence_mask"])
def test_the_clipped_surrogate_under_every_correction_and_aggregation(
    aggregation: Any, loss_type: str, correction: Any
) -> None:
    case = random_case(7)
    algorithm = Algorithm(
        name="x", correction=correction, aggregation=aggregation, clip_low=0.2, clip_high=0.28, mask_high=3.0
    )
    difference = (case.old - case.behaviour) * case.mask
    if correction.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    weight = difference.exp()
    if correction in ("tis", "sequence_tis"):
        assert (weight > 2.0).any()  # the case exercises the cap
        weight = weight.clamp(max=2.0)
    elif correction in ("icepop", "sequence_mask"):
        outside = (weight < 0.5) | (weight > 3.0)
        assert outside.any()
        assert not outside.all()
        weight = weight.masked_fill(outside, 0.0)
    changes: dict[str, Any] = {}
    if correction == "none":  # then TRL's old policy is the one that sampled, and nothing is left to correct
        changes, weight = {"old": case.behaviour[case.mask.bool()]}, torch.ones_like(weight)
        case = Case(case.mask, case.new, case.behaviour, case.behaviour, case.reference, case.advantage)
    check(case, algorithm, by_trl(case, loss_type=loss_type, weight=weight), **changes)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_first_step_on_a_batch_is_where_old_and_new_are_one(level: str) -> None:
    given = random_case(8)
    case = Case(given.mask, given.new, given.new, given.behaviour, given.reference, given.advantage)
    algorithm = Algorithm(name="x", clip_high=0.28, aggregation="sequence")
    difference = (case.old - case.behaviour) * case.mask
    if level == "sequence":
        algorithm = msgspec.structs.replace(algorithm, loss="gspo", correction="sequence_tis")
        difference = difference.sum(-1, keepdim=True)
    weight = difference.exp().clamp(max=2.0)
    check(case, algorithm, by_trl(case, loss_type="grpo", importance_sampling_level=level, weight=weight))


def on_policy(seed: int, spread: float = 0.4) -> Case:
    """Nothing to correct: the old policy is the one that sampled."""
    case = random_case(seed, spread)
    return Case(case.mask, case.new, case.old, case.old, case.reference, case.advantage)


def test_gspo_is_a_sequence_level_ratio() -> None:
    case = on_policy(9)
    algorithm = Algorithm(
        name="x", loss="gspo", correction="none", aggregation="sequence", clip_low=0.05, clip_high=0.1
    )
    theirs = by_trl(
        case,
        loss_type="grpo",
        weight=ones(case),
        importance_sampling_level="sequence",
        epsilon_low=0.05,
        epsilon_high=0.1,
    )
    check(case, algorithm, theirs)
    assert 0 < ours(case, algorithm)[2].clipped.sum() < case.mask.sum()


@pytest.mark.parametrize("cap", [1.2, 5.0])
def test_cispo_cuts_the_weight_and_keeps_the_gradient(cap: float) -> None:
    case = on_policy(10)
    algorithm = Algorithm(name="x", loss="cispo", correction="none", clip_low=1.0, clip_high=cap - 1.0)
    check(case, algorithm, by_trl(case, loss_type="cispo", weight=ones(case), epsilon_high=cap))


def test_sapo_is_a_smooth_gate() -> None:
    case = on_policy(11)
    algorithm = Algorithm(name="x", loss="sapo", correction="none", aggregation="sequence")
    check(case, algorithm, by_trl(case, loss_type="sapo", weight=ones(case)))


def test_k3_to_a_reference_is_added_to_the_loss() -> None:
    case = random_case(12)
    weight = ((case.old - case.behaviour) * case.mask).exp().clamp(max=2.0)
    algorithm = Algorithm(name="x", clip_high=0.28, kl="k3", kl_coefficient=0.3)
    check(case, algorithm, by_trl(case, loss_type="dapo", weight=weight, beta=0.3))


def test_far_sequences_with_a_negative_advantage_are_masked() -> None:
    case = random_case(13)
    algorithm = Algorithm(name="x", clip_high=0.28, correction="decoupled", off_policy_kl=0.05)
    weight = ((case.old - case.behaviour) * case.mask).exp()
    check(case, algorithm, by_trl(case, loss_type="dapo", weight=weight, off_policy_mask_threshold=0.05))
    assert 0 < ours(case, algorithm)[2].truncated.sum() < case.mask.sum()


def test_rloo_has_the_gradient_of_trls_trainer_up_to_its_constant() -> None:
    """TRL's ratio is that of the whole response; before the first step it is 1, and the gradient REINFORCE's, of
    the sum over each response, where ours divides by the longest response."""
    module = pytest.importorskip("trl.trainer.rloo_trainer")
    case = random_case(14)
    leaf = case.new.clone().requires_grad_()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (leaf, torch.zeros_like(leaf), None),
        epsilon_low=0.2,
        epsilon_high=0.2,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(len(case.mask), 2, dtype=torch.long),
        "prompt_mask": torch.ones(len(case.mask), 2),
        "completion_ids": torch.zeros(case.mask.shape, dtype=torch.long),
        "completion_mask": case.mask,
        "advantages": case.advantage,
        "old_logps": (case.new * case.mask).sum(1),
    }
    module.RLOOTrainer._compute_loss(trainer, None, inputs).backward()
    assert leaf.grad is not None
    algorithm = Algorithm(name="x", estimator="rloo", loss="reinforce", correction="none", aggregation="constant")
    _, gradient, _ = ours(case, algorithm)
    assert (gradient * LONGEST - leaf.grad).abs().max() <= TOLERANCE
