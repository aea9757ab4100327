"""One session with an ensemble, seen from the event loop: kazoo's threads never touch anything else.

Invariant: a request is answered, or refused, or of unknown effect (kazoo's ``ConnectionLoss``), and is never kept for a
later connection; a session that the servers gave up is over for good, whatever kazoo would begin next.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionClosedError, ConnectionLoss, NoAuthError, NoNodeError, SessionExpiredError
from kazoo.protocol.states import KazooState, WatchedEvent

from coordinator.metadata import checks
from coordinator.metadata.credentials import Credentials
from coordinator.metadata.following import Follower, Mark, ReadAgain
from coordinator.metadata.protocol import SessionLost, StoreError, StoreTimeout
from coordinator.metadata.zookeeper_terms import ROOT, full, presented, translated

_RECONNECT = {"max_tries": -1, "delay": 0.1, "backoff": 2, "max_delay": 1.0}


class Session:
    """``on_end`` is called once, on the loop, when the session is lost; what ends it on purpose is ``stop``."""

    def __init__(
        self,
        hosts: str,
        timeout_s: float,
        session_timeout_s: float,
        credentials: Credentials | None,
        on_end: Callable[[SessionLost], object],
    ) -> None:
        self.name = f"zk://{hosts}"
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.client = KazooClient(
            hosts=hosts, timeout=session_timeout_s, connection_retry=dict(_RECONNECT), **presented(credentials)
        )
        self._connected = asyncio.Event()
        self._lost: str | None = None  # why the session ended; set on kazoo's thread, before it makes another one
        self._stopped = False
        self.client.add_listener(self._on_state)

    async def start(self) -> None:
        """Raises ``StoreTimeout`` where no server answers in time, ``StoreError`` where it refuses."""
        self.client.start_async()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connected.wait()
                await self.ask("open", lambda: self.answer(self.client.ensure_path_async(ROOT)), repeat=True)
                await self.ask("open", lambda: self.answer(self.client.get_children_async(ROOT)), repeat=True)
        except TimeoutError:
            raise StoreTimeout(
                f"{self.name}: no session within {self._timeout_s:g} s; expected a ZooKeeper server at each of these "
                "addresses, and a majority of them running"
                + ("" if self.client.use_ssl else " (a port that expects TLS needs store credentials that say so)")
            ) from None
        except NoAuthError as error:
            raise translated(error, f"{self.name}{ROOT}") from None

    async def stop(self) -> None:
        self._stopped = True
        self._connected.set()  # whoever waits for a connection learns that the store is closed
        stopped = self._loop.create_future()
        # Where no server answers, kazoo waits for one to say goodbye to; a daemon thread keeps nobody from leaving.
        threading.Thread(target=self._stop_client, args=(stopped,), name="metadata-close", daemon=True).start()
        await asyncio.wait([stopped], timeout=self._timeout_s)

    def _stop_client(self, stopped: asyncio.Future[None]) -> None:
        try:
            self.client.stop()
            self.client.close()
        finally:
            self.post(lambda: None if stopped.done() else stopped.set_result(None))

    # What kazoo's threads call.

    def post(self, callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback)

    def _on_state(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            self.post(self._connected.set)
        elif state == KazooState.SUSPENDED:
            self.post(self._connected.clear)
        elif state == KazooState.LOST and not self._stopped:
            self._lost = f"{self.name}: the session was lost: the servers heard nothing of this client for too long"
            self.post(self._tell_lost)

    def _tell_lost(self) -> None:
        self._connected.set()  # whoever waits for a connection learns that there will be none
        self._on_end(self._session_lost())

    # Asking.

    def _session_lost(self) -> SessionLost:
        return SessionLost(f"{self._lost}; its ephemeral entries are gone: open the store again and register anew")

    def check_open(self) -> None:
        if self._lost is not None:
            raise self._session_lost()
        if self._stopped:
            raise checks.closed(self.name)

    def owner(self, session: int) -> Literal["", "me", "another"]:
        """Of an entry that is bound to a session (0: to none)."""
        if not session:
            return ""
        return "me" if self.client.client_id is not None and session == self.client.client_id[0] else "another"

    async def connection(self) -> None:
        """Wait for one: kazoo would keep a request for the next connection, long after its caller gave up."""
        await self._connected.wait()
        self.check_open()

    async def ask(self, doing: str, request: Callable[[], asyncio.Future[Any]], *, repeat: bool) -> Any:
        """The answer; kazoo's own exceptions where the server refused."""
        while True:
            await self.connection()
            try:
                return await request()
            except ConnectionLoss:
                if not repeat:
                    raise StoreTimeout(
                        f"{self.name}: the connection was lost during {doing}; it may have taken effect or not"
                    ) from None
            except (SessionExpiredError, ConnectionClosedError) as error:
                self.check_open()
                raise StoreError(f"{self.name}: the client is closed: {error}") from error

    def answer(self, result: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()

        def settle() -> None:
            if future.done():
                return
            if result.exception is not None:
                future.set_exception(result.exception)
            else:
                future.set_result(result.value)

        result.rawlink(lambda _: self.post(settle))
        return future


class SessionReader:
    """What a ``Follower`` reads with. kazoo keeps a watch function once a path, however often it is given."""

    def __init__(self, session: Session, follower: Follower) -> None:
        self._session = session
        self._follower = follower

    async def names(self, prefix: str) -> list[str]:
        while True:
            try:
                return list(await self._ask(self._session.client.get_children_async, prefix))
            except NoNodeError:
                if await self._ask(self._session.client.exists_async, prefix) is None:
                    return []

    async def mark(self, path: str) -> Mark | None:
        stat = await self._ask(self._session.client.exists_async, path)
        return None if stat is None else Mark(created=stat.czxid, written=stat.mzxid)

    async def _ask(self, read: Callable[..., Any], path: str) -> Any:
        await self._session.connection()
        try:
            return await self._session.answer(read(full(path), watch=self._on_event))
        except ConnectionLoss:
            raise ReadAgain from None
        except NoAuthError as error:
            raise translated(error, path) from None
        except (SessionExpiredError, ConnectionClosedError):
            self._session.check_open()
            raise

    def _on_event(self, event: WatchedEvent) -> None:
        """On kazoo's thread."""
        path = None if event.path is None else event.path[len(ROOT) :]  # None: the connection and the watches are gone
        self._session.post(lambda: self._follower.doubt(path))
