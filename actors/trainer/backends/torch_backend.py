"""Training in one process with the transformers model itself, on the CPU or on one GPU.

Invariant: hidden states equal those of the model's own forward pass (``forward``). A reference is never trained; a
critic (``critic``) is trained with the policy: a step moves both, or, where anything is not finite, neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from actors.policy import PolicyError
from actors.settings import TrainSettings
from actors.trainer.algorithms.algorithm import Algorithm
from actors.trainer.algorithms.presets import resolve
from actors.trainer.backends.common import Item, PolicyBackend, Visit
from actors.trainer.backends.critic import Critic, with_advantages
from actors.trainer.backends.forward import Policy
from actors.trainer.backends.packing import MicroBatch
from actors.trainer.backends.protocol import NotFinite, TrainBatch
from actors.trainer.backends.scoring import sampled_logprobs
from actors.trainer.checkpointing import Layout
from actors.trainer.model import build_model, hf_state


class TorchBackend(PolicyBackend):
    """See ``actors.trainer.backends.protocol.Backend``. Raises ``PolicyError`` for an unusable ``policy_dir``."""

    def __init__(self, policy_dir: Path, *, seed: int, settings: TrainSettings, dtype: str, from_scratch: bool) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

        def build(where: str) -> Policy:
            initial = where == "initial"
            model = build_model(
                policy_dir if initial else Path(where),
                seed=seed,
                dtype=dtype,
                from_scratch=initial and from_scratch,
            )
            return Policy(model.to(device))

        self._policy = build("initial")
        self.computes_trees = self._policy.computes_trees
        self._compared_with = None
        if settings.reference is not None:
            self._compared_with = build(settings.reference)
            _refuse_other_vocabulary(self._compared_with, self._policy, f"train.reference: {settings.reference}")
        self._critic = None
        if any(resolve(settings, stream).needs_values for stream in ("", *settings.algorithms)):
            critic = build(settings.critic)
            _refuse_other_vocabulary(critic, self._policy, f"train.critic: {settings.critic}")
            self._critic = Critic(critic, settings, device)
        torch.manual_seed(seed)
        super().__init__(
            settings=settings,
            vocabulary=self._policy.vocabulary,
            parameters=dict(self._policy.model.named_parameters()),
            device=device,
            layout=Layout(backend="torch", rank=0, world_size=1),
        )

    def _each(self, items: Iterable[Item], visit: Visit, *, learn: bool) -> None:
        with torch.set_grad_enabled(learn):
            for item in items:
                loss = visit(item, self._policy.hidden_states(item[0]))
                if loss is not None and loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
                    self._optimizer.collect_gradients()

    def _head(self, hidden: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        return self._policy.head(hidden, token_ids)

    def _reference(self, micro: MicroBatch) -> torch.Tensor:
        if self._compared_with is None:
            raise ValueError("train.reference: expected initial or a model directory, found none")
        return sampled_logprobs(self._compared_with.hidden_states(micro), self._compared_with.head, micro)[0]

    def _with_values(
        self, batch: TrainBatch, algorithms: Sequence[Algorithm | None], *, learn: bool
    ) -> tuple[TrainBatch, dict[str, float]]:
        if self._critic is None:
            return super()._with_values(batch, algorithms, learn=learn)
        episodes = self._critic.estimate(batch, algorithms)
        if not episodes:
            return batch, {}
        statistics = self._critic.learn(batch, episodes) if learn else {}
        return with_advantages(batch, episodes, algorithms), statistics

    def forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        """See the protocol. With a critic also returns value_loss and explained_variance."""
        try:
            return super().forward_backward(batch)
        except NotFinite:
            if self._critic is not None:
                self._critic.zero()
            raise

    def optim_step(self, learning_rate: float, clip: float | None = None) -> dict[str, float]:
        """See the protocol. With a critic also returns critic_grad_norm."""
        if self._critic is None:
            return super().optim_step(learning_rate, clip)
        if not self._critic.finite():
            self._critic.zero()
            self._optimizer.zero()
            raise NotFinite("the critic's gradient is not finite; no step was taken, the gradients are zeroed")
        try:
            statistics = super().optim_step(learning_rate, clip)
        except NotFinite:
            self._critic.zero()
            raise
        return statistics | self._critic.step(learning_rate * self._settings.critic_rate, clip)

    def _state(self) -> dict[str, torch.Tensor]:
        return super()._state() | ({} if self._critic is None else self._critic.state())

    def _restore(self, state: Mapping[str, torch.Tensor]) -> None:
        super()._restore(state)
        if self._critic is not None:
            self._critic.restore(state)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See the protocol."""
        for name, tensor in hf_state(self._policy.model).items():
            yield name, tensor.detach().to("cpu", copy=True).contiguous()


def _refuse_other_vocabulary(beside: Policy, policy: Policy, what: str) -> None:
    """Also where it has no trees, but the policy has: a micro-batch is laid out for both."""
    if beside.vocabulary != policy.vocabulary:
        raise PolicyError(
            f"{what} has a vocabulary of {beside.vocabulary} tokens, the policy one of {policy.vocabulary}"
        )
    if policy.computes_trees and not beside.computes_trees:
        raise PolicyError(f"{what} is of an architecture that cannot share prefixes as the policy's")
