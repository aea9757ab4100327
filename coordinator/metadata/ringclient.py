"""A client's view of the ring: which ensemble to ask, and the guard under which its answer counts.

Invariant: whatever is done under a guard is done on the shard that held the prefix at that moment (``moving`` says
why). A fence is only used together with a state at least as new as the one that it names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple

import msgspec

from actors.formats import RING
from coordinator.metadata.protocol import Check, EntryExists, SessionLost, StoreError, StoreTimeout
from coordinator.metadata.ringstate import (
    FENCE_PATH,
    HOME,
    RING_PATH,
    Fence,
    Member,
    RingState,
    decode_fence,
    decode_ring,
    holder,
)
from coordinator.metadata.shard import Shard

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.25
"""Whoever waits for a prefix that moves looks by himself after so long, should the watch on the ring be late."""
RETRY_S = 0.5
LET_GO_S = 5.0
"""So long an ensemble that was removed stays connected, for what is under way there."""

Connect = Callable[[str], Awaitable[Shard]]
Listener = Callable[[RingState], object]


class Held(NamedTuple):
    """Where a prefix is. ``guard`` holds there as long as nothing moves."""

    shard: str
    store: Shard
    guard: Check


class RingClient:
    """Owns the stores of all ensembles, ``home`` too. Made by ``open``."""

    def __init__(
        self, name: str, home: Shard, connect: Connect, state: RingState, without: Collection[str] = ()
    ) -> None:
        self.name = name
        self.home = home
        self.state = state
        self.stores: dict[str, Shard] = {HOME: home}
        self.connect = connect
        self._without = without
        self._fences: dict[str, int] = {}
        self._listeners: list[Listener] = []
        self._changed = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls, ensembles: Sequence[str], home: Shard, connect: Connect, *, name: str, without: Collection[str] = ()
    ) -> RingClient:
        """``ensembles``: hosts, home first; they make the ring where there is none yet. Raises ``StoreError`` where
        the first one is not a home, or another one is not in its ring. ``home`` stays the caller's then. ``without``:
        shards that are not connected, of which nothing can be asked (``abandoning``)."""
        state = await _found_or_made(ensembles, home)
        client = cls(name, home, connect, state, without)
        try:
            await client._connect_all(state)
            await asyncio.gather(*(client._read_fence(shard) for shard in client.stores))
        except BaseException:
            await client._close_others()
            raise
        client._spawn(client._follow())
        return client

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        results = await asyncio.gather(*(store.close() for store in self.stores.values()), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Hears of every new state, on the loop; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    async def held(self, key: str) -> Held:
        """Waits while the prefix moves; whoever asks has a deadline."""
        while True:
            state = self.state
            shard = holder(state, key)
            if shard is None:
                await self.next_state(state)
                continue
            guard = await self.guard(shard)
            if self.state is state:  # else the guard may be younger than the choice of the shard
                return Held(shard, self.stores[shard], guard)

    async def guard(self, shard: str) -> Check:
        """That a shard's fence is where it was for the state of this moment."""
        while shard not in self._fences:
            fence, version = await self._read_fence(shard)
            if fence.epoch > self.state.epoch:
                await self.refresh(fence.epoch)
                continue
            self._fences[shard] = version
        return Check(FENCE_PATH, self._fences[shard])

    def passed(self, shard: str, guard: Check) -> None:
        """A guard did not hold: look at that fence again."""
        if self._fences.get(shard) == guard.expected:
            del self._fences[shard]

    async def confirm(self, shard: str) -> int:
        """Makes sure that what the shard has reported until now is not of a later state than ``state``; returns the
        epoch of its fence."""
        fence, _ = await self._read_fence(shard)
        if fence.epoch > self.state.epoch:
            await self.refresh(fence.epoch)
        return fence.epoch

    async def next_state(self, state: RingState) -> None:
        """Wait for another one, or for a moment."""
        if self.state is not state:
            return
        try:
            async with asyncio.timeout(LOOK_AGAIN_S):
                await self._changed.wait()
        except TimeoutError:
            await self.refresh()

    async def refresh(self, at_least: int = 0) -> None:
        """Read the ring. Raises ``StoreError`` where it is older than a fence said."""
        async with self._refreshing:
            if 0 < at_least <= self.state.epoch:
                return
            entry = await self.home.get(RING_PATH)
            if entry is None:
                raise StoreError(
                    f"{RING_PATH} on {self.name}: nothing is there; expected the ring that was used before"
                )
            state = decode_ring(entry.value)
            if state.epoch > self.state.epoch:
                await self._connect_all(state)
                self._apply(state)
            if self.state.epoch < at_least:
                raise StoreError(
                    f"{RING_PATH} on {self.name}: expected epoch {at_least}, which a shard has seen already, found "
                    f"{state.epoch}; was the home ensemble restored from a copy?"
                )

    def _apply(self, state: RingState) -> None:
        self.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for listener in list(self._listeners):
            listener(state)
        kept = {member.id for member in state.members}
        for shard in [shard for shard in self.stores if shard not in kept]:
            self._spawn(self._let_go(shard))

    async def _let_go(self, shard: str) -> None:
        await asyncio.sleep(LET_GO_S)
        store = self.stores.pop(shard, None)
        self._fences.pop(shard, None)
        if store is not None:
            await store.close()

    async def _connect_all(self, state: RingState) -> None:
        missing = [
            member for member in state.members if member.id not in self.stores and member.id not in self._without
        ]
        results = await asyncio.gather(*(self.connect(member.hosts) for member in missing), return_exceptions=True)
        for member, result in zip(missing, results, strict=True):
            if not isinstance(result, BaseException):
                self.stores[member.id] = result
        for member, result in zip(missing, results, strict=True):
            if isinstance(result, StoreTimeout):
                raise StoreTimeout(
                    f"{result} (shard {member.id} of {self.name}; if it is lost for good: bin/admin shards remove "
                    f"{member.id} --dead)"
                ) from result
            if isinstance(result, BaseException):
                raise result

    async def _close_others(self) -> None:
        others = [store for shard, store in self.stores.items() if shard != HOME]
        await asyncio.gather(*(store.close() for store in others), return_exceptions=True)

    async def _read_fence(self, shard: str) -> tuple[Fence, int]:
        """And its version."""
        store = self.stores[shard]
        entry = await store.get(FENCE_PATH)
        if entry is None:
            with suppress(EntryExists):  # another client was faster
                await store.create(FENCE_PATH, msgspec.json.encode(Fence(shard, self.state.epoch)))
            return await self._read_fence(shard)
        fence = decode_fence(entry.value)
        if fence.shard != shard:
            raise StoreError(
                f"{RING_PATH} on shard {shard} ({self.state.hosts(shard)}): expected that ensemble, found shard "
                f"{fence.shard}; list the same ensembles in the same order as before"
            )
        return fence, entry.version

    async def _follow(self) -> None:
        """Hear of changes before somebody runs into a fence."""
        async with aclosing(self.home.watch("/")) as watch:
            await self._refresh_patiently()  # it may have changed since it was read
            async for change in watch:
                if change.path == RING_PATH:
                    await self._refresh_patiently()

    async def _refresh_patiently(self) -> None:
        while True:
            try:
                await self.refresh()
            except StoreTimeout as error:  # an ensemble that cannot be reached just now; calls to it say so
                log.warning("the ring cannot be followed yet: %s", error)
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, SessionLost):
            log.error("following the ring ended: %s", error)  # calls read the ring themselves where they must


