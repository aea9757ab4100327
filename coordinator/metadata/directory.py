"""Names of actors and addresses of nodes, kept in the metadata store: ``actors.core.directory`` over any store.

Invariant: an entry lives as long as the session of the process that announced it, so that what has died is not found
for long; a withdrawal takes away no later announcement.
"""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from actors.core.directory import DirectoryError
from actors.core.ref import Ref
from coordinator.metadata.protocol import (
    Create,
    Delete,
    Entry,
    EntryExists,
    MetadataStore,
    NoEntry,
    StoreError,
    VersionMismatch,
)

ATTEMPTS = 5
"""Against others who announce or withdraw the same name at the same moment."""


class StoreDirectory:
    """``prefix``: below which the entries lie, one for each name."""

    def __init__(self, store: MetadataStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{quote(name, safe='@ ').replace('.', '%2E')}"

    async def announce(self, name: str, ref: Ref) -> None:
        path, value = self._path(name), msgspec.json.encode(ref)
        for _ in range(ATTEMPTS):
            try:
                await self._replace(await self._store.get(path), path, value)
            except (EntryExists, NoEntry, VersionMismatch):
                continue
            except StoreError as error:
                raise DirectoryError(f"{name!r} could not be announced: {error}") from error
            return
        raise DirectoryError(f"{name!r} could not be announced: others announce it at the same time")

    async def _replace(self, entry: Entry | None, path: str, value: bytes) -> None:
        """An entry of another session is not written but made anew, so that it lives as long as this one's."""
        create = Create(path, value, ephemeral=True)
        if entry is None:
            await self._store.create(path, value, ephemeral=True)
        else:
            await self._store.multi([Delete(path, expected=entry.version), create])

    async def withdraw(self, name: str, ref: Ref) -> None:
        path = self._path(name)
        try:
            entry = await self._store.get(path)
            if entry is not None and entry.value == msgspec.json.encode(ref):
                await self._store.delete(path, expected=entry.version)
        except (NoEntry, VersionMismatch):  # somebody else was faster
            return
        except StoreError as error:
            raise DirectoryError(f"{name!r} could not be withdrawn: {error}") from error

    async def find(self, name: str) -> Ref | None:
        try:
            entry = await self._store.get(self._path(name))
            return None if entry is None else msgspec.json.decode(entry.value, type=Ref)
        except StoreError as error:
            raise DirectoryError(f"{name!r} could not be looked up: {error}") from error
        except msgspec.MsgspecError as error:
            raise DirectoryError(f"{self._path(name)} holds no ref: {error}") from error
