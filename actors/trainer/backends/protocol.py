"""What every trainer backend does: the policy's forward, backward and optimiser, and nothing about rollouts.

A backend is a plain synchronous object in a trainer rank's process, driven by one thread. With several ranks every
rank makes the same calls with the same arguments in the same order (they are collective).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
import numpy as np

from actors.trainer.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    import torch


Loss = Literal["policy", "imitation"]


class TrainSequence(msgspec.Struct, frozen=True):
    """One segment, ready for the loss; all arrays have the same length T. See ``actors.trajectory.Segment``."""

    ticket: str  # whose segment it is: named when a loss or a gradient is not finite
    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]; position 0 is never 1
    logprobs: np.ndarray  # float32 [T]; behaviour log-probabilities
    allowed: np.ndarray  # int32 [T]; index into TrainBatch.allowed_sets or FULL_VOCABULARY
    advantage: float  # with the estimator gae: the trajectory's reward, of which a critic makes token_advantages
    temperature: float  # > 0
    token_advantages: np.ndarray | None = None  # float32 [T]; instead of ``advantage``, where tokens differ
    algorithm: int = 0  # index into TrainBatch.algorithms
    versions: np.ndarray | None = None  # int32 [T]; under which each token was sampled, where that is known


class TrainBatch(msgspec.Struct, frozen=True):
    """All segments of one optimiser step."""

    sequences: list[TrainSequence]
    allowed_sets: list[np.ndarray]  # int32, ascending token ids
    loss: Loss = "policy"  # imitation looks at neither advantages nor behaviour
    algorithms: list[Algorithm] = []  # none: the one that the backend's settings name


class Inspection(msgspec.Struct, frozen=True):
    """What a step on a batch would do, trajectory by trajectory; a figure that is not finite is given as it is."""

    logprobs: list[np.ndarray]  # per sequence float32 [T]: of sampled tokens, under the backend's weights; else 0
    ratios: list[np.ndarray]  # per sequence float32 [T]: trainer's probability over the rollout's; else 1
    losses: list[np.ndarray]  # per sequence float32 [T]: each token's share of the batch's loss
    gradient_norms: dict[str, float]  # of each trajectory's share, by ticket
    gradient_norm: float  # of the whole batch, before clipping


class Backend(Protocol):
    """See the module docstring."""

    def forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        """Add the batch's gradients; returns scalar statistics (loss, ratio_mean, ratio_max, entropy, kl_rollout,
        kl_reference, clipped_fraction, tokens). Raises ``NotFinite`` naming the tickets where the loss is NaN or
        infinite; the gradients are then zeroed."""

    def optim_step(self, learning_rate: float, clip: float | None = None) -> dict[str, float]:
        """Clip the gradient to the norm ``clip`` (default: ``max_grad_norm``), step, zero it; returns grad_norm. Raises
        ``NotFinite`` for a gradient that is not finite, without having stepped."""

    def inspect(self, batch: TrainBatch) -> Inspection:
        """What ``forward_backward`` and ``optim_step`` would compute, without a step and whatever is not finite. The
        gradients are zeroed."""

    def keep(self, version: int) -> None:
        """The weights are this version's. The newest ``train.recompute_versions`` are remembered."""

    def logprobs(self, batch: TrainBatch, version: int | None = None) -> list[np.ndarray]:
        """Per sequence float32 [T]: log-probability of each token where loss_mask is 1 (same temperature and mask
        as it was sampled with), 0 elsewhere. No gradient. ``version``: under its weights instead of today's; raises
        ``ValueError`` for one that is not remembered."""

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Log-probability (float32 [T-1], temperature 1, no mask) of tokens[1:]; compare ``Engine.score``."""

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights under their Hugging Face names, whole (gathered over ranks), CPU, contiguous, private copies
        that a later step does not change. A tied ``lm_head.weight`` is left out."""

    def save(self, directory: Path) -> None:
        """Write this rank's part of weights, optimiser and RNG state as safetensors and JSON into ``directory``."""

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote with the same layout; the next step equals that of an unbroken run. Raises
        ``CheckpointError`` for a missing, truncated or foreign file, naming it."""

    def close(self) -> None:
        """Leave the process group; idempotent."""


class NotFinite(ArithmeticError):
    """A loss or a gradient that is NaN or infinite; ``tickets`` names the trajectories it came from, if known."""

    def __init__(self, message: str, tickets: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tickets = tickets


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be loaded: says which file and why."""
