"""The actor that speaks for its node: other nodes ask it to watch actors, and tell it of their ends."""

from __future__ import annotations

from actors.core.actor import Actor, handler
from actors.core.watching import Ended, EndNoted, NodeGone, Unwatch, Unwatched, WatchActor, Watches, Watching


class NodeActor(Actor):
    """One on every node, under the name ``@node``."""

    def __init__(self, watches: Watches) -> None:
        self._watches = watches

    @handler
    async def watch(self, message: WatchActor) -> Watching:
        return self._watches.watched(message)

    @handler
    async def unwatch(self, message: Unwatch) -> Unwatched:
        return self._watches.unwatched(message)

    @handler
    async def ended(self, message: Ended) -> EndNoted:
        return self._watches.ended_there(message)

    @handler
    async def gone(self, message: NodeGone) -> None:
        self._watches.gone(message)
