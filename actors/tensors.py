"""Torch's tensors in messages: import this module, declare a field as ``Tensor``, and send.

    class Update(msgspec.Struct):
        name: str
        weights: Tensor          # bfloat16 and float8 too

Invariant: a tensor arrives with the type, shape and bits it had. Neither side copies a large one on the bulk lane: it
is sent from the memory in which it lies (leave it unchanged until it has been sent), and received in the memory of its
frame, which is the receiver's own, so that it may be changed in place. Within a node a message is handed over as it is,
and both ends share its tensors.

What travels are values on the CPU: of one that requires a gradient without its graph, of a view in its order. A tensor
elsewhere, or of another layout, is refused where it is sent: to bring it into that form takes a copy, which is its
owner's to make.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bus.codec import Frame, extend

__all__ = ["Tensor"]

_CODES: dict[torch.dtype, str] = {
    torch.bool: "|b1",
    torch.int8: "|i1",
    torch.int16: "<i2",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.uint8: "|u1",
    torch.uint16: "<u2",
    torch.uint32: "<u4",
    torch.uint64: "<u8",
    torch.float16: "<f2",
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
"""Those that NumPy knows travel as its arrays do."""

_DTYPES = {code: dtype for dtype, code in _CODES.items()}

_BITS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}
"""Types of NumPy's for elements of so many bytes, whatever they mean to torch."""


class _Tensors:
    """See ``bus.codec.Extension``."""

    def flatten(self, value: Tensor) -> tuple[str, list[int], np.ndarray]:
        if type(value) not in (Tensor, torch.nn.Parameter):
            kind = type(value).__name__
            raise TypeError(
                f"cannot put a {kind} in a message: only plain tensors travel, not what is derived from them"
            )
        if value.device.type != "cpu":
            raise TypeError(f"cannot put a tensor on {value.device} in a message: bring it to the CPU first (.cpu())")
        if value.layout is not torch.strided or value.is_quantized:
            layout = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
            raise TypeError(f"cannot put a {layout} tensor in a message: only dense ones travel (.to_dense())")
        code = _CODES.get(value.dtype)
        if code is None:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _CODES)
            raise TypeError(f"cannot put a tensor of {value.dtype} in a message: what travels is {known}")
        flat = value.detach().resolve_neg().reshape(-1).contiguous()
        return code, list(value.shape), flat.view(torch.uint8).numpy()

    def restore(self, code: str, shape: list[int], data: Frame) -> Tensor:
        dtype = _DTYPES[code]
        bits = np.frombuffer(data, _BITS[dtype.itemsize])
        bits.reshape(shape)  # raises where they do not fit each other
        if not (bits.flags.writeable and bits.flags.aligned):  # torch knows no tensor that must not be changed
            bits = bits.copy()
        if dtype is torch.bool and bits.size and bits.max() > 1:
            raise ValueError("a tensor of truth values that are neither")
        return torch.from_numpy(bits).view(dtype).view(shape)


extend(Tensor, _Tensors())
