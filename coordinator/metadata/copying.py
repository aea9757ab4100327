"""Copies the placement prefixes of one segment, and clears what does not belong where it is.

Invariant: nothing is written on a shard unless its fence is where the mover left it; and when a copy returns, every
entry that was read from the old shard, where nobody changes it, is on the new one, or its owner's session is over.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from coordinator.metadata import checks
from coordinator.metadata.protocol import Check, Delete, HasChildren, NoEntry, StoreError
from coordinator.metadata.ringindex import PrefixIndex
from coordinator.metadata.ringstate import HOME, RingState, moves, slot_of
from coordinator.metadata.shard import Raw, Shard

AT_ONCE = 64
"""Prefixes under way together: their requests share the connections."""
LOOK_S = 0.02
"""Between two looks for what owners do: it lies on two ensembles, so that no one watch shows it."""


async def keys_on(shard: Shard) -> list[str]:
    """Placement prefixes of which a shard has entries, its own or not."""
    jobs = await shard.children("/jobs")
    nodes = await asyncio.gather(*(shard.children(f"/jobs/{job}/nodes") for job in jobs))
    return [*jobs, *(f"{job}/{node}" for job, names in zip(jobs, nodes, strict=True) for node in names)]


def root_of(key: str) -> str:
    job, _, node = key.partition("/")
    return f"/jobs/{job}/nodes/{node}" if node else f"/jobs/{job}"


async def tree(shard: Shard, key: str) -> list[str]:
    """The prefix's paths, parents first."""
    root = root_of(key)
    found = [root]
    level = [root]
    while level:
        names = await asyncio.gather(*(shard.children(path) for path in level))
        level = [
            checks.child_of(path, name)
            for path, below in zip(level, names, strict=True)
            for name in below
            if "/" in key or path != f"{root}/nodes"  # those have prefixes of their own
        ]
        found += level
    return found


class Copier:
    """``state``: the segment is from ``done`` to ``frozen``; ``guards``: by shard."""

    def __init__(self, stores: Mapping[str, Shard], state: RingState, guards: Mapping[str, Check]) -> None:
        self.state = state
        self._stores = stores
        self._guards = guards
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._index = PrefixIndex(stores[HOME])

    async def copy(self, owners_s: float) -> int:
        """How many prefixes. Raises ``StoreError`` naming the entries whose owners do not come within ``owners_s``."""
        keys = [
            (key, *move)
            for shard in self.state.before
            for key in await keys_on(self._stores[shard])
            if (move := self._in_segment(key)) is not None and move[0] == shard
        ]
        copied = await asyncio.gather(*(self._copy(key, here, there, owners_s) for key, here, there in keys))
        return sum(copied)

    async def clear_targets(self) -> None:
        """What is left of an attempt on shards that do not hold the segment yet."""
        await self._clear(lambda move, shard: shard != move[0])

    async def clear_sources(self) -> None:
        """What is left on the shards that held the segment."""
        await self._clear(lambda move, shard: shard != move[1])

    async def clear_all(self, shards: Sequence[str]) -> None:
        """Parents of what was there, too."""
        for shard in shards:
            keys = await keys_on(self._stores[shard])
            for some in ([key for key in keys if "/" in key], [key for key in keys if "/" not in key]):
                await asyncio.gather(*(self._delete(key, shard) for key in some))

    async def clear_keys(self, keys: Sequence[str]) -> None:
        """What is anywhere of these prefixes."""
        wanted = set(keys)
        strays = [
            (key, member.id)
            for member in self.state.members
            for key in await keys_on(self._stores[member.id])
            if key in wanted
        ]
        await asyncio.gather(*(self._delete(key, shard) for key, shard in strays))

    def _in_segment(self, key: str) -> tuple[str, str] | None:
        move = moves(self.state, key)
        return move if move is not None and self.state.done <= slot_of(key) < self.state.frozen else None

    async def _clear(self, is_stray: Callable[[tuple[str, str], str], bool]) -> None:
        strays = [
            (key, member.id)
            for member in self.state.members
            for key in await keys_on(self._stores[member.id])
            if (move := self._in_segment(key)) is not None and is_stray(move, member.id)
        ]
        await asyncio.gather(*(self._delete(key, shard) for key, shard in strays))

    async def _delete(self, key: str, shard: str) -> None:
        async with self._at_once:
            store, guard = self._stores[shard], self._guards[shard]
            for path in reversed(await tree(store, key)):
                try:
                    await store.multi([guard, Delete(path)])
                except (NoEntry, HasChildren):
                    continue  # an owner's session ended; or other prefixes lie below it, as on every shard

    # ---- one prefix ----------------------------------------------------------------------------------------------

    async def _copy(self, key: str, here: str, there: str, owners_s: float) -> bool:
        """False where nothing is at the prefix but, maybe, the parents of others."""
        async with self._at_once:
            if there != HOME:
                await self._index.note(key)
            source, target = self._stores[here], self._stores[there]
            found = await asyncio.gather(*(source.inspect(path) for path in await tree(source, key)))
            entries = [raw for raw in found if raw is not None]
            for raw in entries:  # parents first
                if not raw.owner:
                    await target.restore(raw, self._guards[there], ephemeral=False)
        owned = [raw.path for raw in entries if raw.owner]
        if owned:  # outside: an owner that takes its time keeps no other prefix from being copied
            await self._owners(owned, here, there, owners_s)
        async with self._at_once:
            below = Counter(checks.parent_of(raw.path) for raw in entries)
            for raw in entries:
                if not raw.owner and raw.next_number > below[raw.path]:  # more were made than are left
                    await target.raise_number(raw.path, raw.next_number, self._guards[there])
            await self._drop_orphans(owned, here, there)
        return bool(entries)

    async def _owners(self, paths: Sequence[str], here: str, there: str, owners_s: float) -> None:
        """Wait until every ephemeral entry is there, or not here any longer either."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + owners_s
        while waiting := await self._not_adopted(paths, here, there):
            if loop.time() > deadline:
                raise StoreError(
                    f"{', '.join(waiting)}: the client that owns it has a session on shard {here} and has not "
                    f"registered it on shard {there} within {owners_s:g} s; can it reach that ensemble? The prefix "
                    "stays where it was"
                )
            await asyncio.sleep(LOOK_S)

    async def _not_adopted(self, paths: Sequence[str], here: str, there: str) -> list[str]:
        source, target = self._stores[here], self._stores[there]
        pairs = await asyncio.gather(*(asyncio.gather(source.inspect(path), target.inspect(path)) for path in paths))
        waiting = []
        for old, new in pairs:
            if old is not None and old.owner and not (new is not None and new.owner and _same(old, new)):
                waiting.append(old.path)
        return waiting

    async def _drop_orphans(self, paths: Sequence[str], here: str, there: str) -> None:
        """What an owner has registered there, and lost here since with its session, is not left there."""
        source, target = self._stores[here], self._stores[there]
        for path in paths:
            if await source.inspect(path) is None and await target.inspect(path) is not None:
                await target.multi([self._guards[there], Delete(path)])


def _same(old: Raw, new: Raw) -> bool:
    return old.value == new.value and new.version >= old.version
