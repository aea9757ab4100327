"""What travels instead of an object: its handle, the layout of its bytes, and the errors that fetching it can end in.

Invariant: a handle is a name and no right. Whatever it says is checked against what the object's owner says, so that a
garbled or forged one is an error and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic

import msgspec

from bus.codec import Frame
from bus.message import BusError, NodeAddress
from bus.objects.host import Host

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")

ALIGNMENT = 64
"""Of every frame within an object: a cache line, and more than any number needs."""

Bytes = Annotated[int, msgspec.Meta(ge=0)]


class ObjectError(BusError):
    """An object cannot be had: its handle is false, or what came is not what was put."""


class ObjectGone(ObjectError):
    """The object is no more; the message says why (released, its lease has expired, its owner closed or died, ...)."""


class ObjectStoreFull(ObjectError):
    """There is no room for an object, neither in memory nor on disk; the message says what takes it up."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where other processes of its machine find a piece of a process's memory."""

    descriptor: int
    inode: int
    capacity: Bytes


class Object(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """A handle: small, and fit to travel in messages. ``Object[T]`` says, for people and type checkers, of what; on the
    wire, and when compared, it is an owner and a number."""

    owner: NodeAddress  # the node that it was put on, which keeps its bytes
    id: int  # never given twice by one incarnation of a node
    size: Bytes
    type: str  # name of the value's type, as in a message's header
    host: Host | None = None  # its owner's process, where that shares its memory
    place: Place | None = None  # where it was put, for other processes of that machine

    def __str__(self) -> str:
        return f"object {self.id} of {self.owner.name} ({self.type}, {self.size} bytes)"


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Where in an object's bytes its frames are: one after the other, each aligned."""

    sizes: tuple[Bytes, ...]
    raw: bool = False  # the only frame is the value itself, which was bytes

    @property
    def span(self) -> int:
        """Bytes in all, with what is between the frames."""
        return sum(map(aligned, self.sizes))

    def offsets(self) -> list[int]:
        found, offset = [], 0
        for size in self.sizes:
            found.append(offset)
            offset += aligned(size)
        return found

    def frames(self, content: memoryview) -> list[Frame]:
        """Views of an object's bytes. Raises ``ObjectError`` where they are too few."""
        if len(content) < self.span:
            raise ObjectError(f"an object of {len(content)} bytes, expected {self.span}")
        return [content[offset : offset + size] for offset, size in zip(self.offsets(), self.sizes, strict=True)]


def layout_of(frames: Sequence[Frame], *, raw: bool = False) -> Layout:
    return Layout(tuple(len(frame) for frame in frames), raw)


def aligned(size: int) -> int:
    """Rounded up."""
    return -(-size // ALIGNMENT) * ALIGNMENT
