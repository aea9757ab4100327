"""One object on its owner's node: what it is, and where its bytes are."""

from __future__ import annotations

import asyncio

from bus.objects.handle import Layout
from bus.objects.image import Head, encode_head, frames_at
from bus.objects.memory import Segment


class Stored:
    """One object."""

    __slots__ = ("checksum", "head", "id", "layout", "moving", "segment", "size", "start", "type")

    def __init__(self, id_: int, type_: str, layout: Layout) -> None:
        self.id = id_
        self.type = type_
        self.layout = layout
        self.size = sum(layout.sizes)
        self.head = encode_head(Head(type_, layout))
        self.start = frames_at(self.head)  # of its frames, in its segment
        self.segment: Segment | None = None  # None: on disk only
        self.checksum: int | None = None  # of its file; None: there is none
        self.moving: asyncio.Task[None] | None = None  # to disk or back

    @property
    def room(self) -> int:
        """Bytes of memory that it needs."""
        return self.start + self.layout.span

    @property
    def content(self) -> memoryview:
        """Its frames' bytes; empty where they are on disk."""
        return memoryview(b"") if self.segment is None else self.frames_in(self.segment).toreadonly()

    def frames_in(self, segment: Segment) -> memoryview:
        return segment.view[self.start : self.room]
