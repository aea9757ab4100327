"""The actor that speaks for its node: other nodes ask it to watch actors, tell it of their ends, and borrow objects."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from actors.core.actor import Actor, handler
from actors.core.lending import (
    Borrow,
    FetchObject,
    GiveBack,
    Lender,
    Lent,
    ObjectPiece,
    Renewed,
    RenewLeases,
)
from actors.core.metrics import DescribeNode, Description
from actors.core.offers import SpawnActor, Spawned
from actors.core.watching import Ended, EndNoted, NodeGone, Unwatch, Unwatched, WatchActor, Watches, Watching


class NodeActor(Actor):
    """One on every node, under the name ``@node``."""

    def __init__(
        self,
        watches: Watches,
        spawn: Callable[[SpawnActor], Awaitable[Spawned]],
        describe: Callable[[], Description],
        lender: Lender,
    ) -> None:
        self._watches = watches
        self._lender = lender
        self._spawn = spawn
        self._describe = describe

    @handler(cancellable=False)
    async def watch(self, message: WatchActor) -> Watching:
        return self._watches.watched(message)

    @handler(cancellable=False)
    async def unwatch(self, message: Unwatch) -> Unwatched:
        return self._watches.unwatched(message)

    @handler(cancellable=False)
    async def ended(self, message: Ended) -> EndNoted:
        return self._watches.ended_there(message)

    @handler(concurrent=True, cancellable=False)
    async def spawn(self, message: SpawnActor) -> Spawned:
        return await self._spawn(message)

    @handler(urgent=True)
    async def describe(self, message: DescribeNode) -> Description:
        return self._describe()

    @handler(cancellable=False)
    async def gone(self, message: NodeGone) -> None:
        self._watches.gone(message)

    @handler(concurrent=True)
    async def lend(self, message: Borrow) -> Lent:
        return await self._lender.lend(message)

    @handler
    async def pieces(self, message: FetchObject) -> AsyncGenerator[ObjectPiece, None]:
        async for piece in self._lender.pieces(message):
            yield piece

    @handler(cancellable=False)
    async def renew(self, message: RenewLeases) -> Renewed:
        return self._lender.renew(message)

    @handler(cancellable=False)
    async def give_back(self, message: GiveBack) -> None:
        self._lender.give_back(message)
