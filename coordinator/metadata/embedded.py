"""The default store: durable, on one machine, without a server. One client at a time has it open.

Ephemeral entries live as long as the open store: they go when it is closed, and where it was killed, when the next one
opens. SQLite runs on the store's own thread, so that a slow disk never stops the event loop; calls take effect in the
order in which they were made.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from coordinator.metadata import checks
from coordinator.metadata.protocol import Change, Check, Done, Entry, Operation, StoreError, Watch
from coordinator.metadata.shard import Raw, Shard
from coordinator.metadata.tables import Tables
from coordinator.metadata.watching import ChangeQueue

_Result = TypeVar("_Result")

FILE = "metadata.sqlite3"
LOCK = "metadata.lock"


class EmbeddedStore(Shard):
    """Made by ``open``; belongs to the event loop that opened it."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self._directory = directory
        self._name = f"embedded in {directory}"
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metadata")
        self._tables: Tables | None = None  # touched only on the thread
        self._lock: int | None = None  # likewise
        self._watches: dict[str, list[ChangeQueue]] = {}
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, directory: Path, *, timeout_s: float) -> EmbeddedStore:
        """Open or make the store in ``directory``. Raises ``StoreError`` where another client has it open."""
        store = cls(directory, timeout_s)
        try:
            await store._call("open", store._open_files)
        except BaseException:
            await store.close()
            raise
        return store

    async def get(self, path: str) -> Entry | None:
        checks.check_path(path)
        return await self._call(f"get {path}", lambda: self._opened().get(path))

    async def children(self, path: str) -> list[str]:
        checks.check_path(path)
        return await self._call(f"children {path}", lambda: self._opened().children(path))

    async def create(self, path: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        checks.check_changed_path(path)
        checks.check_value(path, value)
        return await self._change(f"create {path}", lambda tables: tables.create(path, value, ephemeral, sequential))

    async def write(self, path: str, value: bytes, *, expected: int | None = None) -> int:
        checks.check_changed_path(path)
        checks.check_value(path, value)
        checks.check_expected(path, expected)
        return await self._change(f"write {path}", lambda tables: tables.write(path, value, expected))

    async def delete(self, path: str, *, expected: int | None = None) -> None:
        checks.check_changed_path(path)
        checks.check_expected(path, expected)
        await self._change(f"delete {path}", lambda tables: tables.delete(path, expected))

    async def multi(self, operations: Sequence[Operation]) -> list[Done]:
        operations = tuple(operations)
        checks.check_operations(operations)
        paths = ", ".join(operation.path for operation in operations)
        return await self._change(f"multi {paths}", lambda tables: tables.multi(operations))

    async def get_then(self, path: str, mark: str) -> tuple[Entry | None, Entry | None]:
        checks.check_path(path)
        return await self._call(f"get {path}", lambda: (self._opened().get(path), self._opened().get(mark)))

    async def children_then(self, path: str, mark: str) -> tuple[list[str], Entry | None]:
        checks.check_path(path)
        return await self._call(f"children {path}", lambda: (self._opened().children(path), self._opened().get(mark)))

    async def inspect(self, path: str) -> Raw | None:
        return await self._call(f"inspect {path}", lambda: self._opened().inspect(path))

    async def restore(self, raw: Raw, guard: Check, *, ephemeral: bool) -> None:
        await self._change(f"restore {raw.path}", lambda tables: tables.restore(raw, guard, ephemeral))

    async def raise_number(self, path: str, number: int, guard: Check) -> None:
        await self._change(f"raise_number {path}", lambda tables: tables.raise_number(path, number, guard))

    def watch(self, prefix: str) -> Watch:
        checks.check_path(prefix)
        self._check_open()
        watch = ChangeQueue(on_close=lambda watch: self._forget(prefix, watch))
        self._watches.setdefault(prefix, []).append(watch)
        return watch

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for watch in [watch for watches in self._watches.values() for watch in watches]:
            watch.end()
        self._watches.clear()
        closed = self._loop.run_in_executor(self._thread, self._close_files)
        self._thread.shutdown(wait=False)
        await self._answer("close", closed)

    def _forget(self, prefix: str, watch: ChangeQueue) -> None:
        watches = self._watches.get(prefix, [])
        if watch in watches:
            watches.remove(watch)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise checks.closed(self._name)

    async def _change(self, doing: str, change: Callable[[Tables], tuple[_Result, list[Change]]]) -> _Result:
        def apply() -> _Result:
            result, changes = change(self._opened())
            # Posted from here, not after the await: a caller that gave up must not cost the watches a change.
            self._loop.call_soon_threadsafe(self._publish, changes)
            return result

        return await self._call(doing, apply)

    def _publish(self, changes: list[Change]) -> None:
        for change in changes:
            for watch in self._watches.get(checks.parent_of(change.path), []):
                watch.put(change)

    async def _call(self, doing: str, work: Callable[[], _Result]) -> _Result:
        self._check_open()
        return await self._answer(doing, self._loop.run_in_executor(self._thread, work))

    async def _answer(self, doing: str, answer: asyncio.Future[_Result]) -> _Result:
        try:
            async with checks.within(self._timeout_s, self._name, doing):
                return await answer
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise checks.timed_out(self._name, doing, self._timeout_s) from error
            raise StoreError(f"the metadata store ({self._name}) failed at {doing}: {error}") from error
        except OSError as error:
            raise StoreError(f"the metadata store ({self._name}) failed at {doing}: {error}") from error

    def _opened(self) -> Tables:
        if self._tables is None:
            raise checks.closed(self._name)
        return self._tables

    def _open_files(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._directory / LOCK)
        self._tables = Tables(self._directory / FILE, self._timeout_s)

    def _close_files(self) -> None:
        try:
            if self._tables is not None:
                self._tables.drop_ephemerals()
                self._tables.close()
        finally:
            self._tables = None
            if self._lock is not None:
                os.close(self._lock)  # which also unlocks it
                self._lock = None


def _lock(file: Path) -> int:
    """Take the lock or raise ``StoreError`` naming its holder; the kernel frees it when the holder dies."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "(unknown)"
        os.close(descriptor)
        raise StoreError(
            f"{file}: process {holder} has this embedded metadata store open; one client at a time may. Stop that one, "
            "use another run directory, or share facts through a server (store=zk://host:port)"
        ) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
