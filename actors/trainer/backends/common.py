"""What the torch and the megatron backend share: the loss over micro-batches, statistics, clipping, checkpoints.

Invariant: gradients are those of the whole batch's loss, whatever the micro-batches; a batch with a loss that is not
finite leaves no gradient behind, and a gradient that is not finite moves no weight.

A backend adds three things: hidden states at chosen positions, the head that turns them into logits, and where its
parameters lie. With several ranks figures are summed over those that computed them, so all ranks raise, or none does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from actors.settings import TrainSettings
from actors.trainer.algorithms.aggregation import batch_weights, token_weights
from actors.trainer.algorithms.algorithm import Algorithm
from actors.trainer.algorithms.imitation import imitation_loss
from actors.trainer.algorithms.losses import TokenLoss, policy_loss
from actors.trainer.algorithms.presets import resolve
from actors.trainer.algorithms.sampled import Sampled
from actors.trainer.backends.inspecting import Inspector
from actors.trainer.backends.kept import KeptVersions
from actors.trainer.backends.optimizer import MasterAdamW
from actors.trainer.backends.packing import MicroBatch, Packer, check
from actors.trainer.backends.protocol import Inspection, NotFinite, TrainBatch, TrainSequence
from actors.trainer.backends.scoring import sampled_logprobs
from actors.trainer.checkpointing import Layout, load_rank, save_rank
from actors.trajectory import FULL_VOCABULARY

Item = tuple[MicroBatch, Algorithm | None]
"""A micro-batch and the algorithm that trains it."""
Visit = Callable[[Item, torch.Tensor], torch.Tensor | None]
"""(item, last hidden state [M, H] that predicts each of its sampled tokens) -> its loss; None: nothing to learn."""
Reduce = Callable[[np.ndarray], np.ndarray]


class PolicyBackend(ABC):
    """See ``actors.trainer.backends.protocol.Backend``."""

    computes_trees = False
    """Whether ``_each`` takes micro-batches that are a row of trees."""

    def __init__(
        self,
        *,
        settings: TrainSettings,
        vocabulary: int,
        parameters: Mapping[str, torch.nn.Parameter],
        device: torch.device,
        layout: Layout,
    ) -> None:
        self._settings = settings
        self._algorithm = resolve(settings)
        self._vocabulary = vocabulary
        self._device = device
        self._layout = layout
        self._optimizer = self._make_optimizer(parameters)
        self._kept = KeptVersions(parameters, settings.recompute_versions)

    def _make_optimizer(self, parameters: Mapping[str, torch.nn.Parameter]) -> MasterAdamW:
        return MasterAdamW(parameters, self._settings)

    @abstractmethod
    def _each(self, items: Iterable[Item], visit: Visit, *, learn: bool) -> None:
        """Compute the items that this rank has a part in. ``visit`` is called where the last hidden state is; with
        ``learn`` the gradients of what it returns are added up."""

    @abstractmethod
    def _head(self, hidden: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Logits [R, A] of the given tokens, or of the whole vocabulary."""

    @abstractmethod
    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See the protocol."""

    def _reduce_gradients(self) -> None:
        """Complete gradients of which this rank holds only a part."""
        return

    def _own(self, batch: TrainBatch) -> Collection[int]:
        """The segments that this rank has a part in; each is computed by one replica of the model."""
        return range(len(batch.sequences))

    def _sum(self, figures: np.ndarray) -> np.ndarray:
        """The sum over the ranks that have visited something, the same on every rank."""
        return figures

    def _max(self, figures: np.ndarray) -> np.ndarray:
        """Likewise the maximum."""
        return figures

    def close(self) -> None:
        """See the protocol."""
        return

    def forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        """See the protocol. Also returns ratio_min, and truncated_fraction: tokens whose importance weight was cut.

        Segments without an advantage have no gradient (unless there is an entropy bonus): they are only scored.
        """
        check(batch, self._vocabulary)
        algorithms = self._algorithms(batch)
        batch, recomputed = self._kept.recompute(batch, self._scored)
        batch, of_critic = self._with_values(batch, algorithms, learn=True)
        packer = self._packer(batch, self._weights(batch))
        owners = [sequence.ticket for sequence in batch.sequences]
        statistics = Statistics(total=_sampled_tokens(batch))
        own = self._own(batch)

        def items(learn: bool) -> Iterator[Item]:
            for number, algorithm in enumerate(algorithms):
                chosen = [i for i in own if batch.sequences[i].algorithm == number]
                indices = [i for i in chosen if self._learns(algorithm, batch.sequences[i]) == learn]
                for micro in packer.micro_batches(indices, self._settings.micro_batch_tokens):
                    yield micro, algorithm

        def visit(item: Item, hidden: torch.Tensor) -> torch.Tensor | None:
            micro, algorithm = item
            # Once something is not finite nothing will be stepped; go on only to name all it concerns.
            with torch.set_grad_enabled(torch.is_grad_enabled() and not statistics.not_finite):
                loss, _, tokens, entropy = self._micro_loss(micro, algorithm, hidden, statistics.total)
            finite = statistics.add(micro, tokens, loss.detach(), entropy.detach())
            return loss if finite else None

        for learn in (True, False):
            self._each(items(learn), visit, learn=learn)
        statistics.combine(self._sum, self._max, len(owners))
        if statistics.not_finite:
            self._optimizer.zero()
            tickets = tuple(dict.fromkeys(owners[i] for i in sorted(statistics.not_finite)))
            raise NotFinite(f"the loss is not finite in {len(tickets)} trajectories: {', '.join(tickets)}", tickets)
        return statistics.means() | recomputed | of_critic

    def keep(self, version: int) -> None:
        """See the protocol."""
        self._kept.keep(version)

    def _with_values(
        self, batch: TrainBatch, algorithms: Sequence[Algorithm | None], *, learn: bool
    ) -> tuple[TrainBatch, dict[str, float]]:
        """The batch with advantages of tokens where a critic gives them, and what became of the critic, which learns
        from the batch where ``learn``. Raises ``ValueError`` where there is none."""
        if any(algorithm is not None and algorithm.needs_values for algorithm in algorithms):
            raise ValueError(f"the {self._settings.backend} backend has no critic; use train.backend=torch")
        return batch, {}

    def _packer(self, batch: TrainBatch, weights: np.ndarray) -> Packer:
        return Packer(batch, weights, self._device, trees=self.computes_trees)

    def _algorithms(self, batch: TrainBatch) -> list[Algorithm | None]:
        """By number; None is imitation."""
        return [None] if batch.loss == "imitation" else [*(batch.algorithms or [self._algorithm])]

    def _weights(self, batch: TrainBatch) -> np.ndarray:
        """What a sampled token of each segment counts, float64 [segments]."""
        owners = [sequence.ticket for sequence in batch.sequences]
        counts = [int(sequence.loss_mask.sum()) for sequence in batch.sequences]
        if batch.loss == "imitation":
            alike = self._algorithm.aggregation == "sequence"
            return token_weights(owners, counts, "sequence" if alike else "token")
        chosen = [sequence.algorithm for sequence in batch.sequences]
        return batch_weights(owners, counts, chosen, batch.algorithms or [self._algorithm])

    def _learns(self, algorithm: Algorithm | None, sequence: TrainSequence) -> bool:
        if algorithm is None or algorithm.needs_reference or self._settings.entropy_bonus != 0.0:
            return True
        if sequence.token_advantages is not None:
            return bool(sequence.token_advantages.any())
        return sequence.advantage != 0.0

    def _reference(self, micro: MicroBatch) -> torch.Tensor:
        """Log-probabilities [M] under the reference. Raises ``ValueError`` where there is none."""
        raise ValueError(f"the {self._settings.backend} backend keeps no reference policy; use train.backend=torch")

    def _token_loss(self, algorithm: Algorithm | None, new: torch.Tensor, micro: MicroBatch) -> TokenLoss:
        if algorithm is None:
            return imitation_loss(new)
        reference = None
        if algorithm.needs_reference:
            with torch.no_grad():
                reference = self._reference(micro)
        tokens = Sampled(
            new=new,
            old=new.detach(),  # one optimiser step a batch: the policy before it is the policy now
            behaviour=micro.behaviour,
            advantage=micro.advantage,
            segment=micro.segment,
            segments=micro.segments,
            reference=reference,
        )
        return policy_loss(tokens, algorithm)

    def _micro_loss(
        self, micro: MicroBatch, algorithm: Algorithm | None, hidden: torch.Tensor, total: int
    ) -> tuple[torch.Tensor, torch.Tensor, TokenLoss, torch.Tensor]:
        """The loss of a micro-batch; of its tokens: log-probabilities, losses before weighting, entropies."""
        new, entropy = sampled_logprobs(hidden, self._head, micro, train_entropy=self._settings.entropy_bonus != 0.0)
        tokens = self._token_loss(algorithm, new, micro)
        loss = (tokens.loss * micro.weight).sum()
        if self._settings.entropy_bonus and algorithm is not None:
            loss = loss - self._settings.entropy_bonus * entropy.sum() / total
        return loss, new, tokens, entropy

    def optim_step(self, learning_rate: float, clip: float | None = None) -> dict[str, float]:
        """See the protocol."""
        self._reduce_gradients()
        return {"grad_norm": self._optimizer.step(learning_rate, clip)}

    def inspect(self, batch: TrainBatch) -> Inspection:
        """See the protocol."""
        check(batch, self._vocabulary)
        owners = [sequence.ticket for sequence in batch.sequences]
        algorithms = self._algorithms(batch)
        batch, _ = self._with_values(batch, algorithms, learn=False)
        packer = self._packer(batch, self._weights(batch))
        total, own = _sampled_tokens(batch), self._own(batch)
        inspector = Inspector([sequence.loss_mask for sequence in batch.sequences])
        norms: dict[str, float] = {}

        def visit(item: Item, hidden: torch.Tensor) -> torch.Tensor:
            micro, algorithm = item
            loss, new, tokens, _ = self._micro_loss(micro, algorithm, hidden, total)
            inspector.add(micro, new, tokens)
            return loss

        self._optimizer.zero()
        for ticket in dict.fromkeys(owners):
            indices = [i for i, owner in enumerate(owners) if owner == ticket]
            algorithm = algorithms[batch.sequences[indices[0]].algorithm]
            micro_batches = packer.micro_batches([i for i in indices if i in own], self._settings.micro_batch_tokens)
            self._each(((micro, algorithm) for micro in micro_batches), visit, learn=True)
            self._reduce_gradients()
            norms[ticket] = self._optimizer.norm()
            inspector.keep(self._optimizer.gradients())
            self._optimizer.zero()
        inspector.combine(self._sum)
        return inspector.result(norms, self._optimizer.norm_of(inspector.total))

    def logprobs(self, batch: TrainBatch, version: int | None = None) -> list[np.ndarray]:
        """See the protocol."""
        check(batch, self._vocabulary)
        everything = list(range(len(batch.sequences)))
        if version is None:
            return self._scored(batch, everything)
        if version not in self._kept.versions:
            kept = ", ".join(map(str, sorted(self._kept.versions))) or "none"
            raise ValueError(f"version {version} is not kept; kept are: {kept} (train.recompute_versions)")
        with self._kept.under(version):
            return self._scored(batch, everything)

    def _scored(self, batch: TrainBatch, indices: list[int]) -> list[np.ndarray]:
        """As ``logprobs``; 0 for other segments than ``indices``."""
        lengths = [len(sequence.tokens) for sequence in batch.sequences]
        flat = np.zeros(sum(lengths), dtype=np.float32)
        result = np.split(flat, np.cumsum(lengths)[:-1])
        packer = self._packer(batch, np.zeros(len(lengths)))

        def visit(item: Item, hidden: torch.Tensor) -> None:
            micro, _ = item
            values, _ = sampled_logprobs(hidden, self._head, micro)
            for sequence, place, value in zip(micro.sequence, micro.place, values.cpu().numpy(), strict=True):
                result[sequence][place] = value

        own = set(self._own(batch))
        micro_batches = packer.micro_batches([i for i in indices if i in own], self._settings.micro_batch_tokens)
        self._each(((micro, None) for micro in micro_batches), visit, learn=False)
        flat[:] = self._sum(flat)
        return result

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """See the protocol."""
        if len(tokens) < 2:
            return np.zeros(0, dtype=np.float32)
        everything = np.ones(len(tokens), dtype=np.uint8)
        everything[0] = 0
        as_sampled = TrainSequence(
            ticket="score",
            tokens=tokens,
            loss_mask=everything,
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            allowed=np.full(len(tokens), FULL_VOCABULARY, dtype=np.int32),
            advantage=0.0,
            temperature=1.0,
        )
        return self.logprobs(TrainBatch([as_sampled], []))[0][1:]

    def save(self, directory: Path) -> None:
        """See the protocol."""
        save_rank(directory, self._layout, self._state())

    def load(self, directory: Path) -> None:
        """See the protocol."""
        self._restore(load_rank(directory, self._layout, self._state()))

    def _state(self) -> dict[str, torch.Tensor]:
        """Everything to resume from."""
        return self._optimizer.state()

    def _restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self._optimizer.restore(state)
        self._kept.forget()


def _sampled_tokens(batch: TrainBatch) -> int:
    return sum(int(sequence.loss_mask.sum()) for sequence in batch.sequences)


class Statistics:
    """Sums over the sampled tokens of a batch, and which segments were not finite."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.not_finite: set[int] = set()
        self._sums = dict.fromkeys(
            ("entropy", "kl_rollout", "ratio_mean", "clipped_fraction", "truncated_fraction", "kl_reference"), 0.0
        )
        self._loss = 0.0
        self._ratio_max, self._ratio_min = 0.0, float("inf")

    def add(self, micro: MicroBatch, tokens: TokenLoss, loss: torch.Tensor, entropy: torch.Tensor) -> bool:
        """Count a micro-batch in; False where one of its tokens is not finite."""
        good = tokens.loss.detach().isfinite() & micro.behaviour.isfinite() & entropy.isfinite()
        if not bool(good.all()):
            self.not_finite.update(int(i) for i in micro.sequence[~good.cpu().numpy()])
            return False
        figures = torch.stack(
            [
                entropy.sum(),
                tokens.kl.sum(),
                tokens.ratio.sum(),
                tokens.clipped.sum(),
                tokens.truncated.sum(),
                tokens.reference_kl.sum(),
                loss,
                tokens.ratio.max(),
                tokens.ratio.min(),
            ]
        ).tolist()
        for name, figure in zip(self._sums, figures, strict=False):
            self._sums[name] += figure
        self._loss += figures[-3]
        self._ratio_max = max(self._ratio_max, figures[-2])
        self._ratio_min = min(self._ratio_min, figures[-1])
        return True

    def combine(self, total: Reduce, largest: Reduce, segments: int) -> None:
        """Over all ranks, of which each counted other segments in."""
        sums = total(np.array([*self._sums.values(), self._loss]))
        self._sums = dict(zip(self._sums, sums.tolist(), strict=False))
        self._loss = float(sums[-1])
        flags = np.zeros(segments)
        flags[list(self.not_finite)] = 1.0
        extremes = largest(np.array([self._ratio_max, -self._ratio_min, *flags]))
        self._ratio_max, self._ratio_min = float(extremes[0]), -float(extremes[1])
        self.not_finite = {int(i) for i in np.flatnonzero(extremes[2:])}

    def means(self) -> dict[str, float]:
        """The statistics of the protocol."""
        return {
            "loss": self._loss,
            "tokens": float(self.total),
            "ratio_max": self._ratio_max,
            "ratio_min": self._ratio_min,
            **{name: value / self.total for name, value in self._sums.items()},
        }
