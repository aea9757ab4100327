"""The actor that speaks for its node: other nodes ask it to watch actors, and tell it of their ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from actors.core.actor import Actor, handler
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
    ) -> None:
        self._watches = watches
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
