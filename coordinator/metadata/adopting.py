"""An owner's ephemeral entries when their prefix moves: only its own session can hold them on the new shard.

Invariant: an ephemeral entry is on the new shard, in its owner's session there, before that shard holds the prefix, or
else its owner's session was over. So nobody ever finds it missing while its owner lives, and a lock that is such an
entry has one holder throughout.

The mover waits for it: while a prefix stands still, each client makes there again what is its own here. What it owns it
knows because it made it; that it still owns it, the old shard says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from coordinator.metadata.protocol import CheckFailed, Create, Delete, Done, Operation, StoreError, StoreTimeout
from coordinator.metadata.ringclient import RETRY_S, RingClient
from coordinator.metadata.ringstate import RingState, is_moving, moves

log = logging.getLogger(__name__)


class Adopter:
    """``key_of``: a path's placement prefix."""

    def __init__(self, ring: RingClient, key_of: Callable[[str], str | None]) -> None:
        self._ring = ring
        self._key_of = key_of
        self._paths: set[str] = set()
        self._adopting: set[asyncio.Task[None]] = set()
        self._unsubscribe = ring.subscribe(self._on_state)

    def expect(self, path: str) -> None:
        """It will be made now; whether it was may stay unknown."""
        self._paths.add(path)

    def made(self, operations: Sequence[Operation], done: Sequence[Done]) -> None:
        for operation, result in zip(operations, done, strict=True):
            if isinstance(operation, Create) and operation.ephemeral:
                self._paths.discard(operation.path)  # of a sequential entry this is only the stem
                self._paths.add(str(result))
            elif isinstance(operation, Delete):
                self._paths.discard(operation.path)

    def close(self) -> None:
        self._unsubscribe()
        for task in self._adopting:
            task.cancel()

    def _on_state(self, state: RingState) -> None:
        paths = [path for path in self._paths if (key := self._key_of(path)) is not None and is_moving(state, key)]
        for path in sorted(paths):
            task = asyncio.create_task(self._adopt(state, path))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)

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
            self._paths.discard(path)
            return
        guard = await self._ring.guard(there)
        try:
            if self._ring.state is state:
                await self._ring.stores[there].restore(raw, guard, ephemeral=True)
        except CheckFailed:
            self._ring.passed(there, guard)
            raise
