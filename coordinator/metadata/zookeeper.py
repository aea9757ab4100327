"""The store on one ZooKeeper ensemble: every call ends within its deadline, and a session that is lost is said so.

Entries live below ``/rollart`` on the servers. Reads are preceded by a ``sync``, so that a client which was told of a
change (by message, past the store) finds it on whatever server it reads from. A read is repeated when the connection is
lost under it; a change is not, because whether it took effect is unknown: the caller gets ``StoreTimeout`` and looks.
Requests of several callers are under way together, in the order in which they were made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from kazoo.exceptions import (
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
)

from coordinator.metadata import checks
from coordinator.metadata.credentials import Credentials
from coordinator.metadata.following import Follower
from coordinator.metadata.protocol import (
    Check,
    Create,
    Delete,
    Done,
    Entry,
    EntryExists,
    Operation,
    SessionLost,
    StoreError,
    Watch,
    Write,
)
from coordinator.metadata.shard import Raw, Shard, restored_version
from coordinator.metadata.watching import ChangeQueue
from coordinator.metadata.zookeeper_session import Session, SessionReader
from coordinator.metadata.zookeeper_terms import add_to, done_by, full, refusal_of, translated, version_of

_STEPS_A_REQUEST = 1_000  # of a restored entry's history: well below the server's limit of 1 MB a request


class ZooKeeperStore(Shard):
    """Made by ``open``; belongs to the event loop that opened it."""

    def __init__(self, hosts: str, timeout_s: float, session_timeout_s: float, credentials: Credentials | None) -> None:
        self._timeout_s = timeout_s
        self._session = Session(hosts, timeout_s, session_timeout_s, credentials, self._lost)
        self._client = self._session.client
        self._followers: dict[Follower, asyncio.Task[None]] = {}
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        hosts: str,
        *,
        timeout_s: float,
        session_timeout_s: float = 4.0,
        credentials: Credentials | None = None,
    ) -> ZooKeeperStore:
        """Connect to the ensemble ``host:port,host:port``. Raises ``StoreTimeout`` where no server answers in time,
        ``StoreError`` where the entries there are somebody else's. ``session_timeout_s``: how long the servers keep
        this client's ephemeral entries after its last sign of life (they may bound it)."""
        store = cls(hosts, timeout_s, session_timeout_s, credentials)
        try:
            await store._session.start()
        except BaseException:
            await store.close()
            raise
        return store

    async def get(self, path: str) -> Entry | None:
        checks.check_path(path)
        (found,) = await self._read(f"get {path}", path, lambda: [self._client.get_async(full(path))])
        return _entry(path, found)

    async def children(self, path: str) -> list[str]:
        checks.check_path(path)
        (names,) = await self._read(f"children {path}", path, lambda: [self._client.get_children_async(full(path))])
        return sorted(names or [])

    async def get_then(self, path: str, mark: str) -> tuple[Entry | None, Entry | None]:
        checks.check_path(path)
        found, marked = await self._read(
            f"get {path}", path, lambda: [self._client.get_async(full(path)), self._client.get_async(full(mark))]
        )
        return _entry(path, found), _entry(mark, marked)

    async def children_then(self, path: str, mark: str) -> tuple[list[str], Entry | None]:
        checks.check_path(path)
        names, marked = await self._read(
            f"children {path}",
            path,
            lambda: [self._client.get_children_async(full(path)), self._client.get_async(full(mark))],
        )
        return sorted(names or []), _entry(mark, marked)

    async def create(self, path: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        checks.check_changed_path(path)
        checks.check_value(path, value)
        made = await self._change(
            f"create {path}",
            Create(path, value),
            lambda: self._client.create_async(
                full(path), value, ephemeral=ephemeral, sequence=sequential, makepath=True
            ),
        )
        return str(made)

    async def write(self, path: str, value: bytes, *, expected: int | None = None) -> int:
        checks.check_changed_path(path)
        checks.check_value(path, value)
        checks.check_expected(path, expected)
        version = await self._change(
            f"write {path}",
            Write(path, value, expected),
            lambda: self._client.set_async(full(path), value, version=version_of(expected)),
        )
        return int(version or 0)

    async def delete(self, path: str, *, expected: int | None = None) -> None:
        checks.check_changed_path(path)
        checks.check_expected(path, expected)
        await self._change(
            f"delete {path}",
            Delete(path, expected),
            lambda: self._client.delete_async(full(path), version=version_of(expected)),
        )

    async def multi(self, operations: Sequence[Operation]) -> list[Done]:
        operations = tuple(operations)
        checks.check_operations(operations)
        doing = f"multi {', '.join(operation.path for operation in operations)}"
        if not operations:
            return []
        async with self._within(doing):
            done = await self._commit(doing, [(operation, False) for operation in operations])
            while done is None:  # a parent was missing, or somebody made or deleted one meanwhile: look
                done = await self._commit(doing, await self._with_parents(doing, operations))
            return done

    def watch(self, prefix: str) -> Watch:
        checks.check_path(prefix)
        self._check_open()
        watch = ChangeQueue(on_close=lambda _: task.cancel())
        follower = Follower(prefix, watch)
        task = asyncio.get_running_loop().create_task(follower.run(SessionReader(self._session, follower)))
        self._followers[follower] = task
        task.add_done_callback(lambda _: self._stopped_following(follower))
        return watch

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for follower, task in list(self._followers.items()):
            follower.watch.end()
            task.cancel()
        await self._session.stop()

    def _lost(self, why: SessionLost) -> None:
        for follower in list(self._followers):
            follower.watch.end(why)
        if self._closing is None:  # kazoo would begin a second session; ours is over
            self._closing = asyncio.get_running_loop().create_task(self._close())

    def _stopped_following(self, follower: Follower) -> None:
        task = self._followers.pop(follower)
        error = None if task.cancelled() else task.exception()
        follower.armed.set()  # nobody waits for it any longer
        follower.watch.end(error)

    # Asking.

    def _check_open(self) -> None:
        self._session.check_open()
        if self._closing is not None:
            raise checks.closed(self._session.name)

    def _within(self, doing: str) -> AbstractAsyncContextManager[None]:
        return checks.within(self._timeout_s, self._session.name, doing)

    async def _read(self, doing: str, path: str, submit: Callable[[], list[Any]]) -> list[Any]:
        """The answers to requests that are submitted together, in their order; None where there is no entry."""

        def synced() -> asyncio.Future[list[Any]]:
            self._client.sync_async(full(path))  # a session's requests are answered in order: no need to wait for it
            return asyncio.gather(*map(self._session.answer, submit()), return_exceptions=True)

        async def together() -> list[Any]:
            answers = await synced()
            for answer in answers:
                if isinstance(answer, BaseException) and not isinstance(answer, NoNodeError):
                    raise answer
            return [None if isinstance(answer, NoNodeError) else answer for answer in answers]

        async with self._within(doing):
            try:
                return list(await self._ask(doing, lambda: asyncio.ensure_future(together()), repeat=True))
            except NoAuthError as error:
                raise translated(error, path) from None

    async def _change(self, doing: str, operation: Operation, submit: Callable[[], Any]) -> Done:
        async with self._within(doing):
            try:
                result = await self._ask(doing, lambda: self._session.answer(submit()), repeat=False)
            except KazooException as error:
                raise refusal_of(operation, error) from None
            return done_by(operation, result)

    async def _ask(self, doing: str, request: Callable[[], asyncio.Future[Any]], *, repeat: bool) -> Any:
        self._check_open()
        for follower in list(self._followers):
            await follower.armed.wait()  # so that a watch sees whatever is done after it was asked for
        return await self._session.ask(doing, request, repeat=repeat)

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
        answer = lambda: self._session.answer(self._client.exists_async(full(path)))  # noqa: E731
        return await self._ask(doing, answer, repeat=True) is not None

    async def _commit(self, doing: str, operations: Sequence[tuple[Operation, bool]]) -> list[Done] | None:
        """What each did that is no parent; None where only a parent stood in the way. Raises what the first operation
        that failed says."""

        def submit() -> asyncio.Future[Any]:
            transaction = self._client.transaction()
            for operation, _ in operations:
                add_to(transaction, operation)
            return self._session.answer(transaction.commit_async())

        results = await self._ask(doing, submit, repeat=False)
        for (operation, is_parent), result in zip(operations, results, strict=True):
            if not isinstance(result, Exception) or isinstance(result, RolledBackError | RuntimeInconsistency):
                continue  # done, or undone only because another one failed
            if isinstance(result, ConnectionLoss | SessionExpiredError):
                raise StoreError(f"{self._session.name}: {doing}: {type(result).__name__}")
            if isinstance(result, NodeExistsError) and is_parent:
                return None
            if isinstance(result, NoNodeError) and isinstance(operation, Create):
                return None
            raise refusal_of(operation, result)
        return [
            done_by(operation, result)
            for (operation, is_parent), result in zip(operations, results, strict=True)
            if not is_parent
        ]

    # As one of several shards.

    async def inspect(self, path: str) -> Raw | None:
        (found,) = await self._read(f"inspect {path}", path, lambda: [self._client.get_async(full(path))])
        if found is None:
            return None
        value, stat = found
        # A server counts the children that were ever made below, and shows twice that less those that are left.
        number = (stat.cversion + stat.numChildren) // 2
        return Raw(path, value, stat.version, self._session.owner(stat.ephemeralOwner), number)

    async def restore(self, raw: Raw, guard: Check, *, ephemeral: bool) -> None:
        """A version counts writes, so as many are made: a thousand in a request."""
        create = Create(raw.path, b"" if raw.version else raw.value, ephemeral=ephemeral)
        try:
            await self._in_steps([create, *_writes(raw, raw.version)], guard)
        except EntryExists:
            found = await self.get(raw.path)
            if found is None:
                raise  # gone again: somebody's session ended just now
            await self._in_steps(_writes(raw, restored_version(raw, found) - found.version), guard)

    async def raise_number(self, path: str, number: int, guard: Check) -> None:
        found = await self.inspect(path)
        if found is None:
            raise checks.no_entry(path)
        passing = checks.child_of(path, "passing")  # nobody's: made and deleted in the same request
        steps: list[Operation] = [Create(passing, b""), Delete(passing)] * (number - found.next_number)
        await self._in_steps(steps, guard)

    async def _in_steps(self, steps: Sequence[Operation], guard: Check) -> None:
        for start in range(0, len(steps), _STEPS_A_REQUEST):
            await self.multi([guard, *steps[start : start + _STEPS_A_REQUEST]])


def _writes(raw: Raw, count: int) -> list[Operation]:
    """The last one with the value."""
    if count <= 0:
        return []
    return [*(Write(raw.path, b"") for _ in range(count - 1)), Write(raw.path, raw.value)]


def _entry(path: str, found: Any) -> Entry | None:
    if found is None:
        return None
    value, stat = found
    return Entry(path, value, stat.version)
