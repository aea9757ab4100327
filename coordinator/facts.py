"""What a run writes into the metadata store: small, slow facts that others may look up.

    /members/<node>                    ephemeral: where the node listens, its roles
    /jobs/<run>/status                 state, version
    /jobs/<run>/nodes/<node>/affinity  the node's affinity map
    /jobs/<run>/nodes/<node>/address   where it listens, as long as it takes part; outlives the leader
    /jobs/<run>/nodes/<node>/binding   which processes run there, on which device

Invariant: never on the path of a trajectory or a tensor; a store that fails is an error of the run, by name, within
the store's own deadline.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress

import msgspec

from actors.formats import RUN_FACTS, FormatRefused
from bus.message import NodeAddress
from coordinator.messages import Join
from coordinator.metadata.abandoning import LOST_PATH
from coordinator.metadata.protocol import Create, Delete, EntryExists, MetadataStore, NoEntry
from coordinator.resources.resolve import Placement

log = logging.getLogger(__name__)


class FactsUnreadable(RuntimeError):
    """What a run has written is of a format that this software cannot read; one line."""


class RunStatus(msgspec.Struct, frozen=True):
    """Content of ``/jobs/<run>/status``."""

    state: str  # "starting", "running", then "done", "interrupted" or "failed"
    version: int
    format: int = RUN_FACTS.oldest  # of all that is below ``/jobs/<run>``


class _Format(msgspec.Struct, frozen=True):
    """What can be read of every format, past and future."""

    format: int = RUN_FACTS.oldest


class Member(msgspec.Struct, frozen=True):
    """Content of ``/members/<node>``."""

    run: str
    control: str
    epoch: int
    roles: list[str]


class Facts:
    """One run's facts."""

    def __init__(self, store: MetadataStore, run: str) -> None:
        self._store = store
        self._run = run
        self._order = asyncio.Lock()  # what is said last stays
        self._told: dict[str, bytes] = {}  # what stays: path and value

    async def status(self, state: str, version: int) -> None:
        await self._put(f"/jobs/{self._run}/status", RunStatus(state, version, RUN_FACTS.current))

    async def joined(self, join: Join) -> None:
        """A node takes part."""
        name = f"{self._run}.{join.node.name}"
        member = Member(self._run, join.node.control, join.node.epoch, list(join.roles))
        await self._put(f"/members/{name}", member, ephemeral=True)
        await self._put_bytes(f"/jobs/{self._run}/nodes/{join.node.name}/affinity", join.affinity)

        await self._put(f"/jobs/{self._run}/nodes/{join.node.name}/address", join.node)

    async def left(self, node: str) -> None:
        """A node takes part no longer."""
        for path in (f"/members/{self._run}.{node}", f"/jobs/{self._run}/nodes/{node}/address"):
            async with self._order:
                self._told.pop(path, None)
                with suppress(NoEntry):
                    await self._store.delete(path)

    async def last_status(self) -> RunStatus | None:
        """Raises ``FactsUnreadable`` where other software has written them, in a way that this one does not know."""
        entry = await self._store.get(f"/jobs/{self._run}/status")
        if entry is None:
            return None
        try:
            RUN_FACTS.check(msgspec.json.decode(entry.value, type=_Format).format, f"/jobs/{self._run}")
        except FormatRefused as error:
            raise FactsUnreadable(str(error)) from None
        return msgspec.json.decode(entry.value, type=RunStatus)

    async def addresses(self) -> list[NodeAddress]:
        """Of all that take part, by name."""
        nodes = f"/jobs/{self._run}/nodes"
        entries = [await self._store.get(f"{nodes}/{name}/address") for name in await self._store.children(nodes)]
        return [msgspec.json.decode(entry.value, type=NodeAddress) for entry in entries if entry is not None]

    async def bound(self, node: str, placement: Placement) -> None:
        await self._put(f"/jobs/{self._run}/nodes/{node}/binding", placement)

    async def _put(self, path: str, value: msgspec.Struct, *, ephemeral: bool = False) -> None:
        await self._put_bytes(path, msgspec.json.encode(value), ephemeral=ephemeral)

    async def _put_bytes(self, path: str, value: bytes, *, ephemeral: bool = False) -> None:
        async with self._order:
            if not ephemeral:
                self._told[path] = value
            while not await self._put_once(path, value, ephemeral):
                pass  # somebody made or deleted it meanwhile

    async def tell_again(self) -> None:
        """Until the store is closed: whenever a part of it was lost for good, tell what this process has told."""
        async with aclosing(self._store.watch(LOST_PATH)) as changes:
            async for change in changes:
                log.warning("%s: a part of the metadata store was lost; it is told again what was there", change.path)
                for path in list(self._told):
                    if (value := self._told.get(path)) is not None:
                        await self._put_bytes(path, value)

    async def _put_once(self, path: str, value: bytes, ephemeral: bool) -> bool:
        with suppress(EntryExists):
            await self._store.create(path, value, ephemeral=ephemeral)
            return True
        with suppress(EntryExists, NoEntry):
            if ephemeral:  # made anew: it may be another session's, and would go with that
                await self._store.multi([Delete(path), Create(path, value, ephemeral=True)])
            else:
                await self._store.write(path, value)
            return True
        return False

    async def close(self) -> None:
        await self._store.close()
