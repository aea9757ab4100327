"""Lets megatron-core run without a GPU; inert where CUDA is available.

Invariant: with CUDA nothing is changed. Without it, every place where megatron-core takes a CUDA device or CUDA's
random state for granted meets the CPU's instead, and nothing else is affected: other code that asks torch for CUDA
still learns that there is none.

megatron-core calls ``torch.cuda.current_device`` for the device of its buffers, keeps random states by CUDA functions,
and writes ``device="cuda"`` and ``.cuda()`` in a few places. The last are rewritten by a ``TorchFunctionMode``, which
is per thread: call ``enter`` once in each thread that runs the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_entered = threading.local()


def enter() -> None:
    """Prepare this process, and this thread, for megatron-core; repeated calls do nothing."""
    if torch.cuda.is_available() or getattr(_entered, "mode", None) is not None:
        return
    _redirect_cuda()
    _entered.mode = _OnTheCpu()
    _entered.mode.__enter__()


def leave() -> None:
    """Undo ``enter`` for this thread's tensors."""
    mode = getattr(_entered, "mode", None)
    if mode is not None:
        mode.__exit__(None, None, None)
        _entered.mode = None


class _OnTheCpu(TorchFunctionMode):
    """Rewrites a literal CUDA device to the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **(kwargs or {}))


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _redirect_cuda() -> None:
    """Point the functions that megatron-core calls unconditionally at the CPU's."""
    from megatron.core.tensor_parallel import random  # noqa: PLC0415 (only where it is patched)

    def get_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.manual_seed(value)

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.get_rng_state = get_state
    cuda.set_rng_state = set_state
    cuda.manual_seed = seed
    cuda.synchronize = nothing
    cuda.current_stream = nothing
    module: Any = random
    module._get_cuda_rng_state = get_state
    module._set_cuda_rng_state = set_state
