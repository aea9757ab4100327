"""What looks at the engines again and again, by asking the proxies, and orders something where they need it.

Invariant: it goes on until it is cancelled, whichever proxies there are; where none answers that costs one look.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

from actors.core import Node
from actors.proxy.messages import EngineState
from bus.message import BusError
from coordinator.engines import Engines

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
TIMEOUT_S = 5.0


class Looking(ABC):
    """See the module docstring."""

    def __init__(self, node: Node, engines: Engines, look_every_s: float) -> None:
        self._node = node
        self._engines = engines
        self._look_every_s = look_every_s

    async def run(self) -> None:
        """Until it is cancelled: where there is nothing to even out now, engines may come."""
        while True:
            await asyncio.sleep(self._look_every_s)
            try:
                described = await self._engines.describe(TIMEOUT_S)
                await self._look(described.engines)
            except BusError as error:
                log.info("%s: no look at the engines, or an order did not arrive: %s", type(self).__name__, error)

    @abstractmethod
    async def _look(self, engines: Sequence[EngineState]) -> None:
        """At all of them, removed ones too. May raise ``BusError``."""
