"""The store over several ensembles: a path lies on exactly one of them at a time, the same one for every client.

==================================  ==========================================
path                                lies on
==================================  ==========================================
``/jobs/<job>/nodes/<node>``, and   the holder of ``<job>/<node>`` on the ring
everything below it
any other path below ``/jobs``      the holder of ``<job>`` on the ring
everything else: ``/members``,      the home ensemble, the first one listed
``/leader``, ``/ring``, ``/jobs``
==================================  ==========================================

So a node's own facts share a shard, and may change together in one ``multi``; facts of two nodes may not, and a
``multi`` over several placement prefixes is refused. The entries directly below ``/jobs`` and ``/jobs/<job>/nodes`` are
spread: ``children`` and ``watch`` of those two ask all shards, a sequential entry there is refused (its number would
decide its shard), and deleting them while somebody creates an entry below is not atomic.

The ring is an entry of the home ensemble and may change while clients are at work (``moving``): every change and every
read of what the ring places is made under the guard of its shard's fence, and again elsewhere where that has moved on.
There is one session an ensemble: an ephemeral entry goes with the session of the ensemble that it lies on, and moves
with its prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from coordinator.metadata import checks
from coordinator.metadata.adopting import Adopter
from coordinator.metadata.protocol import (
    CheckFailed,
    Create,
    Delete,
    Done,
    Entry,
    EntryExists,
    MetadataStore,
    Operation,
    Refused,
    StoreTimeout,
    Watch,
    Write,
)
from coordinator.metadata.ringclient import Connect, RingClient
from coordinator.metadata.ringindex import PrefixIndex
from coordinator.metadata.ringstate import FENCE_PATH, HOME, RingState, holder, is_moving, source
from coordinator.metadata.ringwatch import RingWatch
from coordinator.metadata.shard import Shard

_Found = TypeVar("_Found")


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


def source_of(state: RingState, path: str) -> str:
    """The shard on which a path is to be looked for, be it on its way elsewhere."""
    key = placement_key(path)
    return HOME if key is None else source(state, key)


class ShardedStore(MetadataStore):
    """Made by ``open``. ``timeout_s`` bounds every call."""

    def __init__(self, ring: RingClient, *, name: str, timeout_s: float) -> None:
        self.ring = ring
        self._name = name
        self._timeout_s = timeout_s
        self._own = Adopter(ring, placement_key, self._make_parents)
        self._index = PrefixIndex(ring.home)

    @classmethod
    async def open(
        cls,
        ensembles: Sequence[str],
        *,
        home: Shard,
        connect: Connect,
        name: str,
        timeout_s: float,
        without: Collection[str] = (),
    ) -> ShardedStore:
        """``home`` is the first of the ``ensembles`` (hosts), ``connect`` opens the others. Raises ``StoreError`` where
        an ensemble was used under another list. ``home`` stays the caller's then; else it is closed with the rest.
        ``without``: shards that are not connected; what they hold is not to be asked for."""
        async with checks.within(timeout_s, name, "open"):
            ring = await RingClient.open(ensembles, home, connect, name=name, without=without)
            return cls(ring, name=name, timeout_s=timeout_s)

    def shard_of(self, path: str) -> str:
        """Id of the shard on which ``path`` lies, as far as this client knows."""
        return source_of(self.ring.state, path)

    async def get(self, path: str) -> Entry | None:
        checks.check_path(path)
        key = placement_key(path)
        if key is None:
            return await self.ring.home.get(path)
        return await self._read(key, f"get {path}", lambda shard: shard.get_then(path, FENCE_PATH))

    async def create(self, path: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        checks.check_changed_path(path)
        checks.check_value(path, value)
        if sequential and is_spread(checks.parent_of(path)):
            raise Refused(f"{path}: sequential entries here would lie on several shards; put them one level lower")
        if placement_key(path) is None:
            return await self.ring.home.create(path, value, ephemeral=ephemeral, sequential=sequential)
        (made,) = await self._commit(f"create {path}", [Create(path, value, ephemeral, sequential)])
        return str(made)

    async def write(self, path: str, value: bytes, *, expected: int | None = None) -> int:
        checks.check_changed_path(path)
        checks.check_value(path, value)
        checks.check_expected(path, expected)
        if placement_key(path) is None:
            return await self.ring.home.write(path, value, expected=expected)
        (version,) = await self._commit(f"write {path}", [Write(path, value, expected)])
        return int(version or 0)

    async def delete(self, path: str, *, expected: int | None = None) -> None:
        checks.check_changed_path(path)
        checks.check_expected(path, expected)
        if placement_key(path) is None:
            await self._check_empty(path)
            await self.ring.home.delete(path, expected=expected)
        else:
            await self._commit(f"delete {path}", [Delete(path, expected)])

    async def children(self, path: str) -> list[str]:
        checks.check_path(path)
        if is_spread(path):
            return await self._children_everywhere(path)
        key = placement_key(path)
        if key is None:
            return await self.ring.home.children(path)
        return await self._read(key, f"children {path}", lambda shard: shard.children_then(path, FENCE_PATH))

    async def multi(self, operations: Sequence[Operation]) -> list[Done]:
        operations = tuple(operations)
        checks.check_operations(operations)
        if not operations:
            return []
        keys = {placement_key(operation.path) for operation in operations}
        if len(keys) > 1:
            listed = ", ".join(f"{operation.path} on shard {self.shard_of(operation.path)}" for operation in operations)
            raise Refused(
                f"multi: the paths have several placement prefixes and may lie on several shards ({listed}); all or "
                "none holds on one shard only: keep to one node's entries (/jobs/<job>/nodes/<node>/...), or change "
                "them one by one"
            )
        if None in keys:
            return await self.ring.home.multi(operations)
        return await self._commit(f"multi {', '.join(operation.path for operation in operations)}", operations)

    def watch(self, prefix: str) -> Watch:
        checks.check_path(prefix)
        key = placement_key(prefix)
        if is_spread(prefix):
            return RingWatch(
                self.ring,
                prefix,
                shards=lambda state: {member.id for member in state.members},
                owner=source_of,
                children=self.children,
            )
        if key is None:
            return self.ring.home.watch(prefix)
        return RingWatch(
            self.ring,
            prefix,
            shards=lambda state: {source(state, key)},
            owner=lambda state, _: source(state, key),
            children=self.children,
        )

    async def close(self) -> None:
        self._own.close()
        await self.ring.close()

    # Under guard.

    async def _commit(self, doing: str, operations: Sequence[Operation]) -> list[Done]:
        key = placement_key(operations[0].path) or ""
        for operation in operations:
            if isinstance(operation, Create) and operation.ephemeral:
                self._own.expect(operation.path, operation.value)
        async with self._within(doing, key):
            for operation in operations:
                if isinstance(operation, Create):
                    await self._make_parents(operation.path)
                elif isinstance(operation, Delete):
                    await self._check_empty(operation.path)
            while True:
                held = await self.ring.held(key)
                if held.shard != HOME and any(isinstance(operation, Create) for operation in operations):
                    await self._index.note(key)
                try:
                    done = (await held.store.multi([held.guard, *operations]))[1:]
                except CheckFailed as error:
                    if error.path != FENCE_PATH:
                        raise
                    self.ring.passed(held.shard, held.guard)
                else:
                    self._own.made(operations, done)
                    return done

    async def _read(
        self, key: str, doing: str, read: Callable[[Shard], Awaitable[tuple[_Found, Entry | None]]]
    ) -> _Found:
        async with self._within(doing, key):
            while True:
                held = await self.ring.held(key)
                found, fence = await read(held.store)
                if fence is not None and fence.version == held.guard.expected:
                    return found
                self.ring.passed(held.shard, held.guard)

    async def _children_everywhere(self, path: str) -> list[str]:
        async with self._within(f"children {path}"):
            while True:
                state = self.ring.state
                if state.frozen > state.done:
                    await self.ring.next_state(state)
                    continue
                shards = [member.id for member in state.members]
                found = await asyncio.gather(*(self._listed(shard, path) for shard in shards))
                if self.ring.state is not state or None in found:
                    continue
                # A shard may also hold a path as the parent of one of its own; the entry itself is its holder's.
                return sorted(
                    name
                    for shard, names in zip(shards, found, strict=True)
                    for name in names or []
                    if holder(state, placement_key(checks.child_of(path, name)) or "") == shard
                )

    async def _listed(self, shard: str, path: str) -> list[str] | None:
        """None where the fence has moved on."""
        guard = await self.ring.guard(shard)
        names, fence = await self.ring.stores[shard].children_then(path, FENCE_PATH)
        if fence is not None and fence.version == guard.expected:
            return names
        self.ring.passed(shard, guard)
        return None

    @asynccontextmanager
    async def _within(self, doing: str, key: str | None = None) -> AsyncIterator[None]:
        try:
            async with checks.within(self._timeout_s, self._name, doing):
                yield
        except StoreTimeout as error:
            if key is None or not is_moving(self.ring.state, key):
                raise
            raise StoreTimeout(
                f"{error}: its placement prefix {key} is on its way to another shard; if nobody moves it any longer, "
                "run bin/admin shards resume"
            ) from None

    async def _make_parents(self, path: str) -> None:
        """Make those parents that have another placement prefix than ``path``; its own shard makes the others."""
        key = placement_key(path)
        others = [ancestor for ancestor in checks.ancestors_of(path) if placement_key(ancestor) != key]
        found = await asyncio.gather(*map(self.get, others))
        for ancestor, entry in zip(others, found, strict=True):
            if entry is None:
                try:
                    await self.create(ancestor, b"")
                except EntryExists:
                    continue  # somebody was faster, and that is as good

    async def _check_empty(self, path: str) -> None:
        if is_spread(path) and await self.children(path):
            raise checks.has_children(path)
