"""Training with megatron-core, tensor-parallel over all ranks: NCCL where there are GPUs, gloo on CPUs otherwise.

Invariant: from the same seed or files it starts from the same weights as the torch backend, and takes the same steps
to rounding. Every rank computes the same loss from gathered logits; a shard's gradient is the rank's own, a whole
parameter's is the same on every rank, and in the norm each counts once.

Ranks meet at a file (no port is chosen, none can collide), and every collective has ``timeout_s``. megatron-core keeps
its groups in module globals: one backend a process at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actors.policy import PolicyError
from actors.settings import TrainSettings
from actors.trainer.backends import megatron_compat
from actors.trainer.backends.common import PolicyBackend
from actors.trainer.backends.megatron_convert import Shape, merge, rules, shape_of, split
from actors.trainer.backends.megatron_model import build_gpt, gather_logits
from actors.trainer.checkpointing import Layout
from actors.trainer.model import DTYPES, build_model, hf_state, load_config


class MegatronBackend(PolicyBackend):
    """See ``actors.trainer.backends.protocol.Backend``; all methods are collective.

    ``rendezvous`` is a path that all ranks share and that no earlier start has used. Raises ``PolicyError``.
    """

    def __init__(
        self,
        policy_dir: Path,
        *,
        seed: int,
        settings: TrainSettings,
        dtype: str,
        from_scratch: bool,
        rank: int,
        world_size: int,
        rendezvous: Path,
        timeout_s: float = 120.0,
    ) -> None:
        self._shape = shape_of(load_config(policy_dir))
        _check_divisible(self._shape, world_size)
        whole = build_model(policy_dir, seed=seed, dtype=dtype, from_scratch=from_scratch)
        self._rank, self._world_size = rank, world_size
        device = _join(rank, world_size, rendezvous, timeout_s)
        self._model = build_gpt(self._shape, world_size, DTYPES[dtype], seed).to(device)
        self._rules = rules(self._shape)
        parameters = dict(self._model.named_parameters())
        _fill(parameters, split(self._shape, hf_state(whole), rank, world_size))
        self._sharded = {rule.megatron for rule in self._rules if rule.sharded}
        super().__init__(
            settings=settings,
            vocabulary=self._shape.vocabulary,
            parameters=parameters,
            device=device,
            layout=Layout(backend="megatron", rank=rank, world_size=world_size),
            squared_norm=self._squared_norm,
        )

    def _hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        megatron_compat.enter()
        width = tokens.shape[1]
        model: Any = self._model
        embedded = model.embedding(input_ids=tokens, position_ids=None)
        later = torch.ones(width, width, dtype=torch.bool, device=tokens.device).triu(1)
        hidden: torch.Tensor = model.decoder(
            hidden_states=embedded,
            attention_mask=later[None, None],
            rotary_pos_emb=model.rotary_pos_emb(width),
        )
        # Megatron's order is [T, B, H].
        return hidden[positions % width, positions // width]

    def _head(self, hidden: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        logits = gather_logits(self._model, hidden)[:, : self._shape.vocabulary]
        return logits if token_ids is None else logits[:, token_ids]

    def _reduce_gradients(self) -> None:
        gradients = self._optimizer.gradients()
        for rule in self._rules:
            if rule.partial_gradient and self._world_size > 1:
                dist.all_reduce(gradients[rule.megatron])

    def _squared_norm(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        def squares(sharded: bool) -> torch.Tensor:
            chosen = [g for name, g in gradients.items() if (name in self._sharded) == sharded]
            return torch.stack(torch._foreach_norm(chosen)).square().sum()

        of_shards = squares(True)
        dist.all_reduce(of_shards)
        return of_shards + squares(False)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See the protocol."""
        parameters = dict(self._model.named_parameters())
        for rule in self._rules:
            local = parameters[rule.megatron].detach()
            shards = [local]
            if rule.sharded and self._world_size > 1:
                shards = [torch.empty_like(local) for _ in range(self._world_size)]
                dist.all_gather(shards, local.contiguous())
            for name, tensor in merge(rule, shards).items():
                yield name, tensor.to("cpu", copy=True).contiguous()

    def close(self) -> None:
        """See the protocol."""
        from megatron.core import parallel_state  # noqa: PLC0415

        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        megatron_compat.leave()


def _join(rank: int, world_size: int, rendezvous: Path, timeout_s: float) -> torch.device:
    """Meet the other ranks and set up Megatron's groups; returns this rank's device."""
    from megatron.core import parallel_state  # noqa: PLC0415

    megatron_compat.enter()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{rendezvous.resolve()}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    return device


def _check_divisible(shape: Shape, ranks: int) -> None:
    for name, number in (("key-value heads", shape.groups), ("intermediate size", shape.intermediate)):
        if number % ranks:
            raise PolicyError(f"tensor parallelism over {ranks} ranks does not divide the policy's {name} ({number})")


def _fill(parameters: Mapping[str, torch.nn.Parameter], shards: Mapping[str, torch.Tensor]) -> None:
    if parameters.keys() != shards.keys():
        odd = sorted(parameters.keys() ^ shards.keys())
        raise PolicyError(f"megatron-core's model has other parameters than the conversion knows: {odd}")
    with torch.no_grad():
        for name, shard in shards.items():
            if parameters[name].shape != shard.shape:
                raise PolicyError(f"{name}: shard {tuple(shard.shape)}, parameter {tuple(parameters[name].shape)}")
            parameters[name].copy_(shard)
