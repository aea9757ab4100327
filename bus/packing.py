"""A small message's frames in one: ZeroMQ's work for a part of its own is more than the copy.

Invariant: what comes out is what went in, and what was not packed comes out as no message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from bus.codec import Frame

PACKED_BYTES = 8_192
PACKED_FRAMES = 8
"""A message of at most so many bytes and frames is packed; so is one of a single frame, of any size, so that a message
of one part on the wire is always packed."""

_HEADS = [struct.Struct(f"<B{count}I") for count in range(PACKED_FRAMES + 1)]
_PAIR = _HEADS[2]
_PAIR_BYTES = _PAIR.size

HEAD_BYTES = _HEADS[-1].size
"""What packing adds at most."""


def packed(frames: Sequence[Frame]) -> bytes | None:
    """Frames in one: their number, their sizes, then they themselves; None for those that travel as they are."""
    if len(frames) == 2:  # a header and a body, as nearly all are
        first, second = frames
        size, rest = len(first), len(second)
        return b"".join((_PAIR.pack(2, size, rest), first, second)) if size + rest <= PACKED_BYTES else None
    if len(frames) > PACKED_FRAMES:
        return None
    sizes = list(map(len, frames))
    if sum(sizes) > PACKED_BYTES and len(sizes) > 1:
        return None
    return b"".join((_HEADS[len(sizes)].pack(len(sizes), *sizes), *frames))


def unpacked(part: Frame) -> list[Frame]:
    """Inverse of ``packed``; empty for what is not."""
    length = len(part)
    count = part[0] if length else 0
    if count == 2 and length >= _PAIR_BYTES:
        _, size, rest = _PAIR.unpack_from(part)
        end: int = _PAIR_BYTES + size
        return [part[_PAIR_BYTES:end], part[end:]] if end + rest == length else []
    if not 0 < count <= PACKED_FRAMES or length < _HEADS[count].size:
        return []
    start = _HEADS[count].size
    frames: list[Frame] = []
    for size in _HEADS[count].unpack_from(part)[1:]:
        frames.append(part[start : start + size])
        start += size
    return frames if start == length else []
