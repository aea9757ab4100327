"""The backends a trainer rank can run; the chosen one's libraries are imported only when it is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from actors.settings import TrainSettings

if TYPE_CHECKING:
    from actors.trainer.backends.protocol import Backend


def make_backend(
    policy_dir: Path,
    *,
    seed: int,
    settings: TrainSettings,
    dtype: str,
    from_scratch: bool,
    rank: int = 0,
    world_size: int = 1,
    rendezvous: Path | None = None,
    timeout_s: float = 120.0,
) -> Backend:
    """The backend that ``settings.backend`` names, for this rank.

    Sets the process's number of torch threads where ``settings.threads`` is a number. ``rendezvous`` is a path in the
    run directory that all ranks share, new for every start; ``timeout_s`` bounds meeting there and every collective
    (megatron only). Raises ``PolicyError`` for a policy that cannot be used, ``ValueError`` for an impossible layout.
    """
    import torch  # noqa: PLC0415 (the package stays importable without it)

    from actors.gpu_memory import keep_to_share  # noqa: PLC0415

    keep_to_share()

    if isinstance(settings.threads, int):
        torch.set_num_threads(settings.threads)
    if settings.backend == "torch":
        from actors.trainer.backends.torch_backend import TorchBackend  # noqa: PLC0415

        if world_size != 1:
            raise ValueError(f"the torch backend runs in one process, not in {world_size}; use train.backend=megatron")
        return TorchBackend(policy_dir, seed=seed, settings=settings, dtype=dtype, from_scratch=from_scratch)
    from actors.trainer.backends.megatron_backend import MegatronBackend  # noqa: PLC0415

    if rendezvous is None:
        raise ValueError("the megatron backend needs a rendezvous path that all its ranks share")
    return MegatronBackend(
        policy_dir,
        seed=seed,
        settings=settings,
        dtype=dtype,
        from_scratch=from_scratch,
        rank=rank,
        world_size=world_size,
        rendezvous=rendezvous,
        timeout_s=timeout_s,
    )
