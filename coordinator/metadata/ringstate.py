"""The ring as all clients must see it: an entry on the home ensemble, and what follows from it.

Invariant: of one state each placement prefix has one holder, or, while it moves, none; and between two holders it has
had none.

A change of the ring goes round the circle. The circle is cut into 2^32 slots; ``done`` is how far it has come: a prefix
below it is where the new ring puts it, one above ``frozen`` where the old ring does, and one between the two that the
rings put in different places is moving.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from actors.core.ring import Ring, point_of
from actors.formats import RING, FormatRefused
from coordinator.metadata.protocol import StoreError

RING_PATH = "/ring"
"""On the home ensemble."""
FENCE_PATH = "/ring-fence"
"""On every ensemble."""
HOME = "0"
SLOTS = 1 << 32
VNODES = 1024


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An ensemble. Its id is what is hashed, so it may change its addresses; an id is never given twice."""

    id: str
    hosts: str


class RingState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Content of ``/ring``. What other software does not know may be left out or refused, but never passed over: all
    clients must see the same ring."""

    epoch: int
    members: tuple[Member, ...]  # all that hold something, home first
    ring: tuple[str, ...]  # ids
    next_id: int
    before: tuple[str, ...] = ()  # the ring that is being left; empty: nothing moves
    done: int = 0
    frozen: int = 0
    vnodes: int = VNODES
    format: int = RING.oldest

    def hosts(self, shard: str) -> str:
        return next(member.hosts for member in self.members if member.id == shard)


class _Format(msgspec.Struct, frozen=True):
    """What can be read of every format, past and future."""

    format: int = RING.oldest


class Fence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of ``/ring-fence``: who reads an epoch here that it does not know yet knows too little to go on."""

    shard: str
    epoch: int
    retired: bool = False


@lru_cache(maxsize=8)
def _ring(shards: tuple[str, ...], vnodes: int) -> Ring:
    return Ring(shards, vnodes)


def slot_of(key: str) -> int:
    return point_of(key) >> 32


def holder(state: RingState, key: str) -> str | None:
    """The shard that holds a placement prefix; None while it moves."""
    move = moves(state, key)
    if move is None or slot_of(key) < state.done:
        return _ring(state.ring, state.vnodes).owner(key)
    return None if slot_of(key) < state.frozen else move[0]


def source(state: RingState, key: str) -> str:
    """Where a placement prefix is, or where it is moving from."""
    move = moves(state, key)
    if move is None or slot_of(key) < state.done:
        return _ring(state.ring, state.vnodes).owner(key)
    return move[0]


def moves(state: RingState, key: str) -> tuple[str, str] | None:
    """From where to where a change of the ring that is under way takes a placement prefix, be it done or to come."""
    if not state.before:
        return None
    old, new = _ring(state.before, state.vnodes).owner(key), _ring(state.ring, state.vnodes).owner(key)
    return None if old == new else (old, new)


def is_moving(state: RingState, key: str) -> bool:
    """Whether a placement prefix is on its way just now."""
    return moves(state, key) is not None and state.done <= slot_of(key) < state.frozen


def decode_ring(value: bytes) -> RingState:
    """Raises ``StoreError``."""
    try:
        RING.check(msgspec.json.decode(value, type=_Format).format, RING_PATH)
        return msgspec.json.decode(value, type=RingState)
    except FormatRefused as error:
        raise StoreError(str(error)) from None
    except msgspec.MsgspecError as error:
        raise StoreError(f"{RING_PATH}: expected a ring of this version, found {_shown(value)} ({error})") from None


def decode_fence(value: bytes) -> Fence:
    """Raises ``StoreError``."""
    try:
        return msgspec.json.decode(value, type=Fence)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{FENCE_PATH}: expected a fence of this version, found {_shown(value)} ({error})") from None


def _shown(value: bytes) -> str:
    return value[:200].decode(errors="replace")
