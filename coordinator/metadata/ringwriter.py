"""Writes the ring: its state on the home ensemble, and after it the fence on every other one.

Invariant: a state is written by compare-and-set only, each with the next epoch, and a fence is raised after the state
that it names; so of two who change the ring at a time, the later one's fences stop the earlier one (``moving`` says
why).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from coordinator.metadata.protocol import (
    Check,
    Create,
    EntryExists,
    StoreError,
    StoreTimeout,
    VersionMismatch,
    Write,
)
from coordinator.metadata.ringclient import RingClient
from coordinator.metadata.ringstate import FENCE_PATH, RING_PATH, Fence, RingState, decode_fence, decode_ring

_Result = TypeVar("_Result")
log = logging.getLogger(__name__)

LOCK_PATH = "/ring-mover"
ATTEMPTS = 20


class RingBusy(StoreError):
    """Somebody else changes the ring."""


class RingWriter:
    """Of one who changes the ring."""

    def __init__(self, ring: RingClient) -> None:
        self._ring = ring

    async def read(self) -> tuple[RingState, int]:
        await self._ring.refresh()
        entry = await self._ring.home.get(RING_PATH)
        if entry is None:
            raise StoreError(f"{RING_PATH} on {self._ring.name}: nothing is there; expected the ring")
        return decode_ring(entry.value), entry.version

    async def publish(self, state: RingState, version: int, also: Sequence[Create] = ()) -> tuple[RingState, int]:
        """With the next epoch, and what is to be there together with it; and the entry's new version."""
        state = msgspec.structs.replace(state, epoch=state.epoch + 1)
        value = msgspec.json.encode(state)
        for _ in range(ATTEMPTS):
            try:
                await self._ring.home.multi([Write(RING_PATH, value, expected=version), *also])
                new = version + 1
            except StoreTimeout:
                entry = await patiently(lambda: self._ring.home.get(RING_PATH))
                if entry is not None and entry.value == value:
                    new = entry.version
                elif entry is not None and entry.version == version:
                    continue
                else:
                    raise RingBusy(f"{RING_PATH}: somebody else changed it; look with bin/admin shards show") from None
            except VersionMismatch:
                raise RingBusy(f"{RING_PATH}: somebody else changed it; look with bin/admin shards show") from None
            await patiently(self._ring.refresh)
            return state, new
        raise StoreTimeout(f"{RING_PATH}: epoch {state.epoch} could not be written in {ATTEMPTS} attempts")

    async def raise_fences(self, state: RingState) -> dict[str, Check]:
        """The guards of this epoch, by shard."""
        shards = [member.id for member in state.members]
        versions = await asyncio.gather(*(self._raise_fence(shard, state.epoch) for shard in shards))
        return {shard: Check(FENCE_PATH, version) for shard, version in zip(shards, versions, strict=True)}

    async def _raise_fence(self, shard: str, epoch: int) -> int:
        store = self._ring.stores[shard]
        value = msgspec.json.encode(Fence(shard, epoch))
        for _ in range(ATTEMPTS):
            try:
                entry = await store.get(FENCE_PATH)
                if entry is None:
                    await store.create(FENCE_PATH, value)
                    return 0
                fence = decode_fence(entry.value)
                if fence.epoch > epoch:
                    raise RingBusy(f"{FENCE_PATH} on shard {shard}: epoch {fence.epoch}; somebody else moves the ring")
                if fence.epoch == epoch and not fence.retired:
                    return entry.version
                return await store.write(FENCE_PATH, value, expected=entry.version)
            except (StoreTimeout, VersionMismatch, EntryExists):
                continue  # it may have been written: look
        raise StoreTimeout(f"{FENCE_PATH} on shard {shard}: could not be raised in {ATTEMPTS} attempts")


async def patiently(call: Callable[[], Awaitable[_Result]]) -> _Result:
    """Ask again where no answer comes. Raises what the last attempt raises."""
    for _ in range(ATTEMPTS):
        try:
            return await call()
        except StoreTimeout:
            continue
    return await call()


class RingLock:
    """One mover at a time, for courtesy: what keeps two apart are the epochs."""

    def __init__(self, ring: RingClient) -> None:
        self._ring = ring

    async def __aenter__(self) -> None:
        try:
            await self._ring.home.create(LOCK_PATH, b"", ephemeral=True)
        except EntryExists:
            raise RingBusy(
                f"{LOCK_PATH}: somebody changes the ring just now (or did until a moment ago, and died); try later"
            ) from None

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._ring.home.delete(LOCK_PATH)
        except StoreError as error:  # it goes with the session
            log.warning("%s stays until this session ends: %s", LOCK_PATH, error)
