"""Who leads a run: of several coordinator processes one, under an epoch that no other leader ever has.

    /leader/<run>/candidates/c-0000000007   ephemeral, sequential: whoever stands; the lowest number is next
    /leader/<run>/epoch                     the last leader's epoch, name and address; raised by compare-and-set

    stands --is first--> raises the epoch (in one step with a write to its own entry) --> LEADS --> over (reason)
                                                                                           |  ^
                                                              a confirmation is overdue    v  |  confirmed again
                                                                                         LAPSED

Invariants:

- an epoch has one leader: it is raised in one ``multi`` with a write to the candidate's own entry, which fails where
  somebody else raised it first, or where the candidate's session is over;
- at any time ``leads()`` is true of one process at most (of those that live: see ``coordinator.pulse``). The
  arithmetic, with T the session's timeout:

  * a confirmation (a read of its own entry) that was asked at time t and answered shows that the servers heard of this
    client after t. A server of an ensemble passes such signs of life on every half tick, and T is two ticks at least:
    no server ends the session before t + 3/4 T, by its own clock;
  * ``leads()`` holds until t + ``LEASE`` T = 0.7 T by this machine's clock, which may thus go slower than theirs by 7%;
  * nobody else can lead while the entry is there, and it goes with the session.

A process that was stopped, or starved of the processor, finds its lease over by the clock when it goes on, before any
message or timer. That is no end: it asks the store, and goes on where its entry is still there, since then nobody else
has led meanwhile. What slips through all the same (a message that waited in a socket) carries an epoch, which receivers
refuse once they have heard of a later one (``bus.peers``).

A machine that hibernates stops the clock that this is about; epochs are what is left then.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import aclosing, suppress
from typing import Any, Protocol

import msgspec

from coordinator.metadata.protocol import (
    Create,
    EntryExists,
    MetadataStore,
    NoEntry,
    StoreError,
    StoreTimeout,
    VersionMismatch,
    Watch,
    Write,
)

log = logging.getLogger(__name__)

LEASE = 0.7
"""Share of the session's timeout for which a confirmation lasts; see the module docstring."""

CONFIRMATIONS = 6
"""In a session's timeout: four may fail in a row before the lease is over."""

UNANSWERED_PAUSE_S = 0.1
"""Before the store is asked again that did not answer."""


class Deposed(RuntimeError):
    """This process does not lead (any more); the message says why."""


class Standing(msgspec.Struct, frozen=True):
    """Content of a candidate's entry."""

    name: str
    epoch: int = 0  # under which it leads; 0 while it waits
    pulse: str = ""  # where the others can tell that its process is gone: see ``coordinator.burial``


class Reign(msgspec.Struct, frozen=True):
    """Content of ``/leader/<run>/epoch``: the newest one, whether or not its leader still lives."""

    epoch: int
    name: str
    entry: str  # of the candidate that leads
    address: str = ""  # where its node listens, once it does


def path_of(run: str) -> str:
    return f"/leader/{run}"


def queue_of(run: str) -> str:
    """Below it, the candidates' entries."""
    return f"{path_of(run)}/candidates"


async def newest_reign(store: MetadataStore, run: str) -> Reign | None:
    """The last one that began, if any did."""
    entry = await store.get(f"{path_of(run)}/epoch")
    return None if entry is None else msgspec.json.decode(entry.value, type=Reign)


class Authority(Protocol):
    """Whether this process may decide for its run."""

    epoch: int  # under which it leads: 1 for the first one

    def leads(self) -> bool:
        """Whether it is certain, now, that nobody else can lead."""

    async def certain(self) -> None:
        """Wait until ``leads()``. Raises ``Deposed``."""

    async def rivals(self) -> int:
        """How many others stand for it, as far as the metadata store knows. Raises ``StoreError``."""
        return 0

    async def step_down(self) -> None:
        """Let the next one lead, at once, and end this process. Raises ``ValueError`` where there can be none."""
        raise ValueError("this run has one coordinator for good: bin/start-coordinator starts one that has standbys")


class SoleAuthority(Authority):
    """That of a run which nobody else can lead."""

    epoch = 1

    def leads(self) -> bool:
        return True

    async def certain(self) -> None:
        return


SOLE = SoleAuthority()


