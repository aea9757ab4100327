"""Micro-batches through Megatron's schedules: one stage, 1F1B, or interleaved.

Invariant: all ranks of a replica are given the same micro-batches in the same order. Between stages a micro-batch
travels as rows of one length for all of them, padded, so that no shapes need to be exchanged and every schedule can
carry segments of any length; what is padded is cut off before it is computed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from actors.trainer.backends import megatron_compat
from actors.trainer.backends.common import Item, Visit
from actors.trainer.backends.megatron_model import Mesh
from actors.trainer.backends.packing import MicroBatch

Loss = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]


class Pipeline:
    """``chunks``: this rank's parts of the model."""

    def __init__(self, chunks: Sequence[torch.nn.Module], mesh: Mesh, device: torch.device) -> None:
        self._chunks = list(chunks)
        self._mesh = mesh
        self._device = device
        self._forward_backward = get_forward_backward_func(
            pp_size=mesh.pipeline, vp_size=mesh.chunks if mesh.chunks > 1 else None
        )

    def run(self, items: Iterable[Item], visit: Visit, *, learn: bool) -> None:
        """See ``PolicyBackend._each``; the last stage visits."""
        megatron_compat.enter()
        work: list[Item | None] = list(items)
        if not work:
            return
        if self._mesh.chunks > 1:  # the interleaved schedule wants whole rounds
            work += [None] * (-len(work) % self._mesh.pipeline)
        rows = max(self._tokens(item).numel() for item in work)

        def step(iterator: Iterator[Item | None], model: Any) -> tuple[torch.Tensor, Loss]:
            item = next(iterator)
            hidden = self._stage(model, self._tokens(item))
            if not model.post_process:
                return _flattened(hidden, rows // (self._mesh.tensor if self._mesh.sequence else 1)), _no_loss
            if self._mesh.sequence:
                hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
            return hidden, lambda output: self._visited(item, output, visit)

        iterators = [iter(work) for _ in self._chunks]
        interleaved = self._mesh.chunks > 1
        with torch.set_grad_enabled(learn):
            self._forward_backward(
                forward_step_func=step,
                data_iterator=iterators if interleaved else iterators[0],
                model=self._chunks if interleaved else self._chunks[0],
                num_microbatches=len(work),
                seq_length=rows,
                micro_batch_size=1,
                forward_only=not learn,
            )

    def _tokens(self, item: Item | None) -> torch.Tensor:
        """[B, T], of which T can be cut into equal parts where positions are."""
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self._device) if item is None else item[0].tokens
        missing = -tokens.shape[1] % self._mesh.tensor if self._mesh.sequence else 0
        return torch.nn.functional.pad(tokens, (0, missing))

    def _stage(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        """What this stage makes of a micro-batch: [T, B, H], of T only the rank's part with sequence parallelism."""
        height, width = tokens.shape
        embedded = None
        if model.pre_process:
            embedded = model.embedding(input_ids=tokens, position_ids=None)
        else:
            part = width // self._mesh.tensor if self._mesh.sequence else width
            received = model.decoder.input_tensor[: part * height]
            model.set_input_tensor(received.view(part, height, -1))
        later = torch.ones(width, width, dtype=torch.bool, device=tokens.device).triu(1)
        hidden: torch.Tensor = model.decoder(
            hidden_states=embedded,
            attention_mask=later[None, None],
            rotary_pos_emb=model.rotary_pos_emb(width),
        )
        return hidden

    def _visited(
        self, item: Item | None, output: torch.Tensor, visit: Visit
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        loss = None if item is None else visit(item, _predicting(output, item[0]))
        if loss is None or not loss.requires_grad:  # every micro-batch goes back through the stages
            loss = output.sum() * 0.0
        return loss, torch.ones((), dtype=torch.int, device=self._device), {}


def _predicting(hidden: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """[M, H] of [T, B, H]."""
    width = micro.tokens.shape[1]
    return hidden[micro.positions % width, micro.positions // width]


def _flattened(hidden: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, 1, H] of [T, B, H]."""
    flat = hidden.flatten(0, 1)
    return torch.nn.functional.pad(flat, (0, 0, 0, rows - len(flat)))[:, None].contiguous()


def _no_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    raise RuntimeError(f"a stage before the last one was asked for a loss of {tuple(output.shape)}")
