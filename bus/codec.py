"""msgpack bodies with NumPy arrays: small ones inline, large ones as separate zero-copy frames.

Invariant: ``decode(encode(x)) == x`` for structs of the declared type, and no input, however malformed, does anything
but return a value of that type or raise ``DecodeError``. Array dtypes are limited to plain numbers, little-endian on
the wire. Other types with their elements in one piece of memory travel the same way once ``extend`` knows them, as
torch's tensors do (``actors.tensors``); in NumPy, bfloat16 and float8 are unsigned integers of their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from bus.message import DecodeError

T = TypeVar("T")
Frame = bytes | bytearray | memoryview

INLINE_BYTES = 2048
"""Arrays up to this size travel inside the body: below it a frame of their own costs more than the copy."""

MAX_BODY_BYTES = 1 << 28
"""Of what travels besides large arrays: decoded, it takes many times its size."""

_CODES = frozenset(["|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"])


class Extension(Protocol):
    """How values of one more type travel: as a code for the kind of element, a shape, and the elements' bytes."""

    def flatten(self, value: Any) -> tuple[str, list[int], np.ndarray]:
        """Code, shape, and the bytes in a flat array, not copied where they lie in order already. Raises ``TypeError``
        for what cannot travel."""

    def restore(self, code: str, shape: list[int], data: Frame) -> Any:
        """The value, in the memory of ``data`` where that is writable and so this message's own. Raises ``ValueError``
        or ``LookupError`` for what is malformed; each of ``shape`` is an integer from 0 on."""


_extensions: dict[type, Extension] = {}


def extend(type_: type, extension: Extension) -> None:
    """Let values of a type, and of those derived from it, travel in messages; they arrive as that type, where it is
    declared."""
    _extensions[type_] = extension


class Encoder:
    """Turns structs into frames. Not thread-safe: one per event loop."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._encode = msgspec.msgpack.Encoder(enc_hook=self._array).encode

    def encode(self, value: Any) -> list[Frame]:
        """Body first, then the large arrays' buffers (views, not copies: leave them unchanged until sent). Raises
        ``TypeError`` for what cannot travel, ``ValueError`` for what is too large."""
        try:
            body = self._encode(value)
            if len(body) > MAX_BODY_BYTES:
                raise ValueError(
                    f"a {type(value).__name__} of {len(body)} bytes besides its large arrays: "
                    f"at most {MAX_BODY_BYTES} travel in one message"
                )
            return [body, *self._frames] if self._frames else [body]
        except RecursionError:
            raise TypeError(f"cannot put a {type(value).__name__} in a message: it is nested too deeply") from None
        finally:
            if self._frames:
                self._frames = []

    def _array(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            code, shape, flat = _flatten(value)
        else:
            code, shape, flat = _extension_for(value).flatten(value)
        if flat.nbytes <= INLINE_BYTES:
            return [code, shape, flat.tobytes()]
        self._frames.append(flat.data.cast("B"))
        return [code, shape, len(self._frames) - 1]


def _flatten(array: np.ndarray) -> tuple[str, list[int], np.ndarray]:
    code = array.dtype.newbyteorder("<").str
    if code not in _CODES:
        raise TypeError(f"cannot put an array of {array.dtype} in a message: only plain numbers travel")
    return code, list(array.shape), np.ascontiguousarray(array, dtype=code).reshape(-1)


def _extension_for(value: Any) -> Extension:
    type_ = type(value)
    for kind in type_.__mro__:
        if kind in _extensions:
            return _extensions[kind]
    hint = ": import actors.tensors, and it travels" if type_.__module__.partition(".")[0] == "torch" else ""
    raise TypeError(f"cannot put a {type_.__name__} in a message{hint}")


class Decoder(Generic[T]):
    """Turns frames back into a struct of one declared type. Not thread-safe."""

    def __init__(self, type_: type[T] | Any) -> None:
        self.type = type_
        self._frames: Sequence[Frame] = ()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(type_, dec_hook=self._array)

    def decode(self, frames: Sequence[Frame]) -> T:
        """Arrays are read-only views of their frames; what ``extend`` has added may be writable ones. Raises
        ``DecodeError``."""
        if frames and len(frames[0]) > MAX_BODY_BYTES:
            raise DecodeError(f"malformed message body: {len(frames[0])} bytes, expected at most {MAX_BODY_BYTES}")
        self._frames = frames[1:]
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise DecodeError(f"malformed message body: {error}") from None
        finally:
            self._frames = ()

    def _array(self, type_: type[Any], value: Any) -> Any:
        extension = _extensions.get(type_)
        if type_ is not np.ndarray and extension is None:
            raise TypeError(f"messages hold no {type_}")
        code, shape, data = value
        if not isinstance(code, str):
            raise ValueError("array of no type")
        if not (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)):
            raise ValueError("array with a malformed shape")
        if type(data) is int:
            if not 0 <= data < len(self._frames):
                raise ValueError(f"array frame {data} of {len(self._frames)}")
            data = self._frames[data]
        if extension is not None:
            return extension.restore(code, shape, data)
        if code not in _CODES:
            raise ValueError("array of a type that does not travel")
        return np.frombuffer(memoryview(data).toreadonly(), dtype=code).reshape(shape)


def dumps(value: Any) -> bytes:
    """One self-contained blob (for files): frames with their lengths."""
    frames = Encoder().encode(value)
    return msgspec.msgpack.encode([bytes(frame) for frame in frames])


def loads(blob: Frame, type_: type[T]) -> T:
    """Inverse of ``dumps``. Raises ``DecodeError``."""
    try:
        frames = msgspec.msgpack.decode(blob, type=list[bytes])
    except msgspec.MsgspecError as error:
        raise DecodeError(f"malformed blob: {error}") from None
    if not frames:
        raise DecodeError("malformed blob: no frames")
    return Decoder(type_).decode(frames)
