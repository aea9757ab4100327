"""Training with megatron-core over tensor x pipeline x data parallel ranks: NCCL where there are GPUs, gloo otherwise.

Invariant: from the same seed or files it starts from the same weights as the torch backend, and takes the same steps
to rounding, whatever the mesh. A replica of the model has its own trajectories (``sharing``); its last stage computes
their loss, each of the ranks that share a matrix the same one, from gathered logits. In sums over ranks everything
counts once: figures where they were visited, gradients of shards on their rank, of whole parameters on one.

Ranks meet at a file (no port is chosen, none can collide), and every collective has ``timeout_s``. megatron-core keeps
its groups in module globals: one backend a process at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from actors.policy import PolicyError
from actors.settings import TrainSettings
from actors.trainer.backends import megatron_compat
from actors.trainer.backends.common import Item, PolicyBackend, Visit
from actors.trainer.backends.megatron_convert import Shape, merge, rules, shape_of, split
from actors.trainer.backends.megatron_model import Mesh, build_chunks, gather_logits, named_parameters
from actors.trainer.backends.megatron_pipeline import Pipeline
from actors.trainer.backends.optimizer import MasterAdamW
from actors.trainer.backends.protocol import TrainBatch
from actors.trainer.backends.sharded_optimizer import ShardedAdamW
from actors.trainer.backends.sharing import share
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
        self._mesh = mesh = Mesh.of(settings)
        self._shape = shape_of(load_config(policy_dir))
        _check_divisible(self._shape, mesh)
        state = hf_state(build_model(policy_dir, seed=seed, dtype=dtype, from_scratch=from_scratch))
        self._whole = {name: tensor.shape for name, tensor in state.items()}
        device = _join(mesh, rank, world_size, rendezvous, timeout_s)
        chunks = [chunk.to(device) for chunk in build_chunks(self._shape, mesh, DTYPES[dtype], seed)]
        self._rules = {rule.megatron: rule for rule in rules(self._shape, stages=mesh.pipeline)}
        self._parameters = named_parameters(chunks)
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        own = [rule for rule in self._rules.values() if self._stage_of(rule.megatron) == self._stage]
        _fill(self._parameters, split(own, state, parallel_state.get_tensor_model_parallel_rank(), mesh.tensor))
        self._last = chunks[-1]
        self._pipeline = Pipeline(chunks, mesh, device)
        self._replica = parallel_state.get_data_parallel_rank()
        self._replicas = parallel_state.get_data_parallel_group()
        self._counts = self._stage == mesh.pipeline - 1 and parallel_state.get_tensor_model_parallel_rank() == 0
        super().__init__(
            settings=settings,
            vocabulary=self._shape.vocabulary,
            parameters=self._parameters,
            device=device,
            layout=Layout("megatron", rank, world_size, mesh.arrangement),
        )
        if DTYPES[dtype] != torch.float32:  # so that micro-batches add up in float32
            for parameter in self._parameters.values():
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _: self._optimizer.collect_gradients()
                )

    def _make_optimizer(self, parameters: Mapping[str, torch.nn.Parameter]) -> MasterAdamW:
        self._sharded = None
        if self._mesh.sharded:
            self._sharded = ShardedAdamW(parameters, self._settings, self._squared_norm, self._replicas)
        return self._sharded or MasterAdamW(parameters, self._settings, self._squared_norm)

    def _stage_of(self, name: str) -> int:
        """Which stage has a parameter."""
        if name.startswith("decoder.layers."):
            return self._mesh.stage_of(int(name.split(".")[2]), self._shape.layers)
        return 0 if name.startswith("embedding.") else self._mesh.pipeline - 1

    def _each(self, items: Iterable[Item], visit: Visit, *, learn: bool) -> None:
        self._pipeline.run(items, visit, learn=learn)

    def _head(self, hidden: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        logits = gather_logits(self._last, hidden)[:, : self._shape.vocabulary]
        return logits if token_ids is None else logits[:, token_ids]

    def _own(self, batch: TrainBatch) -> Collection[int]:
        return share(batch, self._mesh.data)[self._replica]

    def _sum(self, figures: np.ndarray) -> np.ndarray:
        return self._combined(figures if self._counts else np.zeros_like(figures), dist.ReduceOp.SUM)

    def _max(self, figures: np.ndarray) -> np.ndarray:
        return self._combined(figures, dist.ReduceOp.MAX)

    def _combined(self, figures: np.ndarray, how: dist.ReduceOp.RedOpType) -> np.ndarray:
        tensor = torch.from_numpy(figures).to(self._device, copy=True)
        dist.all_reduce(tensor, op=how)
        combined: np.ndarray = tensor.cpu().numpy()
        return combined

    def _reduce_gradients(self) -> None:
        gradients = self._optimizer.gradients() if self._sharded is None else self._sharded.whole_gradients()
        matrices = parallel_state.get_tensor_model_parallel_group()
        partial = [
            gradient
            for name, gradient in gradients.items()
            if self._rules[name].partial_gradient or (self._mesh.sequence and not self._rules[name].sharded)
        ]
        _sum_in_place(partial, matrices)
        if self._shape.tied and self._mesh.pipeline > 1 and self._stage in (0, self._mesh.pipeline - 1):
            name = "output_layer.weight" if self._stage else "embedding.word_embeddings.weight"
            dist.all_reduce(gradients[name], group=parallel_state.get_embedding_group())
        if self._sharded is None:
            _sum_in_place(list(gradients.values()), self._replicas)
        else:
            self._sharded.reduce()

    def _squared_norm(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        counted = [
            gradient
            for name, gradient in gradients.items()
            if not self._rules[name].copy and (first or self._rules[name].sharded)
        ]
        squares = torch.zeros((), device=self._device)
        if counted:
            squares = torch.stack(torch._foreach_norm(counted)).square().sum()
        dist.all_reduce(squares, group=parallel_state.get_model_parallel_group())
        if self._mesh.sharded:
            dist.all_reduce(squares, group=self._replicas)
        return squares

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See the protocol."""
        stages = parallel_state.get_pipeline_model_parallel_group()
        for name, rule in self._rules.items():
            if rule.copy:
                continue
            stage = self._stage_of(name)
            if stage == self._stage:
                local = self._parameters[name].detach()
                shards = [local]
                if rule.sharded and self._mesh.tensor > 1:
                    shards = [torch.empty_like(local) for _ in range(self._mesh.tensor)]
                    dist.all_gather(shards, local.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
                tensors = merge(rule, shards)
            else:
                dtype = next(iter(self._parameters.values())).dtype
                tensors = {hf: torch.empty(self._whole[hf], dtype=dtype) for hf in rule.hugging_face}
            for hf, tensor in tensors.items():
                whole = tensor.to(self._device).contiguous()
                if self._mesh.pipeline > 1:
                    dist.broadcast(whole, group=stages, group_src=stage)
                yield hf, whole.to("cpu", copy=True)

    def close(self) -> None:
        """See the protocol."""
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        megatron_compat.leave()


def _join(mesh: Mesh, rank: int, world_size: int, rendezvous: Path, timeout_s: float) -> torch.device:
    """Meet the other ranks and set up Megatron's groups; returns this rank's device."""
    if world_size != mesh.tensor * mesh.pipeline * mesh.data:
        raise PolicyError(f"{world_size} ranks are not {mesh.tensor} x {mesh.pipeline} x {mesh.data}")
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
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        virtual_pipeline_model_parallel_size=mesh.chunks if mesh.chunks > 1 else None,
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=False,
    )
    return device


def _sum_in_place(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Over the ranks of a group, in one message."""
    if not tensors or group.size() == 1:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _check_divisible(shape: Shape, mesh: Mesh) -> None:
    for name, number in (("key-value heads", shape.groups), ("intermediate size", shape.intermediate)):
        if number % mesh.tensor:
            raise PolicyError(
                f"tensor parallelism over {mesh.tensor} ranks does not divide the policy's {name} ({number})"
            )
    if shape.layers % (mesh.pipeline * mesh.chunks):
        raise PolicyError(
            f"{mesh.pipeline} stages of {mesh.chunks} chunks do not divide the policy's {shape.layers} layers"
        )


def _fill(parameters: Mapping[str, torch.nn.Parameter], shards: Mapping[str, torch.Tensor]) -> None:
    if parameters.keys() != shards.keys():
        odd = sorted(parameters.keys() ^ shards.keys())
        raise PolicyError(f"megatron-core's model has other parameters than the conversion knows: {odd}")
    with torch.no_grad():
        for name, shard in shards.items():
            if parameters[name].shape != shard.shape:
                raise PolicyError(f"{name}: shard {tuple(shard.shape)}, parameter {tuple(parameters[name].shape)}")
            parameters[name].copy_(shard)
