"""A server and its clients in virtual time: the same protocol, with sessions that expire and links that are cut.

Invariant: what the server does is what ZooKeeper promises (changes one after another, a session's requests in order,
ephemeral entries for as long as their session is heard of), and only time, the seed and whoever cuts links decide when.

A request and its answer each take a random time on their way; one that meets a cut link is lost, so that its caller
learns nothing by its deadline, whether or not it took effect. Clients give a sign of life every third of their
session's timeout, as kazoo does, and learn of a session that ended when they next reach the server.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from coordinator.metadata import checks
from coordinator.metadata.protocol import (
    Change,
    Create,
    Done,
    Entry,
    MetadataStore,
    Operation,
    SessionLost,
    StoreTimeout,
    Watch,
)
from coordinator.metadata.tables import Tables
from coordinator.metadata.watching import ChangeQueue

T = TypeVar("T")

TICK_S = 0.5
"""Sessions are looked at this often, so that they last up to a tick longer."""


class SimulatedServer:
    """Create inside a loop in virtual time; ``close`` it there."""

    def __init__(self, seed: int, *, slowest_s: float = 0.02) -> None:
        """``slowest_s``: of a message on its way."""
        self._random = random.Random(seed)
        self._slowest_s = slowest_s
        self._tables = Tables(Path(":memory:"), 0.0)
        self._clients: list[SimulatedStore] = []
        self._looking = asyncio.create_task(self._expire_sessions())

    def open(self, name: str, *, timeout_s: float, session_timeout_s: float) -> SimulatedStore:
        """A client with a session of its own."""
        client = SimulatedStore(self, name, timeout_s, session_timeout_s)
        self._clients.append(client)
        return client

    def close(self) -> None:
        self._looking.cancel()
        for client in self._clients:
            client.stop()
        self._tables.close()

    def delay_s(self) -> float:
        return self._random.uniform(0.0, self._slowest_s)

    def apply(self, change: Callable[[Tables], tuple[T, list[Change]]]) -> T:
        """A request of a living session."""
        result, changes = change(self._tables)
        self._publish(changes)
        return result

    def end_session(self, client: SimulatedStore) -> None:
        """Its ephemeral entries go."""
        client.expired = True
        self._clients.remove(client)
        for path in sorted(client.ephemerals):
            self._publish(self._tables.delete(path, None)[1])
        client.ephemerals.clear()

    def _publish(self, changes: Sequence[Change]) -> None:
        gone = {change.path for change in changes if change.kind == "deleted"}
        for client in self._clients:
            client.ephemerals -= gone
            client.notify(changes)

    async def _expire_sessions(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            for client in list(self._clients):
                if loop.time() - client.heard > client.session_timeout_s:
                    self.end_session(client)


class SimulatedStore(MetadataStore):
    """One client; made by ``SimulatedServer.open``."""

    def __init__(self, server: SimulatedServer, name: str, timeout_s: float, session_timeout_s: float) -> None:
        self.session_timeout_s = session_timeout_s
        self.expired = False  # the server's view
        self.ephemerals: set[str] = set()
        self._server = server
        self._name = f"simulated, client {name}"
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self.heard = self._loop.time()
        self._cut = False
        self._lost = False
        self._closed = False
        self._turns: dict[str, asyncio.Lock] = {"there": asyncio.Lock(), "back": asyncio.Lock()}  # ways keep order
        self._watches: list[tuple[str, ChangeQueue]] = []
        self._undelivered: list[Change] = []
        self._beating = asyncio.create_task(self._beat())

    def cut(self) -> None:
        """From now on nothing passes between this client and the server."""
        self._cut = True

    def mend(self) -> None:
        self._cut = False
        self._deliver()

    def stop(self) -> None:
        """The client's process is gone: the server hears no more of it."""
        self._closed = True
        self._beating.cancel()
        for _, watch in self._watches:
            watch.end()

    # ---- the protocol --------------------------------------------------------------------------------------------

    async def get(self, path: str) -> Entry | None:
        checks.check_path(path)
        return await self._ask(f"get {path}", lambda tables: (tables.get(path), []))

    async def children(self, path: str) -> list[str]:
        checks.check_path(path)
        return await self._ask(f"children {path}", lambda tables: (tables.children(path), []))

    async def create(self, path: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        checks.check_changed_path(path)
        checks.check_value(path, value)

        def create(tables: Tables) -> tuple[str, list[Change]]:
            made, changes = tables.create(path, value, ephemeral, sequential)
            if ephemeral:
                self.ephemerals.add(made)
            return made, changes

        return await self._ask(f"create {path}", create)

    async def write(self, path: str, value: bytes, *, expected: int | None = None) -> int:
        checks.check_changed_path(path)
        checks.check_value(path, value)
        checks.check_expected(path, expected)
        return await self._ask(f"write {path}", lambda tables: tables.write(path, value, expected))

    async def delete(self, path: str, *, expected: int | None = None) -> None:
        checks.check_changed_path(path)
        checks.check_expected(path, expected)
        await self._ask(f"delete {path}", lambda tables: tables.delete(path, expected))

    async def multi(self, operations: Sequence[Operation]) -> list[Done]:
        operations = tuple(operations)
        checks.check_operations(operations)

        def multi(tables: Tables) -> tuple[list[Done], list[Change]]:
            done, changes = tables.multi(operations)
            made = [(each, str(path)) for each, path in zip(operations, done, strict=True) if isinstance(each, Create)]
            self.ephemerals |= {path for each, path in made if each.ephemeral}
            return done, changes

        return await self._ask("multi " + ", ".join(operation.path for operation in operations), multi)

    def watch(self, prefix: str) -> Watch:
        checks.check_path(prefix)
        self._check_open()
        watch = ChangeQueue(on_close=self._forget)
        self._watches.append((prefix, watch))
        return watch

    def _forget(self, closed: ChangeQueue) -> None:
        self._watches = [(prefix, watch) for prefix, watch in self._watches if watch is not closed]

    async def close(self) -> None:
        if not self._closed:
            self.stop()
            if not self._cut and not self.expired:
                self._server.end_session(self)

    # ---- on the way ----------------------------------------------------------------------------------------------

    def notify(self, changes: Sequence[Change]) -> None:
        """The server's word on what changed, in order; it waits while the link is cut."""
        self._undelivered += changes
        self._loop.call_later(self._server.delay_s(), self._deliver)

    def _deliver(self) -> None:
        if self._cut or self._closed:
            return
        changes, self._undelivered = self._undelivered, []
        for change in changes:
            for prefix, watch in self._watches:
                if checks.parent_of(change.path) == prefix:
                    watch.put(change)

    async def _ask(self, doing: str, change: Callable[[Tables], tuple[T, list[Change]]]) -> T:
        self._check_open()
        async with checks.within(self._timeout_s, self._name, doing):
            async with self._turns["there"]:
                await self._travel()
            self._reach()
            result: T | Exception
            try:
                result = self._server.apply(change)
            except Exception as error:  # the answer, whatever it is, travels
                result = error
            async with self._turns["back"]:
                await self._travel()
        if isinstance(result, Exception):
            raise result
        return result

    async def _travel(self) -> None:
        await asyncio.sleep(self._server.delay_s())
        if self._cut:
            await asyncio.sleep(self._timeout_s)  # lost: whoever waits gives up by then
            raise StoreTimeout(f"{self._name}: the link is cut")

    def _reach(self) -> None:
        """The server hears of this client, or tells it that it came too late."""
        if self.expired:
            self._lose()
            raise self._session_lost()
        self.heard = self._loop.time()

    def _lose(self) -> None:
        self._lost = True
        for _, watch in self._watches:
            watch.end(self._session_lost())

    async def _beat(self) -> None:
        while not self._lost:
            await asyncio.sleep(self.session_timeout_s / 3)
            if not self._cut:
                with suppress(SessionLost):
                    self._reach()

    def _session_lost(self) -> SessionLost:
        return SessionLost(f"{self._name}: the session was lost; open the store again and register anew")

    def _check_open(self) -> None:
        if self._lost:
            raise self._session_lost()
        if self._closed:
            raise checks.closed(self._name)
