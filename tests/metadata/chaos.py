"""Clients that go on while servers die, hang and come back, and what they saw of every entry.

Invariant: a call counts as answered only if the store answered it; whatever else became of it, it may have taken effect
or not, at any time from its begin.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Sequence
from contextlib import aclosing, suppress

from coordinator.metadata import open_sharded
from coordinator.metadata.protocol import (
    EntryExists,
    NoEntry,
    SessionLost,
    StoreError,
    StoreTimeout,
    VersionMismatch,
)
from coordinator.metadata.sharded import ShardedStore
from tests.metadata.histories import UNKNOWN, Answer, Call, State, is_linearizable

_REFUSALS = {EntryExists: "exists", NoEntry: "missing", VersionMismatch: "mismatch"}
_KINDS = ("get", "create", "write", "write", "cas", "cas", "delete")
REOPEN_S = 0.2


class Histories:
    """What all clients saw, by path; and when writes were acknowledged."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = {}
        self.acknowledged: list[float] = []
        self.sessions_lost = 0
        self._values = itertools.count()

    def value(self) -> bytes:
        """One that nobody else writes."""
        return str(next(self._values)).encode()

    def saw(self, path: str, call: Call) -> None:
        self.calls.setdefault(path, []).append(call)
        if call.kind != "get" and call.answer.kind == "done":
            self.acknowledged.append(call.end)

    def not_linearizable(self) -> list[str]:
        return [path for path, calls in self.calls.items() if not is_linearizable(calls)]

    def unknown(self) -> int:
        return sum(call.answer.kind == "unknown" for calls in self.calls.values() for call in calls)

    def first_after(self, time: float) -> float:
        """Seconds until a write that began after that was acknowledged."""
        begun = [
            call.end
            for calls in self.calls.values()
            for call in calls
            if call.begin > time and call.kind != "get" and call.answer.kind == "done"
        ]
        return min(begun, default=math.inf) - time


class Client:
    """Opens the store again whenever its session is lost."""

    def __init__(self, spec: str, histories: Histories, seed: int, timeout_s: float) -> None:
        self._spec = spec
        self._histories = histories
        self._chance = random.Random(seed)
        self._timeout_s = timeout_s
        self._store: ShardedStore | None = None
        self._known: dict[str, State] = {}

    async def store(self) -> ShardedStore:
        while self._store is None:
            try:
                self._store = await open_sharded(self._spec, timeout_s=self._timeout_s)
            except StoreTimeout:
                await asyncio.sleep(REOPEN_S)
        return self._store

    async def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with suppress(StoreError):
                await store.close()

    async def work(self, paths: Sequence[str], stop: asyncio.Event, pause_s: float) -> None:
        while not stop.is_set():
            await self.one(self._chance.choice(paths), self._chance.choice(_KINDS))
            await asyncio.sleep(self._chance.uniform(0, pause_s))

    async def one(self, path: str, kind: str) -> None:
        loop = asyncio.get_running_loop()
        store = await self.store()
        value, expected = self._histories.value(), None
        known = self._known.get(path)
        if kind == "cas":
            kind, expected = "write", known[1] if known is not None else 0
        begin, end = loop.time(), math.inf
        answer = UNKNOWN
        try:
            answer = await self._ask(store, path, kind, value, expected)
            end = loop.time()
        except StoreTimeout:
            pass
        except SessionLost:
            self._histories.sessions_lost += 1
            await self.close()
        self._histories.saw(path, Call(kind, begin, end, answer, value, expected))

    async def _ask(self, store: ShardedStore, path: str, kind: str, value: bytes, expected: int | None) -> Answer:
        try:
            if kind == "get":
                entry = await store.get(path)
                self._known[path] = None if entry is None else (entry.value, entry.version)
                return Answer("done", self._known[path])
            if kind == "create":
                await store.create(path, value)
                self._known[path] = (value, 0)
            elif kind == "write":
                version = await store.write(path, value, expected=expected)
                self._known[path] = (value, version)
                return Answer("done", version=version)
            else:
                await store.delete(path)
            return Answer("done")
        except (EntryExists, NoEntry, VersionMismatch) as refused:
            return Answer(_REFUSALS[type(refused)])


class Follower:
    """Knows what lies below a prefix by "watch, then read, then read again what a change names"."""

    def __init__(self, spec: str, prefix: str, timeout_s: float) -> None:
        self.seen: dict[str, bytes] = {}
        self._prefix = prefix
        self._client = Client(spec, Histories(), 0, timeout_s)

    async def follow(self) -> None:
        while True:
            try:
                await self._follow_once(await self._client.store())
            except StoreTimeout:
                continue
            except SessionLost:
                await self._client.close()

    async def _follow_once(self, store: ShardedStore) -> None:
        async with aclosing(store.watch(self._prefix)) as watch:
            self.seen.clear()
            for name in await store.children(self._prefix):
                await self._look(store, f"{self._prefix}/{name}")
            async for change in watch:
                await self._look(store, change.path)
        raise SessionLost("the watch ended")

    async def _look(self, store: ShardedStore, path: str) -> None:
        entry = await store.get(path)
        if entry is None:
            self.seen.pop(path, None)
        else:
            self.seen[path] = entry.value

    async def close(self) -> None:
        await self._client.close()


async def contents(store: ShardedStore, prefix: str) -> dict[str, bytes]:
    found = {}
    for name in await store.children(prefix):
        entry = await store.get(f"{prefix}/{name}")
        if entry is not None:
            found[entry.path] = entry.value
    return found
