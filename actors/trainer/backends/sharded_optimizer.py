"""AdamW whose masters and moments are shared by all replicas of the model (ZeRO stage 1, arXiv 1910.02054).

Invariant: every replica holds one part in R of each parameter's master and moments, steps only that, and after the step
all replicas hold the same whole parameters: those that ``MasterAdamW`` would have come to, to the rounding of a sum's
order. A part is cut from the flattened parameter, padded with zeros, so any shape can be shared by any number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from actors.settings import TrainSettings
from actors.trainer.backends.optimizer import MasterAdamW, SquaredNorm


class ShardedAdamW(MasterAdamW):
    """``group``: the replicas. ``parameters`` are whole; gradients of masters are there once ``reduce`` was called."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        settings: TrainSettings,
        squared_norm: SquaredNorm,
        group: dist.ProcessGroup,
    ) -> None:
        self._whole = dict(parameters)
        self._group = group
        self._replica, self._replicas = dist.get_rank(group), dist.get_world_size(group)
        self._summed: dict[str, torch.Tensor] = {}
        parts = {
            name: torch.nn.Parameter(self._row(parameter.detach().float(), self._replica).clone())
            for name, parameter in self._whole.items()
        }
        super().__init__(parts, settings, squared_norm)

    def _row(self, tensor: torch.Tensor, replica: int) -> torch.Tensor:
        """A replica's part, with as many dimensions as the whole has: decay looks at those."""
        part = self._rows(tensor)[replica]
        return part.reshape([1] * (tensor.ndim - 1) + [-1])

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[R, part] of a whole tensor."""
        flat = tensor.reshape(-1)
        width = -(-flat.numel() // self._replicas)
        return torch.nn.functional.pad(flat, (0, width * self._replicas - flat.numel())).view(self._replicas, width)

    def collect_gradients(self) -> None:
        """See the base; they add up in float32, whole, until ``reduce``."""
        for name, parameter in self._whole.items():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            self._summed[name] = self._summed[name].add_(gradient) if name in self._summed else gradient
            parameter.grad = None

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """This replica's own gradient of every parameter; zeros where nothing reached it."""
        self.collect_gradients()
        for name, parameter in self._whole.items():
            if name not in self._summed:
                self._summed[name] = torch.zeros_like(parameter, dtype=torch.float32)
        return self._summed

    def reduce(self) -> None:
        """Sum the gradients of all replicas; each keeps that of its parts."""
        rows = {name: self._rows(gradient) for name, gradient in self.whole_gradients().items()}
        sent = torch.cat(list(rows.values()), dim=1).reshape(-1)
        kept = sent.new_empty(sent.numel() // self._replicas)
        dist.reduce_scatter_tensor(kept, sent, group=self._group)
        parts = torch.split(kept, [part.shape[1] for part in rows.values()])
        for name, part in zip(rows, parts, strict=True):
            master = self._masters[name]
            master.grad = part.reshape(master.shape).clone()
        self._summed = {}

    def zero(self) -> None:
        """See the base."""
        super().zero()
        self._summed = {}
        for parameter in self._whole.values():
            parameter.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Put the parts of all replicas together, in the precision that the model computes in."""
        for dtype in sorted({parameter.dtype for parameter in self._whole.values()}, key=str):
            chosen = {name: whole for name, whole in self._whole.items() if whole.dtype == dtype}
            own = torch.cat([self._masters[name].reshape(-1) for name in chosen]).to(dtype)
            gathered = own.new_empty(self._replicas * own.numel())
            dist.all_gather_into_tensor(gathered, own, group=self._group)
            rows = gathered.view(self._replicas, -1)
            parts = torch.split(rows, [self._masters[name].numel() for name in chosen], dim=1)
            for whole, part in zip(chosen.values(), parts, strict=True):
                whole.copy_(part.reshape(-1)[: whole.numel()].view(whole.shape))
