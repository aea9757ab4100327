"""What a run writes into the metadata store: small, slow facts that others may look up.

    /members/<node>                    ephemeral: where the node listens, its roles
    /jobs/<run>/status                 state, version
    /jobs/<run>/nodes/<node>/affinity  the node's affinity map
    /jobs/<run>/nodes/<node>/address   where it listens, as long as it takes part; outlives the leader
    /jobs/<run>/nodes/<node>/binding   which processes run there, on which device

Invariant: never on the path of a trajectory or a tensor; a store that fails is an error of the run, by name, within
the store's own deadline. Of what is said of one node, what is said last stays; what is said of several goes side by
side, so that a new leader is not kept from leading by all that it has to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
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
        self._orders: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by node; "" is the run itself
        self._told: dict[str, bytes] = {}  # what stays: path and value

    async def status(self, state: str, version: int) -> None:
        async with self._orders[""]:
            await self._put(f"/jobs/{self._run}/status", RunStatus(state, version, RUN_FACTS.current))

    async def joined(self, join: Join) -> None:
        """A node takes part."""
        name = join.node.name
        member = Member(self._run, join.node.control, join.node.epoch, list(join.roles))
        async with self._orders[name]:
            await asyncio.gather(
                self._put(f"/members/{self._run}.{name}", member, ephemeral=True),
                self._put_bytes(self._path(name, "affinity"), join.affinity),
                self._put(self._path(name, "address"), join.node),
            )

    async def hardware(self, join: Join) -> None:
        """A node's is not as it was."""
        async with self._orders[join.node.name]:
            await self._put_bytes(self._path(join.node.name, "affinity"), join.affinity)

    async def left(self, node: str) -> None:
        """A node takes part no longer."""
        async with self._orders[node]:
            for path in (f"/members/{self._run}.{node}", self._path(node, "address")):
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
        names = await self._store.children(f"/jobs/{self._run}/nodes")
        entries = await asyncio.gather(*(self._store.get(self._path(name, "address")) for name in names))
        return [msgspec.json.decode(entry.value, type=NodeAddress) for entry in entries if entry is not None]

    async def bound(self, node: str, placement: Placement) -> None:
        async with self._orders[node]:
            await self._put(self._path(node, "binding"), placement)

    def _path(self, node: str, fact: str) -> str:
        return f"/jobs/{self._run}/nodes/{node}/{fact}"

    async def _put(self, path: str, value: msgspec.Struct, *, ephemeral: bool = False) -> None:
        await self._put_bytes(path, msgspec.json.encode(value), ephemeral=ephemeral)

    async def _put_bytes(self, path: str, value: bytes, *, ephemeral: bool = False) -> None:
        if not ephemeral:
            self._told[path] = value
        while not await self._put_once(path, value, ephemeral):
            pass  # somebody made or deleted it meanwhile

    async def tell_again(self) -> None:
        """Until the store is closed: whenever a part of it was lost for good, tell what this process has told."""
        async with aclosing(self._store.watch(LOST_PATH)) as changes:
            async for change in changes:
                log.warning("%s: a part of the metadata store was lost; it is told again what was there", change.path)
                await asyncio.gather(*(self._again(path) for path in list(self._told)))

    async def _again(self, path: str) -> None:
        names = path.split("/")
        async with self._orders[names[4] if names[3] == "nodes" else ""]:
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
