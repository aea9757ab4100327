"""Random tensors for losses, and TRL's own loss and gradient on them."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from actors.trainer.algorithms.aggregation import token_weights
from actors.trainer.algorithms.algorithm import Algorithm
from actors.trainer.algorithms.losses import TokenLoss, policy_loss
from actors.trainer.algorithms.sampled import Sampled

LENGTHS = [12, 5, 1, 9, 12, 3]  # of which one is a response of one token
LONGEST = 16  # that could have been sampled


class Case(msgspec.Struct, frozen=True):
    """Responses as a padded matrix; float64 [responses, longest]."""

    mask: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor
    behaviour: torch.Tensor
    reference: torch.Tensor
    advantage: torch.Tensor  # [responses]


def random_case(seed: int, spread: float = 0.4) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float, *shape: int) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (len(LENGTHS), max(LENGTHS))
    mask = torch.zeros(shape, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1.0
    new = -3.0 * torch.rand(shape, generator=generator, dtype=torch.float64)
    old = new + normal(spread, *shape)
    return Case(
        mask=mask,
        new=new,
        old=old,
        behaviour=old + normal(0.7, *shape),
        reference=new + normal(0.5, *shape),
        advantage=normal(1.0, len(LENGTHS)),
    )


def flat(case: Case, **changes: Any) -> Sampled:
    """The case as its sampled tokens; ``new`` is a leaf."""
    chosen = case.mask.bool()
    segment = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    values: dict[str, Any] = {
        "new": case.new[chosen].clone().requires_grad_(),
        "old": case.old[chosen],
        "behaviour": case.behaviour[chosen],
        "advantage": case.advantage[segment],
        "segment": segment,
        "segments": len(LENGTHS),
        "reference": case.reference[chosen],
    }
    return Sampled(**(values | changes))


def ours(case: Case, algorithm: Algorithm, **changes: Any) -> tuple[float, torch.Tensor, TokenLoss]:
    """The batch's loss, its gradient by ``new`` (padded, 0 where nothing was sampled) and what tokens have."""
    tokens = flat(case, **changes)
    result = policy_loss(tokens, algorithm)
    names = [str(row) for row in range(len(LENGTHS))]
    weights = torch.from_numpy(token_weights(names, LENGTHS, algorithm.aggregation, LONGEST))
    loss = (result.loss * weights[tokens.segment]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert tokens.new.grad is not None
    gradient = torch.zeros_like(case.mask)
    gradient[case.mask.bool()] = tokens.new.grad
    return loss.item(), gradient, result


def by_trl(case: Case, *, loss_type: str, weight: torch.Tensor, **attributes: Any) -> tuple[float, torch.Tensor]:
    """``GRPOTrainer._compute_loss`` on a bare object that has the attributes it reads. ``weight``: the importance
    weight, which TRL computes while it generates."""
    module = pytest.importorskip("trl.trainer.grpo_trainer")
    leaf = case.new.clone().requires_grad_()
    arguments: dict[str, Any] = {"delta": None, "steps_per_generation": 1, "use_bias_correction_kl": False}
    arguments |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    values: dict[str, Any] = {
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (leaf, torch.zeros_like(leaf), None),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "get_off_policy_mask": module.GRPOTrainer.get_off_policy_mask,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": loss_type,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "max_completion_length": LONGEST,
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "args": SimpleNamespace(**arguments),
        "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1,
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
    }
    inputs = {
        "prompt_ids": torch.zeros(len(case.mask), 2, dtype=torch.long),
        "prompt_mask": torch.ones(len(case.mask), 2),
        "completion_ids": torch.zeros(case.mask.shape, dtype=torch.long),
        "completion_mask": case.mask,
        "advantages": case.advantage,
        "old_per_token_logps": case.old,
        "sampling_per_token_logps": case.behaviour,
        "ref_per_token_logps": case.reference,
        "importance_sampling_ratio": weight,
        "num_items_in_batch": case.mask.sum(),
    }
    loss = module.GRPOTrainer._compute_loss(SimpleNamespace(**(values | attributes)), None, inputs)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad
