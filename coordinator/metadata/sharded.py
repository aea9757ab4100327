"""The store over several ensembles: a path lies on exactly one of them, the same one for every client.

==================================  ==========================================
path                                lies on
==================================  ==========================================
``/jobs/<job>/nodes/<node>``, and   the owner of ``<job>/<node>`` on the ring
everything below it
any other path below ``/jobs``      the owner of ``<job>`` on the ring
everything else: ``/members``,      the home ensemble, the first one listed
``/leader``, ``/ring``, ``/jobs``
==================================  ==========================================

So a node's own facts share a shard, and may change together in one ``multi``; facts of two nodes may not, and a
``multi`` over several shards is refused. The entries directly below ``/jobs`` and ``/jobs/<job>/nodes`` are spread:
``children`` and ``watch`` of those two ask all shards, a sequential entry there is refused (its number would decide its
shard), and deleting them while somebody creates an entry below is not atomic.

Each ensemble holds at ``/ring`` which shard it is, of how many: a client that lists them otherwise is refused, instead
of looking in the wrong places. An ensemble may change its addresses, not its place in the list. There is one session an
ensemble: an ephemeral entry goes with the session of the ensemble that it lies on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing

import msgspec

from coordinator.metadata import checks
from coordinator.metadata.protocol import (
    Create,
    Delete,
    Entry,
    EntryExists,
    MetadataStore,
    Operation,
    Refused,
    StoreError,
    Watch,
)
from coordinator.metadata.ring import Ring
from coordinator.metadata.watching import ChangeQueue

RING_PATH = "/ring"


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an ensemble holds at ``/ring``."""

    shard: int
    shards: int
    vnodes: int


def placement_key(path: str) -> str | None:
    """What the ring hashes for a path; None: home."""
    names = path[1:].split("/")
    if names[0] != "jobs" or len(names) == 1:
        return None
    if len(names) >= 4 and names[2] == "nodes":
        return f"{names[1]}/{names[3]}"
    return names[1]


def is_spread(path: str) -> bool:
    """Whether the entries directly below ``path`` lie on several shards."""
    names = path[1:].split("/")
    return names[0] == "jobs" and (len(names) == 1 or (len(names) == 3 and names[2] == "nodes"))


