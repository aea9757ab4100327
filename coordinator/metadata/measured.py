"""A store whose calls are timed: how fast each shard is, as its user finds it.

Invariant: nothing is added to a call but two looks at the clock; what it returns and raises is its own.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from coordinator.metadata.protocol import (
    Check,
    Create,
    Done,
    Entry,
    EntryExists,
    HasChildren,
    NoEntry,
    Operation,
    Refused,
    StoreError,
    VersionMismatch,
    Watch,
    Write,
)
from coordinator.metadata.shard import Raw
from coordinator.metadata.shard import Shard as _Shard

BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the histogram's buckets; a last one is for all that took longer."""


ANSWERS = (NoEntry, EntryExists, VersionMismatch, HasChildren, Refused)
"""What a store that works says, too: no failures."""


class Latency(msgspec.Struct):
    """Of one kind of call."""

    operation: str
    calls: int = 0
    failures: int = 0
    seconds: float = 0.0  # all together
    slowest_s: float = 0.0
    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def took(self, seconds: float) -> None:
        self.calls += 1
        self.seconds += seconds
        self.slowest_s = max(self.slowest_s, seconds)
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1


class Shard(msgspec.Struct):
    """One store and its calls."""

    name: str
    operations: list[Latency] = []

    def of(self, operation: str) -> Latency:
        for latency in self.operations:
            if latency.operation == operation:
                return latency
        self.operations.append(Latency(operation))
        return self.operations[-1]


class MeasuredStore(_Shard):
    """Owns the store that it is given, and notes every call's time under ``shard``."""

    def __init__(self, store: _Shard, shard: Shard) -> None:
        self._store = store
        self._shard = shard

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        latency, start = self._shard.of(operation), time.monotonic()
        try:
            yield
        except ANSWERS:
            raise
        except StoreError:
            latency.failures += 1
            raise
        finally:
            latency.took(time.monotonic() - start)

    async def get(self, path: str) -> Entry | None:
        with self._timed("get"):
            return await self._store.get(path)

    async def create(self, path: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        with self._timed("create"):
            return await self._store.create(path, value, ephemeral=ephemeral, sequential=sequential)

    async def write(self, path: str, value: bytes, *, expected: int | None = None) -> int:
        with self._timed("write"):
            return await self._store.write(path, value, expected=expected)

    async def delete(self, path: str, *, expected: int | None = None) -> None:
        with self._timed("delete"):
            await self._store.delete(path, expected=expected)

    async def children(self, path: str) -> list[str]:
        with self._timed("children"):
            return await self._store.children(path)

    async def multi(self, operations: Sequence[Operation]) -> list[Done]:
        with self._timed(_name_of(operations)):
            return await self._store.multi(operations)

    async def get_then(self, path: str, mark: str) -> tuple[Entry | None, Entry | None]:
        with self._timed("get"):
            return await self._store.get_then(path, mark)

    async def children_then(self, path: str, mark: str) -> tuple[list[str], Entry | None]:
        with self._timed("children"):
            return await self._store.children_then(path, mark)

    async def inspect(self, path: str) -> Raw | None:
        return await self._store.inspect(path)

    async def restore(self, raw: Raw, guard: Check, *, ephemeral: bool) -> None:
        with self._timed("move"):
            await self._store.restore(raw, guard, ephemeral=ephemeral)

    async def raise_number(self, path: str, number: int, guard: Check) -> None:
        await self._store.raise_number(path, number, guard)

    def watch(self, prefix: str) -> Watch:
        return self._store.watch(prefix)

    async def close(self) -> None:
        await self._store.close()


def _name_of(operations: Sequence[Operation]) -> str:
    """A single change under a shard's guard is that change."""
    if len(operations) != 2 or not isinstance(operations[0], Check):
        return "multi"
    match operations[1]:
        case Create():
            return "create"
        case Write():
            return "write"
    return "delete"
