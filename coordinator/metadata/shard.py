"""What a store must be able to do besides, to be one of several shards: entries can move to it and from it, exactly.

Invariant: an entry that was restored on another shard is the one that was inspected: the same value, the same version
(so that nobody's compare-and-set succeeds or fails for it), and below it the numbers go on where they were.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from coordinator.metadata.protocol import Check, Entry, MetadataStore


class Raw(msgspec.Struct, frozen=True):
    """An entry, with what only its own store knows of it."""

    path: str
    value: bytes
    version: int
    owner: Literal["", "me", "another"]  # whose session an ephemeral entry ends with; empty for one that stays
    next_number: int  # of the next sequential entry below it


class Shard(MetadataStore, Protocol):
    """``mark`` is an entry that is read from the same server, not before the other one: that which has not changed
    since had not changed then."""

    async def get_then(self, path: str, mark: str) -> tuple[Entry | None, Entry | None]:
        """The entry at ``path``, then the one at ``mark``."""

    async def children_then(self, path: str, mark: str) -> tuple[list[str], Entry | None]:
        """The names below ``path``, then the entry at ``mark``."""

    async def inspect(self, path: str) -> Raw | None:
        """The entry, or None."""

    async def restore(self, raw: Raw, guard: Check, *, ephemeral: bool) -> None:
        """Make the entry as it was inspected elsewhere (without what is below it), this client's own where
        ``ephemeral``. One that is there as somebody's parent is made like it; if its version is too high for that, it
        rises by one instead. Raises ``CheckFailed`` where ``guard`` does not hold; some of it may be done then."""

    async def raise_number(self, path: str, number: int, guard: Check) -> None:
        """The next sequential entry below ``path`` gets this number or a higher one. Raises as ``restore`` does."""


def restored_version(raw: Raw, found: Entry) -> int:
    """Which version an entry gets that is there already: its own only where nobody can have seen another value with
    it, and versions never fall."""
    if found.version < raw.version or (found.version == raw.version and found.value == raw.value):
        return raw.version
    return found.version + 1