class Term(Authority):
    """The time for which one candidate leads; made by ``Candidate.lead``. ``over`` says why it ended."""

    def __init__(
        self, store: MetadataStore, run: str, reign: Reign, version: int, *, asked: float, session_timeout_s: float
    ) -> None:
        """``asked``: loop time at which the session was last shown to live; ``version``: of the epoch's entry."""
        self.epoch = reign.epoch
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.lapses = 0
        self.resigned = False
        self.stepped_down = False
        self._store = store
        self._run = run
        self._reign = reign
        self._version = version
        self._loop = asyncio.get_running_loop()
        self._lease_s = LEASE * session_timeout_s
        self._every_s = session_timeout_s / CONFIRMATIONS
        self._until = asked + self._lease_s
        self._confirmed = asyncio.Event()
        self._keeping = asyncio.create_task(self._keep(), name=f"term {reign.epoch} of {run}")

    def leads(self) -> bool:
        return not self.over.done() and self._loop.time() < self._until

    async def certain(self) -> None:
        while not self.leads():
            if self.over.done():
                raise Deposed(self.over.result())
            self._confirmed.clear()
            confirmed = asyncio.ensure_future(self._confirmed.wait())
            waiting: set[asyncio.Future[Any]] = {confirmed, self.over}
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                confirmed.cancel()

    async def listens_at(self, address: str) -> None:
        """Let whoever looks for the leader find it. Raises ``Deposed``, ``StoreTimeout``."""
        reign = msgspec.structs.replace(self._reign, address=address)
        path = f"{path_of(self._run)}/epoch"
        try:
            self._version = await self._store.write(path, msgspec.json.encode(reign), expected=self._version)
        except VersionMismatch:
            self._end("somebody else leads")
            raise Deposed(self.over.result()) from None
        self._reign = reign

    async def raise_epoch(self) -> int:
        """Lead on under the next epoch, without anybody in between: for a leader that begins again with another node.
        Raises ``Deposed``, ``StoreError``."""
        reign = msgspec.structs.replace(self._reign, epoch=self.epoch + 1, address="")
        path, value = f"{path_of(self._run)}/epoch", msgspec.json.encode(reign)
        while True:
            await self.certain()
            try:
                entry = await self._store.get(reign.entry)
                standing = Standing(reign.name) if entry is None else msgspec.json.decode(entry.value, type=Standing)
                mine = msgspec.json.encode(msgspec.structs.replace(standing, epoch=reign.epoch))
                await self._store.multi([Write(reign.entry, mine), Write(path, value, expected=self._version)])
                break
            except StoreTimeout as error:
                log.info("epoch %d of %s: %s", reign.epoch, self._run, error)
                await asyncio.sleep(UNANSWERED_PAUSE_S)
            except (VersionMismatch, NoEntry):
                entry = await self._store.get(path)
                if entry is not None and entry.value == value:  # an earlier attempt, of which no answer came
                    break
                self._end("somebody else leads")
        self._reign, self._version, self.epoch = reign, self._version + 1, reign.epoch
        log.info("%s leads %s on, under epoch %d", reign.name, self._run, reign.epoch)
        return reign.epoch

    async def resign(self) -> None:
        """Let the next one lead, at once. Idempotent."""
        self.resigned = self.resigned or not self.over.done()
        self._end("it resigned")
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        with suppress(StoreError):  # the entry is gone, or goes with the session
            await self._store.delete(self._reign.entry)

    async def rivals(self) -> int:
        names = await self._store.children(queue_of(self._run))
        return len([name for name in names if name != self._reign.entry.rpartition("/")[2]])

    async def step_down(self) -> None:
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        self._until = -math.inf  # from here on, and only then may another one lead
        self.stepped_down = True
        with suppress(StoreError):  # it goes with this process, at the latest
            await self._store.delete(self._reign.entry)
        self._end("it has stepped down")

    async def _keep(self) -> None:
        """Confirm, again and again, until it is over."""
        while not self.over.done():
            asked = self._loop.time()
            try:
                entry = await self._store.get(self._reign.entry)
            except StoreTimeout as error:
                log.warning("epoch %d cannot be confirmed: %s", self.epoch, error)
                await asyncio.sleep(UNANSWERED_PAUSE_S)
                continue
            except StoreError as error:
                self._end(str(error))
                return
            if entry is None:
                self._end("its entry in the metadata store is gone: the servers heard nothing of it for too long")
                return
            late_s = self._loop.time() - self._until
            if late_s > 0:
                self.lapses += 1
                log.warning("epoch %d was uncertain for %.2f s", self.epoch, late_s)
            self._until = max(self._until, asked + self._lease_s)
            self._confirmed.set()
            await asyncio.sleep(self._every_s)

    def _end(self, why: str) -> None:
        if not self.over.done():
            self.over.set_result(why)


