"""An owner's ephemeral entries when their prefix moves: only its own session can hold them on the new shard.

Invariant: an ephemeral entry is on the new shard, in its owner's session there, before that shard holds the prefix, or
else its owner's session was over. So nobody ever finds it missing while its owner lives, and a lock that is such an
entry has one holder throughout.

The mover waits for it: while a prefix stands still, each client makes there again what is its own here. What it owns it
knows because it made it; that it still owns it, the old shard says.

Where a shard is lost (``abandoning``) nobody can say so, and the entry was missing until it is made again, with the
value that its owner has last given it, unless somebody else is there by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from coordinator.metadata.protocol import (
    CheckFailed,
    Create,
    Delete,
    Done,
    EntryExists,
    Operation,
    StoreError,
    StoreTimeout,
    Write,
)
from coordinator.metadata.ringclient import RETRY_S, RingClient
from coordinator.metadata.ringstate import RingState, is_moving, moves, source

log = logging.getLogger(__name__)


class Adopter:
    """``key_of``: a path's placement prefix; ``make_parents``: those that lie on other shards."""

    def __init__(
        self, ring: RingClient, key_of: Callable[[str], str | None], make_parents: Callable[[str], Awaitable[None]]
    ) -> None:
        self._ring = ring
        self._key_of = key_of
        self._make_parents = make_parents
        self._paths: dict[str, bytes] = {}  # and the value that was given here
        self._state = ring.state
        self._adopting: set[asyncio.Task[None]] = set()
        self._unsubscribe = ring.subscribe(self._on_state)

    def expect(self, path: str, value: bytes) -> None:
        """It will be made now; whether it was may stay unknown."""
        self._paths[path] = value

    def made(self, operations: Sequence[Operation], done: Sequence[Done]) -> None:
        for operation, result in zip(operations, done, strict=True):
            if isinstance(operation, Create) and operation.ephemeral:
                self._paths.pop(operation.path, None)  # of a sequential entry this is only the stem
                self._paths[str(result)] = operation.value
            elif isinstance(operation, Write) and operation.path in self._paths:
                self._paths[operation.path] = operation.value
            elif isinstance(operation, Delete):
                self._paths.pop(operation.path, None)

    def close(self) -> None:
        self._unsubscribe()
        for task in self._adopting:
            task.cancel()

    def _on_state(self, state: RingState) -> None:
        before, self._state = self._state, state
        there = {member.id for member in state.members}
        for path in sorted(self._paths):
            key = self._key_of(path)
            if key is None:
                continue
            if is_moving(state, key):
                self._begin(self._adopt(state, path))
            elif source(before, key) not in there and source(before, key) != source(state, key):
                self._begin(self._make_again(key, path))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    async def _make_again(self, key: str, path: str) -> None:
        """What went with a shard."""
        while path in self._paths:
            try:
                await self._make_again_once(key, path)
            except StoreTimeout as error:
                log.warning("%s cannot be made again yet: %s", path, error)
                await asyncio.sleep(RETRY_S)
            except CheckFailed:
                continue  # the ring moved on between
            except StoreError as error:
                log.error("%s, which was lost with its shard, cannot be made again: %s", path, error)
                return
            else:
                return

    async def _make_again_once(self, key: str, path: str) -> None:
        held = await self._ring.held(key)
        try:
            await self._make_parents(path)
            if path in self._paths:  # it may have been deleted meanwhile
                await held.store.multi([held.guard, Create(path, self._paths[path], ephemeral=True)])
        except CheckFailed:
            self._ring.passed(held.shard, held.guard)
            raise
        except EntryExists:
            raw = await held.store.inspect(path)
            if raw is None or raw.owner != "me":  # else it was made by an attempt of which no answer came
                log.warning("%s was lost with its shard, and is somebody else's now", path)
                self._paths.pop(path, None)

    async def _adopt(self, state: RingState, path: str) -> None:
        """Until it is done or the prefix does not wait for it any longer."""
        while self._ring.state is state:
            try:
                await self._adopt_once(state, path)
            except StoreTimeout as error:
                log.warning("%s cannot follow its prefix yet: %s", path, error)
                await asyncio.sleep(RETRY_S)
            except CheckFailed:
                continue  # the fence moved on between: so may have the state
            except StoreError as error:
                log.error("%s cannot follow its prefix: %s", path, error)
                return
            else:
                return

    async def _adopt_once(self, state: RingState, path: str) -> None:
        move = moves(state, self._key_of(path) or "")
        if move is None:
            return
        here, there = move
        raw = await self._ring.stores[here].inspect(path)
        if raw is None or raw.owner != "me":
            self._paths.pop(path, None)
            return
        guard = await self._ring.guard(there)
        try:
            if self._ring.state is state:
                await self._ring.stores[there].restore(raw, guard, ephemeral=True)
        except CheckFailed:
            self._ring.passed(there, guard)
            raise
