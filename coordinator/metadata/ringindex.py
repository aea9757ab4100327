"""Which placement prefixes have ever had something on another ensemble than home: noted on the home ensemble, so that
what goes with an ensemble that is lost can be named.

    /ring-prefixes/<job>            of /jobs/<job>
    /ring-prefixes/<job>/<node>     of /jobs/<job>/nodes/<node>

Invariant: a prefix is noted before its first entry is made on another ensemble, or copied there. It stays noted.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from coordinator.metadata.protocol import EntryExists, MetadataStore

PREFIXES_PATH = "/ring-prefixes"


class PrefixIndex:
    """One client's; it asks once for each prefix."""

    def __init__(self, home: MetadataStore) -> None:
        self._home = home
        self._noted: set[str] = set()

    async def note(self, key: str) -> None:
        if key in self._noted:
            return
        with suppress(EntryExists):  # made by somebody else, or in an earlier life
            await self._home.create(f"{PREFIXES_PATH}/{key}", b"")
        self._noted.add(key)

    async def all(self) -> list[str]:
        """Sorted."""
        jobs = await self._home.children(PREFIXES_PATH)
        nodes = await asyncio.gather(*(self._home.children(f"{PREFIXES_PATH}/{job}") for job in jobs))
        return sorted([*jobs, *(f"{job}/{node}" for job, names in zip(jobs, nodes, strict=True) for node in names)])
