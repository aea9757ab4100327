"""A proxy's word to the coordinator of how many places its engines have that serve.

Invariant: the newest word arrives, sooner or later, as long as the proxy's node lives: one that does not is said again,
as it is by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from actors.core import Node, Ref
from bus.message import BusError

log = logging.getLogger(__name__)

AGAIN_S = 2.0


class Serving:
    """See the module docstring. ``announce`` asks whoever leads."""

    def __init__(self, node: Node, announce: Callable[[Ref, dict[str, int]], Awaitable[None]]) -> None:
        self._node = node
        self._announce = announce
        self._ref: Ref | None = None
        self._places: dict[str, int] = {}  # by class
        self._said: dict[str, int] | None = {}  # that the coordinator knows; None: it is uncertain what it knows
        self._telling: asyncio.Task[None] | None = None

    def begin(self, ref: Ref) -> None:
        """It is known that this proxy is there; from now on it is told what it serves."""
        self._ref = ref
        self.changed(self._places)

    def changed(self, places: dict[str, int]) -> None:
        self._places = places
        if self._ref is not None and (self._telling is None or self._telling.done()):
            self._telling = self._node.background(self._tell(self._ref))

    async def _tell(self, ref: Ref) -> None:
        while self._said != self._places:
            told = dict(self._places)
            try:
                await self._announce(ref, told)
                self._said = told
            except BusError as error:
                self._said = None
                log.warning("the coordinator does not know that %s places serve here: %s", told, error)
                await asyncio.sleep(AGAIN_S)
