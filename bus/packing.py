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

HEAD_BYTES = _HEADS[-1].size
"""What packing adds at most."""


def is_small(sizes: Sequence[int]) -> bool:
    """Whether frames of these sizes travel packed."""
    return len(sizes) == 1 or (len(sizes) <= PACKED_FRAMES and sum(sizes) <= PACKED_BYTES)


def packed(frames: Sequence[Frame], sizes: Sequence[int]) -> bytes:
    """At most ``PACKED_FRAMES`` frames: their number, their sizes, then they themselves."""
    return b"".join((_HEADS[len(frames)].pack(len(frames), *sizes), *frames))


def unpacked(part: Frame) -> list[Frame]:
    """Inverse of ``packed``; empty for what is not."""
    count = part[0] if len(part) else 0
    if not 0 < count <= PACKED_FRAMES or len(part) < _HEADS[count].size:
        return []
    start = _HEADS[count].size
    frames: list[Frame] = []
    for size in _HEADS[count].unpack_from(part)[1:]:
        frames.append(part[start : start + size])
        start += size
    return frames if start == len(part) else []
