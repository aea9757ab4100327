"""Changing the ring under clients that read, write and watch.

Invariants, at every moment and whoever stops or dies:

1. A placement prefix is changed and read on one shard only: the one that holds it in the newest state of the ring, or
   none while it moves. So its history is that of one store.
2. When a shard begins to hold a prefix, it has every entry that was acknowledged before, with its value and version and
   the number that the next sequential entry gets, and every ephemeral entry in its owner's session there.

How they are kept. ``/ring`` on the home ensemble is the state, changed by compare-and-set only, each time with the next
epoch. ``/ring-fence`` on every ensemble names an epoch, and is raised after the state and never before. A client does
everything under the guard of the fence's version on the shard that it asks (a change in the same transaction, a read
before it), read together with a state at least that new: once a fence is raised, nobody who knows only older states can
do anything there. Then a change of the ring goes round the circle in segments, each of them of ``SEGMENT`` prefixes:

    clear    what an attempt that failed has left in the segment on the shards that do not hold it
    freeze   state: frozen = end of the segment; raise all fences. From here nobody changes or reads these prefixes: who
             knows the state waits, who does not is stopped by a fence
    copy     each entry to where the new ring puts it; each client does so with the ephemeral ones that are its own
             (``adopting``), and the mover waits until they are there, or gone because their owner's session ended
    go on    state: done = end of the segment; raise all fences. From here the new shard holds the prefixes
    clear    the old shard

Everything that is written on a shard in the course of it is guarded by its fence too, so that a mover that was taken
for dead cannot do harm: whoever takes over raises the fences first. If a copy fails, the segment is given back (frozen
= done); if even that does not succeed, or the mover dies, ``resume`` does it later. Between two segments the ring may
stay as it is for any time. ``/jobs`` itself and all that is not below it stays on the home ensemble, which is never
removed.

What moves is what the new ring puts elsewhere and nothing else: about 1/N of the prefixes, and by the number of virtual
nodes less than 1.2/N.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from coordinator.metadata.copying import Copier, keys_on
from coordinator.metadata.protocol import Check, StoreError
from coordinator.metadata.ringclient import RingClient
from coordinator.metadata.ringstate import (
    FENCE_PATH,
    HOME,
    SLOTS,
    Fence,
    Member,
    RingState,
    decode_fence,
    moves,
    slot_of,
    source,
)
from coordinator.metadata.ringwriter import RingBusy, RingLock, RingWriter

log = logging.getLogger(__name__)

SEGMENT = 16
"""Prefixes that stand still together."""
OWNERS_S = 60.0
"""How long the owners of ephemeral entries may take, or the servers to end their sessions."""


class Moved(msgspec.Struct, frozen=True):
    """What a change of the ring has moved."""

    epoch: int
    prefixes: int
    of: int
    shards: int  # the larger of the two rings

    @property
    def versus_bound(self) -> float:
        """1 is the bound, 1.2/N of the prefixes."""
        return self.prefixes / (1.2 / self.shards * self.of) if self.of else 0.0


class Mover:
    """``told`` hears of the progress, line by line; ``owners_s`` as ``OWNERS_S``."""

    def __init__(
        self, ring: RingClient, *, told: Callable[[str], object] = log.info, owners_s: float = OWNERS_S
    ) -> None:
        self._ring = ring
        self._writer = RingWriter(ring)
        self._told = told
        self._owners_s = owners_s

    async def add(self, hosts: str) -> Moved:
        """Put an ensemble into the ring, and move its share there."""
        async with RingLock(self._ring):
            state, version = await self._writer.read()
            self._check_settled(state)
            if any(set(hosts.split(",")) & set(member.hosts.split(",")) for member in state.members):
                raise StoreError(f"{hosts}: in the ring already; bin/admin shards show lists it")
            new = str(state.next_id)
            await self._check_unused(hosts)
            began = msgspec.structs.replace(
                state,
                members=(*state.members, Member(new, hosts)),
                ring=(*state.ring, new),
                next_id=state.next_id + 1,
                before=state.ring,
                done=0,
                frozen=0,
            )
            return await self._go_round(*await self._writer.publish(began, version))

    async def remove(self, shard: str) -> Moved:
        """Move what an ensemble holds to the others, and take it out."""
        async with RingLock(self._ring):
            state, version = await self._writer.read()
            self._check_settled(state)
            if shard == HOME:
                raise StoreError(
                    "shard 0 is the home ensemble (members, leader, the ring itself) and cannot be removed"
                )
            if shard not in state.ring:
                raise StoreError(f"shard {shard}: not in the ring, which has {', '.join(state.ring)}")
            ring = tuple(other for other in state.ring if other != shard)
            began = msgspec.structs.replace(state, ring=ring, before=state.ring, done=0, frozen=0)
            return await self._go_round(*await self._writer.publish(began, version))

    async def resume(self) -> Moved:
        """Finish a change that was left unfinished."""
        async with RingLock(self._ring):
            state, version = await self._writer.read()
            if not state.before:
                raise StoreError(f"nothing to resume: the ring of epoch {state.epoch} is complete")
            # The fences of whoever began it, and what he has frozen, end here.
            return await self._go_round(
                *await self._writer.publish(msgspec.structs.replace(state, frozen=state.done), version)
            )

    def _check_settled(self, state: RingState) -> None:
        if state.before:
            raise RingBusy(
                f"the change from {', '.join(state.before)} to {', '.join(state.ring)} is not finished; run bin/admin "
                "shards resume first"
            )

    async def _check_unused(self, hosts: str) -> None:
        """An ensemble that holds somebody's entries does not become ours."""
        store = await self._ring.connect(hosts)
        try:
            entry = await store.get(FENCE_PATH)
            if entry is None:
                used = bool(await store.children("/"))
            elif used := not decode_fence(entry.value).retired:
                pass
            else:
                await store.delete(FENCE_PATH)
            if used:
                raise StoreError(f"{hosts}: expected an ensemble without entries, found some; name another one")
        finally:
            await store.close()

    # ---- round the circle ----------------------------------------------------------------------------------------

    async def _go_round(self, state: RingState, version: int) -> Moved:
        guards = await self._writer.raise_fences(state)
        of = await self._count(state)
        moved = 0
        while state.done < SLOTS:
            end, copier = await self._next_segment(state, guards)
            await copier.clear_targets()
            state, version = await self._writer.publish(msgspec.structs.replace(state, frozen=end), version)
            try:
                copier = self._copier(state, await self._writer.raise_fences(state))
                moved += await copier.copy(self._owners_s)
            except BaseException:
                await self._give_back(state, version)
                raise
            state, version = await self._writer.publish(msgspec.structs.replace(state, done=end), version)
            guards = await self._writer.raise_fences(state)
            await self._copier(msgspec.structs.replace(state, done=copier.state.done), guards).clear_sources()
            self._told(f"{moved} of {of} placement prefixes moved, {end / SLOTS:.0%} of the way")
        return await self._finish(state, version, moved, of)

    async def _finish(self, state: RingState, version: int, moved: int, of: int) -> Moved:
        gone = [shard for shard in state.before if shard not in state.ring]
        await self._copier(state, await self._writer.raise_fences(state)).clear_all(gone)
        shards = max(len(state.before), len(state.ring))
        members = tuple(member for member in state.members if member.id not in gone)
        final, _ = await self._writer.publish(
            msgspec.structs.replace(state, members=members, before=(), done=0, frozen=0), version
        )
        await self._writer.raise_fences(final)
        for shard in gone:
            store = self._ring.stores[shard]
            await store.write(FENCE_PATH, msgspec.json.encode(Fence(shard, final.epoch, retired=True)))
        return Moved(final.epoch, moved, of, shards)

    async def _next_segment(self, state: RingState, guards: dict[str, Check]) -> tuple[int, Copier]:
        """Its end, and what clears its targets."""
        listed = await asyncio.gather(*(keys_on(self._ring.stores[shard]) for shard in state.before))
        slots = sorted(
            slot_of(key)
            for shard, keys in zip(state.before, listed, strict=True)
            for key in keys
            if (move := moves(state, key)) is not None and move[0] == shard and slot_of(key) >= state.done
        )
        end = slots[SEGMENT - 1] + 1 if len(slots) > SEGMENT else SLOTS
        return end, self._copier(msgspec.structs.replace(state, frozen=end), guards)

    async def _count(self, state: RingState) -> int:
        """Prefixes that hold something."""
        shards = [member.id for member in state.members]
        listed = await asyncio.gather(*(keys_on(self._ring.stores[shard]) for shard in shards))
        return sum(source(state, key) == shard for shard, keys in zip(shards, listed, strict=True) for key in keys)

    def _copier(self, state: RingState, guards: dict[str, Check]) -> Copier:
        return Copier(self._ring.stores, state, guards)

    async def _give_back(self, state: RingState, version: int) -> None:
        """The old shards hold the segment again."""
        try:
            given_back, _ = await asyncio.shield(
                self._writer.publish(msgspec.structs.replace(state, frozen=state.done), version)
            )
            await asyncio.shield(self._writer.raise_fences(given_back))
        except StoreError as error:
            log.error("a part of the ring stands still until bin/admin shards resume: %s", error)
