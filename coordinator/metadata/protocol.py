"""Small, slow facts (membership, bindings, versions, the ring, leader epoch), behind one protocol.

Paths are absolute, ``/``-separated (``/jobs/j1/nodes/proxy-0``); values are bytes of at most 64 KiB. A path must be
created before it is written; parents are made as needed. Never the data path: no trajectory and no weight goes here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec

MAX_VALUE_BYTES = 64 * 1024


class Entry(msgspec.Struct, frozen=True):
    """A value and how often it was written since its creation (0 for a fresh one)."""

    path: str
    value: bytes
    version: int


class Change(msgspec.Struct, frozen=True):
    """One observed change below a watched prefix."""

    kind: Literal["created", "written", "deleted"]
    path: str


class Create(msgspec.Struct, frozen=True, tag=True):
    path: str
    value: bytes
    ephemeral: bool = False
    sequential: bool = False


class Write(msgspec.Struct, frozen=True, tag=True):
    path: str
    value: bytes
    expected: int | None = None


class Delete(msgspec.Struct, frozen=True, tag=True):
    path: str
    expected: int | None = None


class Check(msgspec.Struct, frozen=True, tag=True):
    """Changes nothing; the others are done only if this entry has that version."""

    path: str
    expected: int


Operation = Create | Write | Delete | Check
Done = str | int | None
"""What an operation of a ``multi`` did: the path that was created, the version that was written, None."""


class StoreError(RuntimeError):
    """Base of what stores raise; the message names the path and what was expected."""


class NoEntry(StoreError):
    """Nothing is at that path."""


class EntryExists(StoreError):
    """Something is at that path already."""


class VersionMismatch(StoreError):
    """The entry was written by somebody else since it was read."""


class CheckFailed(StoreError):
    """A ``Check`` did not hold, so nothing was changed."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class HasChildren(StoreError):
    """The entry cannot be deleted while others lie below it."""


class Refused(StoreError):
    """The store cannot do this as asked (a malformed path, a value over the limit, a child of an ephemeral entry, paths
    on several shards, a store that was closed); nothing was changed."""


class SessionLost(StoreError):
    """The server gave this client up: its ephemeral entries are gone. Every later call raises this too; whoever owns
    the entries opens the store again and registers anew."""


class StoreTimeout(StoreError):
    """The store did not answer within the deadline; the operation may or may not have taken effect."""


class Watch(Protocol):
    """An ``AsyncIterator[Change]``; whoever stops reading closes it (``contextlib.aclosing``)."""

    def __aiter__(self) -> AsyncIterator[Change]: ...

    async def __anext__(self) -> Change: ...

    async def aclose(self) -> None:
        """No more changes; whoever waits for one gets the end. Idempotent."""


class MetadataStore(Protocol):
    """Every method may raise ``StoreTimeout``; the deadline is given when the store is opened."""

    async def get(self, path: str) -> Entry | None:
        """The entry, or None."""

    async def create(self, path: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        """Make an entry and return its path (with a ten-digit rising number appended where ``sequential``). An
        ephemeral entry goes when this client's session ends, and has no children. Raises ``EntryExists``."""

    async def write(self, path: str, value: bytes, *, expected: int | None = None) -> int:
        """Replace the value, if the entry's version is ``expected`` where given; returns the new version. Raises
        ``NoEntry``, ``VersionMismatch``."""

    async def delete(self, path: str, *, expected: int | None = None) -> None:
        """Remove an entry without children. Raises ``NoEntry``, ``VersionMismatch``, ``HasChildren``."""

    async def children(self, path: str) -> list[str]:
        """Names directly below ``path``, sorted; empty where there is nothing."""

    async def multi(self, operations: Sequence[Operation]) -> list[Done]:
        """All or none; what each did. Raises what the first one raises that fails (``CheckFailed`` for a ``Check``).
        On a sharded store all paths must share a placement prefix."""

    def watch(self, prefix: str) -> Watch:
        """Changes of the entries directly below ``prefix``, from now on, until the iterator or the store is closed.

        What this client does or reads after the call comes after the start of the watch, so "watch, then read, then
        follow the changes" misses nothing. Writes in quick succession may be reported as one, an entry that came and
        went between two looks not at all, and one that stayed as it was may be reported as written: a change says what
        to read again. Raises ``SessionLost`` from the iterator. Must be called on a running event loop.
        """

    async def close(self) -> None:
        """End the session: its ephemeral entries go. Idempotent."""
