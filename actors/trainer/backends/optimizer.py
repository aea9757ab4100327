"""AdamW with gradient clipping on float32 masters, whatever dtype the model computes in.

Invariant: optimiser state and accumulated gradients are float32. A float32 parameter is its own master; a bfloat16
one has a float32 copy that is stepped and rounded back, so that small updates are not lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from actors.settings import TrainSettings
from actors.trainer.backends.protocol import NotFinite

SquaredNorm = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""Sum of the squares of all gradients of the whole model, over all ranks."""


def local_squared_norm(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """For a model that lies whole in this process."""
    norms = torch._foreach_norm(list(gradients.values()))
    return torch.stack(norms).square().sum()


class MasterAdamW:
    """Decoupled weight decay (Loshchilov & Hutter 2019) on matrices only, bias-corrected, as ``torch.optim.AdamW``."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        settings: TrainSettings,
        squared_norm: SquaredNorm = local_squared_norm,
    ) -> None:
        self._parameters = dict(parameters)
        self._masters = {name: _master(parameter) for name, parameter in self._parameters.items()}
        self._squared_norm = squared_norm
        self._max_norm = settings.max_grad_norm
        matrices = [master for master in self._masters.values() if master.ndim >= 2]
        vectors = [master for master in self._masters.values() if master.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            fused=True,
        )

    def collect_gradients(self) -> None:
        """After each backward pass: add the gradients of parameters that are not their own masters to the masters'."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """The accumulated gradient of every master; zeros where nothing reached it."""
        gradients = {}
        for name, master in self._masters.items():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            gradients[name] = master.grad
        return gradients

    def zero(self) -> None:
        """Forget all gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self._masters[name].grad = None

    def norm(self) -> float:
        """Of the accumulated gradient, over all ranks."""
        return self.norm_of(self.gradients())

    def norm_of(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """Of any gradient of this model."""
        return float(self._squared_norm(gradients).sqrt())

    def step(self, learning_rate: float, clip: float | None = None) -> float:
        """Clip to the norm ``clip`` (default: ``max_grad_norm``), step, zero; returns the norm before clipping. Raises
        ``NotFinite`` without having stepped."""
        gradients = self.gradients()
        norm = self.norm_of(gradients)
        if not math.isfinite(norm):
            self.zero()
            raise NotFinite(f"the gradient's norm is {norm}; no step was taken, the gradient is zeroed")
        coefficient = (self._max_norm if clip is None else clip) / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        if coefficient < 1.0:
            torch._foreach_mul_(list(gradients.values()), coefficient)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.write_back()
        self.zero()
        return norm

    def write_back(self) -> None:
        """Round the masters into the parameters that are not their own masters."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Everything to resume from: ``master.*``, ``exp_avg.*``, ``exp_avg_sq.*`` and the scalar ``step.*``."""
        state: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            moments = self._adamw.state.get(master, {})
            state[f"master.{name}"] = master.detach()
            state[f"exp_avg.{name}"] = moments.get("exp_avg", torch.zeros_like(master.detach()))
            state[f"exp_avg_sq.{name}"] = moments.get("exp_avg_sq", torch.zeros_like(master.detach()))
            state[f"step.{name}"] = moments.get("step", torch.zeros((), device=master.device))
        return state

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take back what ``state`` returned (names and shapes already checked); gradients are forgotten."""
        self.zero()
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state[f"master.{name}"])
                self._adamw.state[master] = {
                    "step": state[f"step.{name}"].to(master.device, copy=True),
                    "exp_avg": state[f"exp_avg.{name}"].to(master.device, copy=True),
                    "exp_avg_sq": state[f"exp_avg_sq.{name}"].to(master.device, copy=True),
                }
        self.write_back()


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return torch.nn.Parameter(parameter.detach().float().clone())
