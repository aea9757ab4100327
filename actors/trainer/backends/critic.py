"""A critic: what a policy may still expect before each token that it samples, learned beside it.

Invariant: the advantages of a batch come from the critic as it was before the batch, and it learns from the batch once;
neither moves a weight of the policy.

The critic is a whole model of its own whose head is one number, which begins at 0: the advantages of a first batch are
what a trajectory got, from each token to its end. A trajectory's tokens are one episode over all its segments, and its
reward comes with the last of them. Sources: PPO, Schulman et al. (arXiv 1707.06347); GAE, the same (1506.02438).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import nn

from actors.settings import TrainSettings
from actors.trainer.algorithms.algorithm import Algorithm
from actors.trainer.algorithms.estimators import generalised, normalised
from actors.trainer.backends.forward import Policy
from actors.trainer.backends.optimizer import MasterAdamW
from actors.trainer.backends.packing import MicroBatch, Packer
from actors.trainer.backends.protocol import NotFinite, TrainBatch


class Episode(msgspec.Struct, frozen=True):
    """The sampled tokens of one trajectory: N of them, over all its segments."""

    ticket: str
    segments: list[int]  # indices into the batch, in order
    values: np.ndarray  # float64 [N]; what the critic expected before each token
    advantages: np.ndarray  # float64 [N]

    @property
    def returns(self) -> np.ndarray:
        """What the critic should have expected, float64 [N]."""
        result: np.ndarray = self.values + self.advantages
        return result


class Critic:
    """See the module docstring. ``model`` is taken over: it is trained."""

    def __init__(self, model: Policy, settings: TrainSettings, device: torch.device) -> None:
        self._model = model
        self._settings = settings
        self._device = device
        self._head = nn.Linear(model.width, 1, device=device)  # float32, whatever the model computes in
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        body = {f"critic.{name}": parameter for name, parameter in model.decoder.named_parameters()}
        head = {f"critic.value_head.{name}": parameter for name, parameter in self._head.named_parameters()}
        self._optimizer = MasterAdamW(body | head, settings)

    def estimate(self, batch: TrainBatch, algorithms: Sequence[Algorithm | None]) -> list[Episode]:
        """The trajectories of all algorithms with the estimator gae, valued; no gradient."""
        own = {number: each for number, each in enumerate(algorithms) if each is not None and each.needs_values}
        values = self._values(batch, list(own))
        return [each for number, algorithm in own.items() for each in _episodes(batch, number, algorithm, values)]

    def learn(self, batch: TrainBatch, episodes: Sequence[Episode]) -> dict[str, float]:
        """Add the gradient of half the mean squared error of the values. Returns ``value_loss``, that error, and
        ``explained_variance``, the share of the returns' variance that the values explained (1 is all of it). Raises
        ``NotFinite`` naming the tickets, with no gradient left."""
        wrong = tuple(episode.ticket for episode in episodes if not np.isfinite(episode.returns).all())
        if wrong:
            self.zero()
            named = ", ".join(wrong)
            raise NotFinite(f"the critic's values are not finite in {len(wrong)} trajectories: {named}", wrong)
        returns = _of_segments(batch, episodes, [episode.returns for episode in episodes])
        count = sum(len(episode.values) for episode in episodes)
        for micro in self._micro_batches(_with_token_advantages(batch, returns), sorted(returns)):
            errors = self._value(micro) - micro.advantage
            loss = errors.square().sum() / (2.0 * count)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.collect_gradients()
        return _explained(episodes)

    def finite(self) -> bool:
        """Whether the gradient is."""
        return math.isfinite(self._optimizer.norm())

    def step(self, learning_rate: float, clip: float | None = None) -> dict[str, float]:
        """Clip, step, zero; returns critic_grad_norm."""
        return {"critic_grad_norm": self._optimizer.step(learning_rate, clip)}

    def zero(self) -> None:
        """Forget the gradient."""
        self._optimizer.zero()

    def state(self) -> dict[str, torch.Tensor]:
        """As ``MasterAdamW.state``; the names of its parameters begin with ``critic.``."""
        return self._optimizer.state()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """As ``MasterAdamW.restore``; other names are passed over."""
        self._optimizer.restore(state)

    def _value(self, micro: MicroBatch) -> torch.Tensor:
        """Before each sampled token, float32 [M]."""
        value: torch.Tensor = self._head(self._model.hidden_states(micro).float())
        return value.squeeze(-1)

    @torch.no_grad()
    def _values(self, batch: TrainBatch, numbers: Sequence[int]) -> list[np.ndarray]:
        """Per segment float64 [T], 0 where nothing was sampled and for other algorithms' segments."""
        values = [np.zeros(len(sequence.tokens)) for sequence in batch.sequences]
        own = [i for i, sequence in enumerate(batch.sequences) if sequence.algorithm in numbers]
        for micro in self._micro_batches(batch, own):
            found = self._value(micro).cpu().numpy()
            for sequence, place, value in zip(micro.sequence, micro.place, found, strict=True):
                values[sequence][place] = value
        return values

    def _micro_batches(self, batch: TrainBatch, indices: list[int]) -> Iterator[MicroBatch]:
        weights = np.zeros(len(batch.sequences))
        packer = Packer(batch, weights, self._device, trees=self._model.computes_trees)
        return packer.micro_batches(indices, self._settings.micro_batch_tokens)


