"""A run's side of the metadata store: open it, tell it things beside the loop, say how the run ended, close it.

Invariant: nothing in a run's work waits for the store. One that fails while the run goes on ends it, by name; one that
is gone when the run ends does not hide how it ended, and keeps it for ``CLOSE_GRACE_S`` at most, each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from actors.core import Node
from coordinator.facts import Facts
from coordinator.fate import Fate
from coordinator.interruption import Interrupted
from coordinator.job import Job
from coordinator.metadata import credentials, open_store
from coordinator.metadata.measured import Shard
from coordinator.metadata.protocol import StoreError
from coordinator.takeover import Led

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 2.0


class Told:
    """The open store of one run; made by ``open``."""

    def __init__(self, facts: Facts, fate: Fate, led: Led | None) -> None:
        self.facts = facts
        self._fate = fate
        self._led = led

    @classmethod
    async def open(cls, job: Job, directory: Path, fate: Fate, led: Led | None, shards: list[Shard]) -> Told:
        """A leader's store is open already. Raises ``Interrupted``, and what opening the store raises."""
        if led is not None:
            return cls(Facts(led.store, directory.name), fate, led)
        settings = job.coordinator
        opening = asyncio.create_task(
            open_store(
                settings.store,
                directory=directory / "metadata",
                timeout_s=settings.store_timeout_s,
                measure=shards,
                credentials=credentials.named(settings.store_credentials),
            )
        )
        try:
            return cls(Facts(await fate.race(opening), directory.name), fate, None)
        except Interrupted:
            opening.cancel()
            await asyncio.wait([opening], timeout=CLOSE_GRACE_S)
            raise

    def beside(self, node: Node, fact: Coroutine[Any, Any, None]) -> None:
        """Tell a fact while the loop goes on."""
        node.background(self._told(fact))

    async def _told(self, fact: Coroutine[Any, Any, None]) -> None:
        try:
            await fact
        except StoreError as error:
            if self._led is not None and not self._led.term.leads():
                log.warning("a fact was not told, by a leader that may not be one: %s", error)
            else:
                self._fate.fail(error)

    async def ended(self, status: int, version: int) -> None:
        """``status``: the run's exit status."""
        state = {0: "done", 130: "interrupted"}.get(status, "failed")
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                await self.facts.status(state, version)
        except (StoreError, TimeoutError) as error:
            log.warning("the metadata store was not told that the run has ended: %s", error)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                if self._led is not None:
                    await self._led.term.resign()
                await self.facts.close()
        except (StoreError, TimeoutError) as error:
            log.info("the metadata store was not closed: %s", error)
