"""An object's owner, as other nodes see it: it lends, and counts who has borrowed.

Invariant: what is lent stays as it is until it is given back, or for ``TERM_S`` after the borrower last said that it
still reads, or until the borrower's node is known to be gone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
import numpy as np

from actors.core.typed import Message
from bus.message import NodeAddress
from bus.objects.handle import Layout, ObjectError, ObjectGone, ObjectStoreFull, Place
from bus.objects.leases import Key
from bus.objects.memory import SHARED_FROM_BYTES
from bus.objects.store import ObjectStore

TERM_S = 30.0
"""How long a borrower may be silent."""

PIECE_BYTES = 4 << 20


class Lent(msgspec.Struct, frozen=True):
    """An object, or why there is none."""

    refusal: str = ""
    gone: bool = False  # it was, but is no more
    type: str = ""
    layout: Layout = Layout(())
    content: bytes = b""  # of a small one, which then is not borrowed
    place: Place | None = None  # for other processes of its machine


class Borrow(Message[Lent], frozen=True):
    """Let a node read an object (``reads``), or just keep it."""

    object: int
    borrower: NodeAddress
    lease: int  # the borrower's number for it
    reads: bool


class GiveBack(msgspec.Struct, frozen=True):
    """A lease is not needed any more."""

    borrower: NodeAddress
    lease: int


class Renewed(msgspec.Struct, frozen=True):
    """Which leases had ended already."""

    ended: list[int]


class RenewLeases(Message[Renewed], frozen=True):
    """They are still needed."""

    borrower: NodeAddress
    leases: list[int]


class ObjectPiece(msgspec.Struct, frozen=True):
    """Some bytes of an object."""

    offset: int
    data: np.ndarray  # uint8


class FetchObject(Message[ObjectPiece], frozen=True):
    """Ask for the bytes of a borrowed object, as a stream."""

    borrower: NodeAddress
    lease: int


class Lender:
    """See the module docstring."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def lend(self, message: Borrow) -> Lent:
        """What comes of it is an answer, not an error: a handle that outlived its object is nothing unusual."""
        key = _key(message.borrower, message.lease)
        try:
            if not message.reads:
                self._store.hold_for(message.object, key, TERM_S)
                return Lent()
            stored, _ = await self._store.read(message.object, key, term_s=TERM_S)
        except ObjectGone as error:
            return Lent(str(error), gone=True)
        except ObjectStoreFull as error:
            return Lent(str(error))
        content = stored.content
        if len(content) < SHARED_FROM_BYTES:
            lent = Lent(type=stored.type, layout=stored.layout, content=bytes(content))
            self._store.give_back(key)
            return lent
        place = None if stored.segment is None else stored.segment.place
        return Lent(type=stored.type, layout=stored.layout, place=place)

    async def pieces(self, message: FetchObject) -> AsyncGenerator[ObjectPiece, None]:
        """Raises ``ObjectError`` where the lease does not last."""
        key = _key(message.borrower, message.lease)
        offset = 0
        while True:
            stored = self._store.lent(key)
            if stored is None:
                raise ObjectError(f"lease {message.lease} of node {message.borrower.name} has ended")
            piece = stored.content[offset : offset + PIECE_BYTES]
            if not piece:
                return
            yield ObjectPiece(offset, np.frombuffer(piece, np.uint8))
            offset += len(piece)

    def give_back(self, message: GiveBack) -> None:
        self._store.give_back(_key(message.borrower, message.lease))

    def renew(self, message: RenewLeases) -> Renewed:
        leases = message.leases
        return Renewed([lease for lease in leases if not self._store.renew(_key(message.borrower, lease))])


def _key(borrower: NodeAddress, lease: int) -> Key:
    return borrower.name, borrower.epoch, lease
