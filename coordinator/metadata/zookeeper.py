"""The store on one ZooKeeper ensemble: every call ends within its deadline, and a session that is lost is said so.

kazoo is imported here only. Its threads never touch the store's state: they post to the event loop. Entries live below
``/rollart`` on the servers. Reads are preceded by a ``sync``, so that a client which was told of a change (by message,
past the store) finds it on whatever server it reads from. A read is repeated when the connection is lost under it; a
change is not, because whether it took effect is unknown: the caller gets ``StoreTimeout`` and looks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import (
    BadVersionError,
    ConnectionClosedError,
    ConnectionLoss,
    KazooException,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
)
from kazoo.protocol.states import KazooState, WatchedEvent

from coordinator.metadata import checks
from coordinator.metadata.following import Follower, Mark, ReadAgain
from coordinator.metadata.protocol import (
    Create,
    Delete,
    Entry,
    MetadataStore,
    Operation,
    SessionLost,
    StoreError,
    StoreTimeout,
    Watch,
    Write,
)
from coordinator.metadata.watching import ChangeQueue

ROOT = "/rollart"
_RECONNECT = {"max_tries": -1, "delay": 0.1, "backoff": 2, "max_delay": 1.0}


class ZooKeeperStore(MetadataStore):
    """Made by ``open``; belongs to the event loop that opened it."""

    def __init__(self, hosts: str, timeout_s: float, session_timeout_s: float) -> None:
        self._name = f"zk://{hosts}"
        self._timeout_s = timeout_s
        self._session_timeout_s = session_timeout_s
        self._loop = asyncio.get_running_loop()
        self._client = KazooClient(hosts=hosts, timeout=session_timeout_s, connection_retry=dict(_RECONNECT))
        self._connected = asyncio.Event()
        self._lost: str | None = None  # why the session ended; set on kazoo's thread, before it makes another one
        self._followers: dict[Follower, asyncio.Task[None]] = {}
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, hosts: str, *, timeout_s: float, session_timeout_s: float = 4.0) -> ZooKeeperStore:
        """Connect to the ensemble ``host:port,host:port``. Raises ``StoreTimeout`` where no server answers in time.
        ``session_timeout_s``: how long the servers keep this client's ephemeral entries after its last sign of life
        (they may bound it)."""
        store = cls(hosts, timeout_s, session_timeout_s)
        store._client.add_listener(store._on_state)
        try:
            store._client.start_async()
            await store._connect()
        except BaseException:
            await store.close()
            raise
        return store

    async def get(self, path: str) -> Entry | None:
        checks.check_path(path)
        try:
            value, stat = await self._read(f"get {path}", path, lambda: self._client.get_async(_full(path)))
        except NoNodeError:
            return None
        return Entry(path, value, stat.version)

    async def children(self, path: str) -> list[str]:
        checks.check_path(path)
        try:
            names = await self._read(f"children {path}", path, lambda: self._client.get_children_async(_full(path)))
        except NoNodeError:
            return []
        return sorted(names)

    async def create(self, path: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        checks.check_changed_path(path)
        checks.check_value(path, value)
        made = await self._change(
            path,
            f"create {path}",
            lambda: self._client.create_async(
                _full(path), value, ephemeral=ephemeral, sequence=sequential, makepath=True
            ),
        )
        return str(made)[len(ROOT) :]

    async def write(self, path: str, value: bytes, *, expected: int | None = None) -> int:
        checks.check_changed_path(path)
        checks.check_value(path, value)
        checks.check_expected(path, expected)
        stat = await self._change(
            path,
            f"write {path}",
            lambda: self._client.set_async(_full(path), value, version=_version(expected)),
            expected,
        )
        return int(stat.version)

    async def delete(self, path: str, *, expected: int | None = None) -> None:
        checks.check_changed_path(path)
        checks.check_expected(path, expected)
        await self._change(
            path,
            f"delete {path}",
            lambda: self._client.delete_async(_full(path), version=_version(expected)),
            expected,
        )

    async def multi(self, operations: Sequence[Operation]) -> None:
        operations = tuple(operations)
        checks.check_operations(operations)
        doing = f"multi {', '.join(operation.path for operation in operations)}"
        async with self._within(doing):
            while operations and not await self._commit(doing, await self._with_parents(doing, operations)):
                pass  # somebody made or deleted a parent meanwhile: look again

    def watch(self, prefix: str) -> Watch:
        checks.check_path(prefix)
        self._check_open()
        watch = ChangeQueue(on_close=lambda _: task.cancel())
        follower = Follower(prefix, watch)
        task = self._loop.create_task(follower.run(_Reader(self, follower)))
        self._followers[follower] = task
        task.add_done_callback(lambda _: self._stopped_following(follower))
        return watch

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connected.wait()
                await self._ask("open", lambda: self._client.ensure_path_async(ROOT), repeat=True)
        except TimeoutError:
            raise StoreTimeout(
                f"{self._name}: no session within {self._timeout_s:g} s; expected a ZooKeeper server at each of these "
                "addresses, and a majority of them running"
            ) from None

    async def _close(self) -> None:
        self._connected.set()  # whoever waits for a connection learns that the store is closed
        for follower, task in list(self._followers.items()):
            follower.watch.end()
            task.cancel()
        stopped = self._loop.create_future()
        # Where no server answers, kazoo waits for one to say goodbye to; a daemon thread keeps nobody from leaving.
        threading.Thread(target=self._stop_client, args=(stopped,), name="metadata-close", daemon=True).start()
        await asyncio.wait([stopped], timeout=self._timeout_s)

    def _stop_client(self, stopped: asyncio.Future[None]) -> None:
        try:
            self._client.stop()
            self._client.close()
        finally:
            self._post(lambda: None if stopped.done() else stopped.set_result(None))

    # What kazoo's threads call.

    def _post(self, callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback)

    def _on_state(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            self._post(self._connected.set)
        elif state == KazooState.SUSPENDED:
            self._post(self._connected.clear)
        elif state == KazooState.LOST and self._closing is None:
            self._lost = f"{self._name}: the session was lost: the servers heard nothing of this client for too long"
            self._post(self._on_lost)

    def _on_lost(self) -> None:
        self._connected.set()  # whoever waits for a connection learns that there will be none
        for follower in list(self._followers):
            follower.watch.end(self._session_lost())
        if self._closing is None:  # kazoo would begin a second session; ours is over
            self._closing = self._loop.create_task(self._close())

    def _stopped_following(self, follower: Follower) -> None:
        task = self._followers.pop(follower)
        error = None if task.cancelled() else task.exception()
        follower.armed.set()  # nobody waits for it any longer
        follower.watch.end(error)

    # Asking.

    def _session_lost(self) -> SessionLost:
        return SessionLost(f"{self._lost}; its ephemeral entries are gone: open the store again and register anew")

    def _check_open(self) -> None:
        if self._lost is not None:
            raise self._session_lost()
        if self._closing is not None:
            raise checks.closed(self._name)

    def _within(self, doing: str) -> AbstractAsyncContextManager[None]:
        return checks.within(self._timeout_s, self._name, doing)

    async def _read(self, doing: str, path: str, submit: Callable[[], Any]) -> Any:
        def synced() -> Any:
            self._client.sync_async(_full(path))  # a session's requests are answered in order: no need to wait for it
            return submit()

        async with self._within(doing):
            return await self._ask(doing, synced, repeat=True)

    async def _change(self, path: str, doing: str, submit: Callable[[], Any], expected: int | None = None) -> Any:
        async with self._within(doing):
            try:
                return await self._ask(doing, submit, repeat=False)
            except KazooException as error:
                raise _translated(error, path, expected) from None

    async def _ask(self, doing: str, submit: Callable[[], Any], *, repeat: bool) -> Any:
        """The answer; kazoo's own exceptions where the server refused."""
        self._check_open()
        for follower in list(self._followers):
            await follower.armed.wait()  # so that a watch sees whatever is done after it was asked for
        while True:
            await self._connection()
            try:
                return await self._answer(submit())
            except ConnectionLoss:
                if not repeat:
                    raise StoreTimeout(
                        f"{self._name}: the connection was lost during {doing}; it may have taken effect or not"
                    ) from None
            except (SessionExpiredError, ConnectionClosedError) as error:
                self._check_open()
                raise StoreError(f"{self._name}: the client is closed: {error}") from error

    async def _connection(self) -> None:
        """Wait for one: kazoo would keep a request for the next connection, long after its caller gave up."""
        await self._connected.wait()
        self._check_open()

    def _answer(self, result: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()

        def settle() -> None:
            if future.done():
                return
            if result.exception is not None:
                future.set_exception(result.exception)
            else:
                future.set_result(result.value)

        result.rawlink(lambda _: self._post(settle))
        return future

    # Multi.

    async def _with_parents(self, doing: str, operations: Sequence[Operation]) -> list[tuple[Operation, bool]]:
        """The operations (False), and before each ``Create`` those (True) of the parents that are missing by then."""
        there: dict[str, bool] = {}
        complete: list[tuple[Operation, bool]] = []
        for operation in operations:
            if isinstance(operation, Create):
                for ancestor in checks.ancestors_of(operation.path):
                    if ancestor not in there:
                        there[ancestor] = await self._exists(doing, ancestor)
                    if not there[ancestor]:
                        complete.append((Create(ancestor, b""), True))
                        there[ancestor] = True
            there[operation.path] = not isinstance(operation, Delete)
            complete.append((operation, False))
        return complete

    async def _exists(self, doing: str, path: str) -> bool:
        stat = await self._ask(doing, lambda: self._client.exists_async(_full(path)), repeat=True)
        return stat is not None

    async def _commit(self, doing: str, operations: Sequence[tuple[Operation, bool]]) -> bool:
        """False where only a parent stood in the way. Raises what the first operation that failed says."""

        def submit() -> Any:
            transaction = self._client.transaction()
            for operation, _ in operations:
                _add(transaction, operation)
            return transaction.commit_async()

        results = await self._ask(doing, submit, repeat=False)
        for (operation, is_parent), result in zip(operations, results, strict=True):
            if not isinstance(result, Exception) or isinstance(result, RolledBackError | RuntimeInconsistency):
                continue  # done, or undone only because another one failed
            if isinstance(result, NodeExistsError) and is_parent:
                return False
            if isinstance(result, NoNodeError) and isinstance(operation, Create):
                return False
            expected = None if isinstance(operation, Create) else operation.expected
            raise _translated(result, operation.path, expected)
        return True


class _Reader:
    """What a ``Follower`` reads with. kazoo keeps a watch function once a path, however often it is given."""

    def __init__(self, store: ZooKeeperStore, follower: Follower) -> None:
        self._store = store
        self._follower = follower

    async def names(self, prefix: str) -> list[str]:
        while True:
            try:
                return list(await self._ask(self._store._client.get_children_async, prefix))
            except NoNodeError:
                if await self._ask(self._store._client.exists_async, prefix) is None:
                    return []

    async def mark(self, path: str) -> Mark | None:
        stat = await self._ask(self._store._client.exists_async, path)
        return None if stat is None else Mark(created=stat.czxid, written=stat.mzxid)

    async def _ask(self, read: Callable[..., Any], path: str) -> Any:
        await self._store._connection()
        try:
            return await self._store._answer(read(_full(path), watch=self._on_event))
        except ConnectionLoss:
            raise ReadAgain from None
        except (SessionExpiredError, ConnectionClosedError):
            self._store._check_open()
            raise

    def _on_event(self, event: WatchedEvent) -> None:
        """On kazoo's thread."""
        path = None if event.path is None else event.path[len(ROOT) :]  # None: the connection and the watches are gone
        self._store._post(lambda: self._follower.doubt(path))


def _full(path: str) -> str:
    return ROOT if path == "/" else ROOT + path


def _version(expected: int | None) -> int:
    return -1 if expected is None else expected


def _add(transaction: Any, operation: Operation) -> None:
    path = _full(operation.path)
    if isinstance(operation, Create):
        transaction.create(path, operation.value, ephemeral=operation.ephemeral)
    elif isinstance(operation, Write):
        transaction.set_data(path, operation.value, _version(operation.expected))
    else:
        transaction.delete(path, _version(operation.expected))


def _translated(error: Exception, path: str, expected: int | None) -> StoreError:
    match error:
        case NodeExistsError():
            return checks.entry_exists(path)
        case NoNodeError():
            return checks.no_entry(path)
        case BadVersionError() if expected is not None:
            return checks.version_mismatch(path, expected)
        case NotEmptyError():
            return checks.has_children(path)
        case NoChildrenForEphemeralsError():
            return checks.ephemeral_parent(path)
    return StoreError(f"{path}: the ZooKeeper server refused: {type(error).__name__} {error}".rstrip())
