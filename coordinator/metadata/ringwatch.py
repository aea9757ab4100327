"""A watch that follows its entries from shard to shard.

Invariant: whatever changes directly below the prefix is reported, by a shard that is watched while it holds the entry,
or by the comparison that is made whenever entries have come to another shard: those that stayed are reported as written
then, because what happened to them just before is not known. What a shard reports of entries that are not its own (the
copies that are made there, their removal here) is not passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from coordinator.metadata import checks
from coordinator.metadata.protocol import Change, StoreError, StoreTimeout, Watch
from coordinator.metadata.ringclient import RETRY_S, RingClient
from coordinator.metadata.ringstate import RingState
from coordinator.metadata.watching import ChangeQueue

Owner = Callable[[RingState, str], str]


class _Ended:
    """A shard's watch came to its end."""

    def __init__(self, shard: str, error: BaseException | None) -> None:
        self.shard = shard
        self.error = error


class RingWatch(ChangeQueue):
    """``shards``: where entries below the prefix may be; ``owner``: of an entry; ``children``: of the whole store."""

    def __init__(
        self,
        ring: RingClient,
        prefix: str,
        *,
        shards: Callable[[RingState], set[str]],
        owner: Owner,
        children: Callable[[str], Awaitable[list[str]]],
    ) -> None:
        super().__init__(on_close=lambda _: self._task.cancel())
        self._ring = ring
        self._prefix = prefix
        self._shards = shards
        self._owner = owner
        self._children = children
        self._known: set[str] = set()
        self._state = ring.state  # up to which everything was reported
        self._inbox: asyncio.Queue[tuple[str, Change] | _Ended | None] = asyncio.Queue()
        self._sources: dict[str, tuple[Watch, asyncio.Task[None]]] = {}
        for shard in sorted(shards(ring.state)):
            self._listen(shard)
        self._unsubscribe = ring.subscribe(lambda _: self._inbox.put_nowait(None))
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._stopped)

    async def _run(self) -> None:
        self._known = await self._listed()
        while True:
            news = await self._inbox.get()
            if news is None:
                await self._follow()
            elif isinstance(news, _Ended):
                if news.shard in self._sources:
                    raise _End(news.error)
            else:
                await self._pass_on(*news)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._unsubscribe()
        for shard in list(self._sources):
            self._leave(shard)
        error = None if task.cancelled() else task.exception()
        self.end(error.why if isinstance(error, _End) else error)

    async def _pass_on(self, shard: str, change: Change) -> None:
        if change.kind == "deleted":
            # Removed because it was moved? Then the fence there has been ahead of the removal.
            await self._confirm(shard)
        if self._owner(self._ring.state, change.path) != shard:
            return
        if change.kind == "deleted":
            self._known.discard(change.path)
        else:
            self._known.add(change.path)
        self.put(change)

    async def _confirm(self, shard: str) -> None:
        while True:
            try:
                await self._ring.confirm(shard)
            except StoreTimeout:
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _follow(self) -> None:
        """The ring has changed."""
        before, now = self._state, self._ring.state
        self._state = now
        for shard in self._shards(now) - set(self._sources):
            self._listen(shard)
        for shard in set(self._sources) - self._shards(now):
            self._leave(shard)
        if (before.ring, before.before, before.done) == (now.ring, now.before, now.done):
            return
        listed = await self._listed()
        moved = {path for path in self._known | listed if self._owner(before, path) != self._owner(now, path)}
        for path in sorted(moved - listed):
            self.put(Change("deleted", path))
        for path in sorted(moved & listed):
            self.put(Change("written" if path in self._known else "created", path))
        self._known = (self._known - moved) | (listed & moved)

    async def _listed(self) -> set[str]:
        while True:
            try:
                return {checks.child_of(self._prefix, name) for name in await self._children(self._prefix)}
            except StoreTimeout:  # the watch outlasts it, as that of one ensemble does
                await asyncio.sleep(RETRY_S)

    def _listen(self, shard: str) -> None:
        watch = self._ring.stores[shard].watch(self._prefix)
        self._sources[shard] = (watch, asyncio.create_task(self._pump(shard, watch)))

    def _leave(self, shard: str) -> None:
        _, task = self._sources.pop(shard)
        task.cancel()

    async def _pump(self, shard: str, watch: Watch) -> None:
        error: BaseException | None = None
        try:
            async for change in watch:
                self._inbox.put_nowait((shard, change))
        except StoreError as ended:
            error = ended
        finally:
            await watch.aclose()
        self._inbox.put_nowait(_Ended(shard, error))


class _End(Exception):
    """The watch ends with this."""

    def __init__(self, why: BaseException | None) -> None:
        super().__init__(why)
        self.why = why