async def _found_or_made(ensembles: Sequence[str], home: Shard) -> RingState:
    fence = await home.get(FENCE_PATH)
    if fence is not None and (shard := decode_fence(fence.value).shard) != HOME:
        raise StoreError(
            f"{RING_PATH} on {ensembles[0]}: expected the home ensemble, shard {HOME}, found shard {shard} of another "
            "one's ring; list the same ensembles in the same order as before, the home ensemble first"
        )
    members = tuple(Member(str(number), hosts) for number, hosts in enumerate(ensembles))
    new = RingState(1, members, tuple(member.id for member in members), len(members), format=RING.current)
    with suppress(EntryExists):
        await home.create(RING_PATH, msgspec.json.encode(new))
    entry = await home.get(RING_PATH)
    if entry is None:
        raise StoreError(f"{RING_PATH} on {ensembles[0]}: it was deleted just now; nobody may do that")
    state = decode_ring(entry.value)
    known = {frozenset(member.hosts.split(",")) for member in state.members}
    for hosts in ensembles[1:]:
        if frozenset(hosts.split(",")) not in known:
            raise StoreError(
                f"{RING_PATH} on {ensembles[0]}: {hosts} is not in the ring, which has "
                f"{'; '.join(member.hosts for member in state.members)}; name the home ensemble alone, or the same "
                "ensembles, home first (to add one: bin/admin shards add)"
            )
    return state
