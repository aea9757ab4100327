"""Takes an ensemble out of the ring that is lost for good, and says what went with it.

    check    it does not answer, and is not the home ensemble
    name     the lost prefixes, in ``/ring-lost-names/<shard>``: they may be more than one step can hold
    stop     the next epoch, fences on all others: whoever moved something is stopped, what stood still goes back
    clear    what a change that was under way has left of the lost prefixes on others
    go on    the ring without it, and the mark ``/ring-lost/<shard>``, in one step; fences

Invariant: what the others hold stays where it is and as it is (a ring without a shard places only that one's prefixes
elsewhere), and every prefix that the lost one held is named and empty, until somebody tells it again: owners make
their ephemeral entries anew (``adopting``), the leader of a run what it has told (``facts``).

What cannot be done is to raise the fence of an ensemble that is gone. Should it come back, nobody asks it who has heard
of the new ring, and it does not get into a ring before it was emptied. Only a client that all the while reaches it and
not the home ensemble could still change something there, for as long as its session at home is not known to be over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from coordinator.metadata.copying import Copier
from coordinator.metadata.protocol import MAX_VALUE_BYTES, Create, MetadataStore, StoreError
from coordinator.metadata.ringclient import RingClient
from coordinator.metadata.ringindex import PrefixIndex
from coordinator.metadata.ringstate import HOME, RingState, source
from coordinator.metadata.ringwriter import RingLock, RingWriter

log = logging.getLogger(__name__)

LOST_PATH = "/ring-lost"
"""On the home ensemble; below it an entry for each shard that was lost."""
NAMES_PATH = "/ring-lost-names"
"""Likewise; below each shard's entry the names of its prefixes, in as many pieces as they need."""
CLOSE_S = 5.0


class Abandoned(msgspec.Struct, frozen=True):
    """Content of ``/ring-lost/<shard>``; as an answer with the names, too."""

    shard: str
    hosts: str
    epoch: int  # of the ring without it
    lost: int  # prefixes
    prefixes: list[str] = []  # their names: ``job`` or ``job/node``
    unfinished: bool = False  # another change of the ring waits to be resumed


async def abandon(ring: RingClient, shard: str) -> Abandoned:
    """``ring`` was opened without that shard. Raises ``StoreError`` where it answers."""
    writer = RingWriter(ring)
    async with RingLock(ring):
        state, version = await writer.read()
        hosts = await _checked(ring, state, shard)
        lost = [key for key in await PrefixIndex(ring.home).all() if source(state, key) == shard]
        await _name(ring.home, shard, lost)
        stopped, version = await writer.publish(msgspec.structs.replace(state, frozen=state.done), version)
        others = tuple(member for member in stopped.members if member.id != shard)
        guards = await writer.raise_fences(msgspec.structs.replace(stopped, members=others))
        await Copier(ring.stores, msgspec.structs.replace(stopped, members=others), guards).clear_keys(lost)
        left = _without(stopped, shard)
        mark = Abandoned(shard, hosts, left.epoch + 1, len(lost), unfinished=bool(left.before))
        left, _ = await writer.publish(left, version, [Create(f"{LOST_PATH}/{shard}", msgspec.json.encode(mark))])
        await writer.raise_fences(left)
        return msgspec.structs.replace(mark, prefixes=lost)


async def _checked(ring: RingClient, state: RingState, shard: str) -> str:
    """Its servers, none of which answers."""
    if shard == HOME:
        raise StoreError("shard 0 is the home ensemble: without it there is no ring; bring it back from its disks")
    hosts = next((member.hosts for member in state.members if member.id == shard), None)
    if hosts is None:
        raise StoreError(f"shard {shard}: not in the ring, which has {', '.join(state.ring)}")
    try:
        store = await ring.connect(hosts)
    except StoreError as error:
        log.info("shard %s is taken for lost: %s", shard, error)
        return hosts
    with suppress(StoreError, TimeoutError):
        await asyncio.wait_for(store.close(), CLOSE_S)
    raise StoreError(f"shard {shard} ({hosts}) answers: remove it without --dead, which moves what it holds")


def _without(state: RingState, shard: str) -> RingState:
    """The ring when that shard is gone. A change that was to add or remove it has come to its end with that."""
    ring = tuple(other for other in state.ring if other != shard)
    before = tuple(other for other in state.before if other != shard)
    before = () if before == ring else before
    done = state.done if before else 0
    members = tuple(member for member in state.members if member.id != shard)
    return msgspec.structs.replace(state, members=members, ring=ring, before=before, done=done, frozen=done)


async def _name(home: MetadataStore, shard: str, lost: Sequence[str]) -> None:
    """What an earlier attempt has left is replaced."""
    path = f"{NAMES_PATH}/{shard}"
    for old in await home.children(path):
        await home.delete(f"{path}/{old}")
    for number, value in enumerate(_pieces(lost)):
        await home.create(f"{path}/{number}", value)


def _pieces(names: Sequence[str]) -> Iterator[bytes]:
    """Lists of names, each of which a store takes."""
    together: list[str] = []
    size = 0
    for name in names:
        bytes_ = len(msgspec.json.encode(name)) + 1
        if together and size + bytes_ >= MAX_VALUE_BYTES:
            yield msgspec.json.encode(together)
            together, size = [], 0
        together.append(name)
        size += bytes_
    if together:
        yield msgspec.json.encode(together)
