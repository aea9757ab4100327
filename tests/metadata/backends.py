"""The stores that must all behave alike, and a way to run a scenario on one of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

from coordinator.metadata import open_store
from coordinator.metadata.credentials import Credentials
from coordinator.metadata.protocol import Change, MetadataStore, Watch

HANG_S = 120.0  # a scenario that takes this long hangs: no assertion is about time
_numbers = itertools.count()


class Backend:
    """One kind of store. ``job`` is a path below ``/jobs`` that no other test uses."""

    def __init__(
        self, spec: str, directory: Path, timeout_s: float = 30.0, credentials: Credentials | None = None
    ) -> None:
        self.spec = spec
        self.directory = directory
        self.timeout_s = timeout_s
        self.credentials = credentials
        self.job = f"/jobs/t{next(_numbers)}"

    async def open(self) -> MetadataStore:
        return await open_store(
            self.spec, directory=self.directory, timeout_s=self.timeout_s, credentials=self.credentials
        )

    def run(self, scenario: Callable[[MetadataStore], Awaitable[None]]) -> None:
        async def opened() -> None:
            store = await self.open()
            try:
                await scenario(store)
            finally:
                await store.close()

        run(opened())


def run(scenario: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(HANG_S):
            await scenario

    asyncio.run(bounded())


async def take(watch: Watch, count: int) -> list[tuple[str, str]]:
    """The next changes, as (kind, path)."""
    changes: list[Change] = [await anext(watch) for _ in range(count)]
    return [(change.kind, change.path) for change in changes]
