"""The algorithm against hand-worked numbers and against TRL's own code on the same tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actors.trainer.algorithms.grpo import advantages, token_loss, token_weights


def test_advantages_are_rewards_minus_the_group_mean_over_the_sample_deviation() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 0.0], [2.0, 4.0, 4.0, 6.0]])
    # Row 0: mean 1/4, variance ((3/4)^2 + 3 (1/4)^2) / 3 = 1/4. Row 1: mean 4, variance (4 + 4) / 3.
    expected = np.array([[1.5, -0.5, -0.5, -0.5], [-2.0 / math.sqrt(8 / 3), 0.0, 0.0, 2.0 / math.sqrt(8 / 3)]])
    np.testing.assert_allclose(advantages(rewards, scale=True, epsilon=0.0), expected, rtol=1e-12)
    np.testing.assert_allclose(advantages(rewards, scale=False, epsilon=9.0)[0], [0.75, -0.25, -0.25, -0.25])


def test_epsilon_is_added_to_the_deviation() -> None:
    # Deviation of (0, 1) is sqrt(1/2); centred rewards are -+1/2.
    expected = 0.5 / (math.sqrt(0.5) + 0.25)
    np.testing.assert_allclose(advantages(np.array([[0.0, 1.0]]), scale=True, epsilon=0.25), [[-expected, expected]])


def test_a_group_that_scores_alike_has_exactly_no_advantage() -> None:
    assert not advantages(np.full((1, 3), 0.1), scale=True, epsilon=1e-6).any()


@pytest.mark.parametrize(
    ("rewards", "message"),
    [(np.zeros((3, 1)), "2 or more members"), (np.array([[0.0, np.nan]]), "group 0, member 1 is nan")],
)
def test_rewards_that_cannot_be_compared_are_refused(rewards: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantages(rewards, scale=True, epsilon=1e-6)


def test_token_aggregation_weighs_every_token_of_the_batch_alike() -> None:
    np.testing.assert_allclose(token_weights(["a", "b", "b"], [1, 2, 5], "token"), [1 / 8] * 3)


def test_sequence_aggregation_weighs_every_trajectory_alike_over_all_its_segments() -> None:
    # Trajectory a has 1 token: 1/2 of the loss. b has 2 + 6 in two segments: 1/2 over 8 tokens.
    np.testing.assert_allclose(token_weights(["b", "a", "b"], [2, 1, 6], "sequence"), [1 / 16, 1 / 2, 1 / 16])


def test_the_loss_of_three_tokens_worked_by_hand() -> None:
    """Policy ratios 1.5, 0.5 and 1; importance weights 4 cut to 2, 0.5 and 1; clipping to [0.8, 1.3]."""
    new = torch.tensor([math.log(0.6), math.log(0.1), math.log(0.3)], requires_grad=True)
    old = torch.tensor([math.log(0.4), math.log(0.2), math.log(0.3)])
    behaviour = torch.tensor([math.log(0.1), math.log(0.4), math.log(0.3)])
    result = token_loss(new, old, behaviour, torch.tensor([1.0, -3.0, 2.0]), clip_low=0.2, clip_high=0.3, tis_cap=2.0)
    # Token 0: min(1.5, 1.3) = 1.3, times 2. Token 1: min(-1.5, 0.8 * -3) = -2.4, times 0.5. Token 2: 2, times 1.
    torch.testing.assert_close(result.loss.detach(), torch.tensor([-2.6, 1.2, -2.0]))
    result.loss.sum().backward()  # type: ignore[no-untyped-call]
    # Clipped tokens have no gradient; token 2's is -advantage * ratio * weight.
    torch.testing.assert_close(new.grad, torch.tensor([0.0, 0.0, -2.0]))
    torch.testing.assert_close(result.ratio, torch.tensor([6.0, 0.25, 1.0]))
    torch.testing.assert_close(result.kl, torch.tensor([5.0 - math.log(6.0), -0.75 + math.log(4.0), 0.0]))
    assert result.clipped.tolist() == [1.0, 1.0, 0.0]
    assert result.truncated.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("aggregation", "loss_type"), [("token", "dapo"), ("token", "bnpo"), ("sequence", "grpo")])
@pytest.mark.parametrize("one_step", [True, False])
def test_loss_and_gradients_equal_those_of_trl(aggregation: Any, loss_type: str, one_step: bool) -> None:
    """TRL's own ``GRPOTrainer._compute_loss`` on the same log-probabilities, advantages and masks."""
    generator = torch.Generator().manual_seed(7)
    lengths = [12, 5, 1, 9, 12, 3]
    mask = torch.zeros(len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        mask[row, :length] = 1.0
    new = -3.0 * torch.rand(mask.shape, generator=generator)
    old = new.clone() if one_step else new + 0.4 * torch.randn(mask.shape, generator=generator)
    behaviour = old + 0.7 * torch.randn(mask.shape, generator=generator)
    advantage = torch.randn(len(lengths), generator=generator)
    trl_loss, trl_gradient = trl_compute_loss(
        new=new, old=old, behaviour=behaviour, advantage=advantage, mask=mask, loss_type=loss_type
    )

    flat = new[mask.bool()].requires_grad_()
    weights = token_weights([str(i) for i in range(len(lengths))], lengths, aggregation)
    expand = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    tokens = token_loss(
        flat,
        flat.detach() if one_step else old[mask.bool()],
        behaviour[mask.bool()],
        advantage[expand],
        clip_low=0.2,
        clip_high=0.28,
        tis_cap=2.0,
    )
    loss = (tokens.loss * torch.tensor(weights, dtype=torch.float32)[expand]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert tokens.truncated.sum() > 0  # the case exercises the cap, and where it can the clipping
    assert one_step or tokens.clipped.sum() > 0
    assert abs(loss.item() - trl_loss) <= 1e-6
    assert flat.grad is not None
    assert (flat.grad - trl_gradient[mask.bool()]).abs().max() <= 1e-6
    assert not trl_gradient[~mask.bool()].any()


def trl_compute_loss(
    *,
    new: torch.Tensor,
    old: torch.Tensor,
    behaviour: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    loss_type: str,
) -> tuple[float, torch.Tensor]:
    """Run TRL's method on a bare object that has the attributes it reads; returns the loss and d loss / d new."""
    trainer_module = pytest.importorskip("trl.trainer.grpo_trainer")
    leaf = new.clone().requires_grad_()
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (leaf, torch.zeros_like(leaf), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=0.28,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=accelerator,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 2, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 2),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantage,
        "old_per_token_logps": old,
        # TRL computes this while it generates: token-level truncated importance sampling with C_max = 2.
        "importance_sampling_ratio": torch.clamp(torch.exp((old - behaviour) * mask), max=2.0),
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer_module.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad
