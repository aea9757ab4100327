"""Versions on their way from the trainer to the engines, beside the rollouts.

Invariant: versions are published in order, one at a time: whoever begins the next one has waited for the one before.
One that fails is noticed by whoever waits for it, or for what it would bring.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from actors.core import Node, Ref
from actors.trainer.messages import Weights
from actors.weightsync.messages import PUBLISH_TIMEOUT_S, Publish, Published
from coordinator.leadership import Authority


class Publication:
    """See the module docstring. ``served`` is told every version that engines serve, ``over`` that one which went on
    beside the loop has ended, ``warn`` (for people) who does not serve it."""

    def __init__(
        self,
        node: Node,
        weightsync: Ref,
        *,
        authority: Authority,
        served: Callable[[int], object],
        over: Callable[[], object],
        warn: Callable[[str], None],
    ) -> None:
        self.weightsync = weightsync
        self.waited_s = 0.0
        """How long the loop waited for the last one that went on beside it."""
        self._node = node
        self._authority = authority
        self._served = served
        self._over = over
        self._warn = warn
        self._beside: asyncio.Task[Published] | None = None

    async def publish(self, weights: Weights) -> Published:
        """Raises ``BusError``, and ``Deposed``."""
        order, about = Publish(weights.manifest, weights.source), f"version {weights.manifest.version}"
        published = await self._node.ask(self.weightsync, order, Published, timeout_s=PUBLISH_TIMEOUT_S, about=about)
        for engine, why in published.refused.items():
            self._warn(f"{engine} does not serve {about}: {why}")
        await self._authority.certain()
        self._served(published.version)
        return published

    def begin(self, weights: Weights) -> None:
        """Publish while the loop goes on; only after ``finished``."""
        self._beside = asyncio.create_task(self.publish(weights))
        self._beside.add_done_callback(lambda _: self._over())

    async def finished(self) -> None:
        """Wait for the one under way, if any. Raises what it failed for."""
        beside, self._beside = self._beside, None
        start = time.monotonic()
        if beside is not None:
            await beside
        self.waited_s = time.monotonic() - start

    def check(self) -> None:
        """Raises what the one under way has failed for."""
        if self._beside is not None and self._beside.done():
            self._beside.result()

    async def settled(self) -> None:
        """Wait for the one under way, however it ends; ``finished`` still says how."""
        if self._beside is not None:
            await asyncio.wait({self._beside})

    async def stop(self) -> None:
        """Leave nothing running."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)
