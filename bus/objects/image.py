"""How an object lies in its segment, so that other processes can read it without asking anybody.

    label (64 bytes: magic, epoch of the owner's node, number of the object, size of the head) | head | frames

Invariant: a segment is labelled only while it holds all of the object that the label names; the label is written last
and wiped first. A reader locks the segment, then looks at the label, then reads; an owner wipes the label, then sees
whether the segment is locked, and only if not uses it again. So nobody reads a mixture, and of an object that is gone
nobody begins to read.
"""

from __future__ import annotations

import struct

import msgspec

from bus.objects.handle import ALIGNMENT, Layout, aligned

MAGIC = b"rollart1"
LABEL_BYTES = ALIGNMENT

_LABEL = struct.Struct("<8sqqq")
_NONE = bytes(_LABEL.size)


class Head(msgspec.Struct, frozen=True, array_like=True):
    """What an object is."""

    type: str
    layout: Layout


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Head).decode


def encode_head(head: Head) -> bytes:
    return _encode(head)


def frames_at(head: bytes) -> int:
    """Where an object's frames begin."""
    return LABEL_BYTES + aligned(len(head))


def write_label(view: memoryview, epoch: int, id_: int, head: bytes) -> None:
    """The frames are all there."""
    view[LABEL_BYTES : LABEL_BYTES + len(head)] = head
    view[: _LABEL.size] = _LABEL.pack(MAGIC, epoch, id_, len(head))


def wipe_label(view: memoryview) -> None:
    view[: _LABEL.size] = _NONE


def read_image(view: memoryview, epoch: int, id_: int) -> tuple[Head, memoryview] | None:
    """What an object is, and its frames' bytes, read-only; None where this segment does not hold it (any more)."""
    if len(view) < LABEL_BYTES:
        return None
    magic, found_epoch, found_id, size = _LABEL.unpack_from(view)
    if (magic, found_epoch, found_id) != (MAGIC, epoch, id_) or not 0 < size <= len(view) - LABEL_BYTES:
        return None
    try:
        head = _decode(view[LABEL_BYTES : LABEL_BYTES + size])
    except msgspec.MsgspecError:
        return None
    start = LABEL_BYTES + aligned(size)
    span = head.layout.span
    if start + span > len(view):
        return None
    return head, view[start : start + span].toreadonly()