def with_advantages(
    batch: TrainBatch, episodes: Sequence[Episode], algorithms: Sequence[Algorithm | None]
) -> TrainBatch:
    """The batch with each token's advantage in place of its trajectory's reward. Where an algorithm scales advantages,
    those of its tokens have the mean 0 and the deviation 1."""
    advantages: dict[int, np.ndarray] = {}
    for number, algorithm in enumerate(algorithms):
        own = [episode for episode in episodes if batch.sequences[episode.segments[0]].algorithm == number]
        if algorithm is None or not own:
            continue
        flat = np.concatenate([episode.advantages for episode in own])
        if algorithm.scale_advantages:
            flat = normalised(flat[None], np.ones((1, len(flat))), epsilon=algorithm.advantage_epsilon)[0]
        ends = np.cumsum([len(episode.values) for episode in own])[:-1]
        advantages |= _of_segments(batch, own, np.split(flat, ends))
    return _with_token_advantages(batch, advantages)


def _episodes(batch: TrainBatch, number: int, algorithm: Algorithm, values: list[np.ndarray]) -> Iterator[Episode]:
    segments: dict[str, list[int]] = {}
    for i, sequence in enumerate(batch.sequences):
        if sequence.algorithm == number:
            segments.setdefault(sequence.ticket, []).append(i)
    for ticket, own in segments.items():
        expected = np.concatenate([values[i][batch.sequences[i].loss_mask == 1] for i in own])
        if not expected.size:
            continue
        rewards = np.zeros(len(expected))
        rewards[-1] = batch.sequences[own[-1]].advantage
        found = generalised(rewards, expected, gamma=algorithm.gamma, decay=algorithm.gae_lambda)
        yield Episode(ticket, own, expected, found)


def _of_segments(
    batch: TrainBatch, episodes: Sequence[Episode], figures: Sequence[np.ndarray]
) -> dict[int, np.ndarray]:
    """By segment float32 [T]: figures [N] of the episodes' sampled tokens where they lie; 0 elsewhere."""
    result: dict[int, np.ndarray] = {}
    for episode, own in zip(episodes, figures, strict=True):
        taken = 0
        for i in episode.segments:
            places = np.flatnonzero(batch.sequences[i].loss_mask)
            result[i] = np.zeros(len(batch.sequences[i].tokens), np.float32)
            result[i][places] = own[taken : taken + len(places)]
            taken += len(places)
    return result


def _with_token_advantages(batch: TrainBatch, advantages: Mapping[int, np.ndarray]) -> TrainBatch:
    sequences = [
        msgspec.structs.replace(sequence, token_advantages=advantages[i]) if i in advantages else sequence
        for i, sequence in enumerate(batch.sequences)
    ]
    return msgspec.structs.replace(batch, sequences=sequences)


def _explained(episodes: Sequence[Episode]) -> dict[str, float]:
    errors = np.concatenate([episode.advantages for episode in episodes])
    variance = float(np.concatenate([episode.returns for episode in episodes]).var())
    return {
        "value_loss": float((errors**2).mean()) / 2.0,
        "explained_variance": 1.0 - float(errors.var()) / variance if variance > 0 else 0.0,
    }