class ShardedStore(MetadataStore):
    """Owns the shards it is given: closing it closes them. ``timeout_s`` bounds calls that ask several shards."""

    def __init__(self, shards: Sequence[MetadataStore], *, name: str, timeout_s: float) -> None:
        self._name = name
        self._shards = tuple(shards)
        self._timeout_s = timeout_s
        # Numbers, not addresses: an ensemble that moves to other machines keeps its entries.
        self._ring = Ring([str(number) for number in range(len(shards))])

    @classmethod
    async def open(cls, shards: Sequence[MetadataStore], *, name: str, timeout_s: float) -> ShardedStore:
        """Raises ``StoreError`` where an ensemble was used under another list. The shards stay the caller's then."""
        store = cls(shards, name=name, timeout_s=timeout_s)
        async with store._within("open"):
            await asyncio.gather(*(store._take_place(number) for number in range(len(shards))))
        return store

    def shard_of(self, path: str) -> int:
        """Position in the list of the ensemble on which ``path`` lies."""
        key = placement_key(path)
        return 0 if key is None else int(self._ring.owner(key))

    async def get(self, path: str) -> Entry | None:
        return await self._on(path).get(path)

    async def create(self, path: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        checks.check_changed_path(path)
        checks.check_value(path, value)
        if sequential and is_spread(checks.parent_of(path)):
            raise Refused(f"{path}: sequential entries here would lie on several shards; put them one level lower")
        async with self._within(f"create {path}"):
            await self._make_parents(path)
            return await self._on(path).create(path, value, ephemeral=ephemeral, sequential=sequential)

    async def write(self, path: str, value: bytes, *, expected: int | None = None) -> int:
        return await self._on(path).write(path, value, expected=expected)

    async def delete(self, path: str, *, expected: int | None = None) -> None:
        async with self._within(f"delete {path}"):
            await self._check_empty(path)
            await self._on(path).delete(path, expected=expected)

    async def children(self, path: str) -> list[str]:
        if not is_spread(path):
            return await self._on(path).children(path)
        async with self._within(f"children {path}"):
            found = await asyncio.gather(*(shard.children(path) for shard in self._shards))
        # A shard may also hold a path as the parent of one of its own; the entry itself is its owner's.
        return sorted(
            name
            for number, names in enumerate(found)
            for name in names
            if self.shard_of(checks.child_of(path, name)) == number
        )

    async def multi(self, operations: Sequence[Operation]) -> None:
        operations = tuple(operations)
        checks.check_operations(operations)
        if not operations:
            return
        places = {operation.path: self.shard_of(operation.path) for operation in operations}
        if len(set(places.values())) > 1:
            listed = ", ".join(f"{path} on shard {number}" for path, number in places.items())
            raise Refused(
                f"multi: the paths lie on several shards ({listed}); all or none holds on one shard only, so keep to "
                "one node's entries (/jobs/<job>/nodes/<node>/...), or change them one by one"
            )
        async with self._within(f"multi {', '.join(places)}"):
            for operation in operations:
                if isinstance(operation, Create):
                    await self._make_parents(operation.path)
                elif isinstance(operation, Delete):
                    await self._check_empty(operation.path)
            await self._on(operations[0].path).multi(operations)

    def watch(self, prefix: str) -> Watch:
        checks.check_path(prefix)
        if not is_spread(prefix):
            return self._on(prefix).watch(prefix)
        return _merged([shard.watch(prefix) for shard in self._shards], owner=self.shard_of)

    async def close(self) -> None:
        results = await asyncio.gather(*(shard.close() for shard in self._shards), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _on(self, path: str) -> MetadataStore:
        checks.check_path(path)
        return self._shards[self.shard_of(path)]

    def _within(self, doing: str) -> AbstractAsyncContextManager[None]:
        return checks.within(self._timeout_s, self._name, doing)

    async def _make_parents(self, path: str) -> None:
        """Make those parents that lie on other shards than ``path``; its own shard makes the others."""
        for ancestor in checks.ancestors_of(path):
            if self.shard_of(ancestor) != self.shard_of(path) and await self._on(ancestor).get(ancestor) is None:
                try:
                    await self._on(ancestor).create(ancestor, b"")
                except EntryExists:
                    continue  # somebody was faster, and that is as good

    async def _check_empty(self, path: str) -> None:
        if is_spread(path) and await self.children(path):
            raise checks.has_children(path)

    async def _take_place(self, number: int) -> None:
        place = Place(shard=number, shards=len(self._shards), vnodes=self._ring.vnodes)
        try:
            await self._shards[number].create(RING_PATH, msgspec.json.encode(place))
        except EntryExists:
            entry = await self._shards[number].get(RING_PATH)
            found = b"" if entry is None else entry.value
            if _decoded(found) != place:
                raise StoreError(
                    f"{RING_PATH} on shard {number}: expected {place}, found {found.decode(errors='replace')}; list "
                    f"the same ensembles in the same order as before, or delete {RING_PATH} on each of them once no "
                    "job uses them"
                ) from None


def _decoded(value: bytes) -> Place | None:
    try:
        return msgspec.json.decode(value, type=Place)
    except msgspec.DecodeError:
        return None


def _merged(watches: Sequence[Watch], owner: Callable[[str], int]) -> Watch:
    """What the shards report (in the order of the shards' numbers), each about the entries that it owns."""

    async def pass_on(number: int, watch: Watch) -> None:
        async with aclosing(watch):
            async for change in watch:
                if owner(change.path) == number:
                    merged.put(change)

    async def pass_all_on() -> None:
        tasks = [asyncio.create_task(pass_on(number, watch)) for number, watch in enumerate(watches)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    merged = ChangeQueue(on_close=lambda _: passing.cancel())
    passing = asyncio.create_task(pass_all_on())
    passing.add_done_callback(lambda task: merged.end(None if task.cancelled() else task.exception()))
    return merged