class Candidate:
    """One process that would lead a run."""

    def __init__(self, store: MetadataStore, run: str, name: str, *, session_timeout_s: float, pulse: str = "") -> None:
        """``session_timeout_s``: that of the store's session, which the servers must not have shortened; ``pulse``:
        where this process listens as long as it lives (``coordinator.pulse``), told with its standing, so that it is
        known before anybody can lead."""
        self._store = store
        self._run = run
        self._name = name
        self._session_timeout_s = session_timeout_s
        self._pulse = pulse
        self._queue = queue_of(run)
        self._epoch_path = f"{path_of(run)}/epoch"
        self._loop = asyncio.get_running_loop()

    async def lead(self) -> Term:
        """Stand, wait for its turn, however long that takes, and lead. A store that does not answer is asked again.
        Raises ``SessionLost`` and what else ends a store."""
        mine = await self._stand()
        try:
            async with aclosing(self._store.watch(self._queue)) as changes:
                while (term := await self._try(mine)) is None:
                    await self._news(changes)
                return term
        except BaseException:
            with suppress(StoreError):  # it goes with the session, at the latest
                await self._store.delete(mine)
            raise

    async def _stand(self) -> str:
        value = msgspec.json.encode(Standing(self._name, pulse=self._pulse))
        while True:
            try:
                return await self._store.create(f"{self._queue}/c-", value, ephemeral=True, sequential=True)
            except StoreTimeout as error:
                # It may have taken effect: such an entry is a place in the queue that nobody claims, and goes with
                # this session. So this session must not outlive it in vain.
                raise StoreError(f"it is unknown whether {self._name} stands: open the store again: {error}") from error

    async def _news(self, changes: Watch) -> None:
        if await anext(changes, None) is None:
            raise StoreError(f"{self._name}: the metadata store was closed while it waited to lead {self._run}")

    async def _try(self, mine: str) -> Term | None:
        """Lead, if it is this one's turn."""
        while True:
            try:
                names = await self._store.children(self._queue)
                name = mine.rpartition("/")[2]
                if name not in names:
                    raise Deposed(f"{self._name} does not stand any more: {mine} is gone")
                if names[0] != name:
                    return None
                return await self._take(mine)
            except StoreTimeout as error:
                log.info("%s waits to lead %s: %s", self._name, self._run, error)
                await asyncio.sleep(UNANSWERED_PAUSE_S)
            except (VersionMismatch, EntryExists):  # the epoch was raised meanwhile: look again
                continue
            except NoEntry as error:
                raise Deposed(f"{self._name} does not stand any more: {error}") from error

    async def _take(self, mine: str) -> Term:
        asked = self._loop.time()
        entry = await self._store.get(self._epoch_path)
        last = Reign(0, "", "") if entry is None else msgspec.json.decode(entry.value, type=Reign)
        if entry is not None and last.entry == mine:  # an earlier attempt, of which no answer came
            return self._term(last, entry.version, asked)
        reign = Reign(last.epoch + 1, self._name, mine)
        value = msgspec.json.encode(reign)
        standing = Write(mine, msgspec.json.encode(Standing(self._name, reign.epoch, self._pulse)))
        if entry is None:
            await self._store.multi([standing, Create(self._epoch_path, value)])
            return self._term(reign, 0, asked)
        await self._store.multi([standing, Write(self._epoch_path, value, expected=entry.version)])
        return self._term(reign, entry.version + 1, asked)

    def _term(self, reign: Reign, version: int, asked: float) -> Term:
        log.info("%s leads %s under epoch %d", self._name, self._run, reign.epoch)
        timeout_s = self._session_timeout_s
        return Term(self._store, self._run, reign, version, asked=asked, session_timeout_s=timeout_s)
