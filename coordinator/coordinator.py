"""The coordinator actor: which tickets go where, and what came of them; who takes part is in its roster.

Invariant: every decision of the scheduler leaves here in the same turn of the loop, as a message that is sent until it
is answered, and every ticket is on exactly one env host until its outcome arrives or that host is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from actors.core import Ref, handler
from actors.env.messages import DescribeEnv, EnvState, LearnerVersion, Noted, Outcome, Start, Stop, Ticket
from actors.proxy.messages import TrajectoryEnded
from actors.telemetry import SpansTaken
from actors.trainer.messages import Discard, Discarded
from bus.message import BusError
from coordinator.admin import AdminDesk
from coordinator.dispatch import USUAL, Batch, Dispatcher, Terms
from coordinator.engines import Engines
from coordinator.hostbook import HostBook
from coordinator.leadership import SOLE, Authority
from coordinator.losses import LossWatch, TooManyLosses
from coordinator.messages import (
    Announce,
    Announced,
    Changed,
    GetPools,
    GetStatus,
    GetTrajectories,
    Join,
    Pause,
    Pools,
    SetAlpha,
    Status,
    Trajectories,
    Unpause,
    Welcome,
)
from coordinator.resources.pools import pools_of
from coordinator.roster import News, Patience, Roster, RosterHandlers
from coordinator.scheduling.rolling import RollingScheduler
from coordinator.tickets import TicketDesk, TicketHandlers

T = TypeVar("T")
log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
ORDER_TIMEOUT_S = 60.0
ORDER_RETRIES = 10
SWEEP_EVERY_S = 5.0
"""How often it is looked whether tickets have waited too long, or are too many."""


class Sweep(msgspec.Struct, frozen=True):
    """From the coordinator to itself."""


class Coordinator(TicketHandlers, RosterHandlers):
    """See the module docstring. ``failed`` ends the run with a named error; ``terms`` are the dispatcher's, ``journal``
    is the ledger's file."""

    def __init__(
        self,
        scheduler: RollingScheduler,
        welcome: Welcome,
        *,
        failed: Callable[[BaseException], None],
        joined: Callable[[Join], None],
        spans: Callable[[SpansTaken], None],
        desk: AdminDesk,
        warn: Callable[[str], None],
        losses: LossWatch,
        silence_s: float,
        terms: Terms = USUAL,
        journal: Path | None = None,
        left: Callable[[str], None] = lambda node: None,
        authority: Authority = SOLE,
        hosts: HostBook | None = None,
        least_silence_s: float | None = None,
        changed: Callable[[Join], None] = lambda join: None,
    ) -> None:
        self._authority = authority
        self._scheduler = scheduler
        self._failed = failed
        self._spans = spans
        self._desk = desk
        self._warn = warn
        self.dismisses = True
        """Whether the others end with this actor."""
        news, patience = News(failed, joined, left, warn, changed), Patience(silence_s, least_silence_s)
        self.roster = Roster(self, welcome, hosts or HostBook(), news, patience, epoch=authority.epoch)
        self.engines: Engines
        self.dispatcher = Dispatcher(scheduler, terms, lambda: asyncio.get_running_loop().time())
        self.ticket_desk = TicketDesk(scheduler, self.dispatcher, self, journal)
        self._evaluations: dict[str, asyncio.Future[Outcome]] = {}
        self._over = False
        self._losses = losses
        self._learner: LearnerVersion | None = None

    async def on_start(self) -> None:
        self.engines = Engines(self.node, lambda: self.roster.proxies.refs)
        self.every(SWEEP_EVERY_S, Sweep())

    async def on_stop(self) -> None:
        for future in self._evaluations.values():
            future.cancel()
        self.roster.close(dismisses=self.dismisses and self._authority.leads())

    @property
    def authority(self) -> Authority:
        """By which this process decides."""
        return self._authority

    # ---- env hosts -----------------------------------------------------------------------------------------------

    @handler(concurrent=True)
    async def announce(self, message: Announce) -> Announced:
        """A successor is there for all others before it hears so."""
        await self.roster.announce(message)
        if message.role == "env":
            self.dispatcher.hosts.join(message.ref, message.places)
            self.dispatcher.hosts_changed()
            if self._learner is not None:  # it joins a run that is under way
                self.node.tell(message.ref, self._learner)
        self.flush()
        return Announced()

    def host_left(self, name: str) -> None:
        """A node plays no more: its tickets are lost, and run again elsewhere; the proxies hear of them from here."""
        tickets = self.dispatcher.hosts.leave(name)
        self.dispatcher.hosts_changed()
        for ticket in tickets:
            for proxy in self.roster.proxies.refs:
                self.node.tell(proxy, TrajectoryEnded(ticket, whole=False))
            self.ended(Outcome(ticket, "lost", "env_host_lost"))

    @property
    def env_hosts(self) -> list[Ref]:
        return self.dispatcher.hosts.refs()

    def host_of(self, ticket: str) -> Ref | None:
        """The env host on which a ticket is, until its outcome arrives."""
        host = self.dispatcher.hosts.host_of(ticket)
        return None if host is None else host.ref

    # ---- tickets -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what the scheduler has decided; what cannot be sent now goes with the next sweep."""
        if self._over or not self._authority.leads():
            return
        scheduler = self._scheduler
        if scheduler.to_stop:  # first, so that what waits here is not started any more
            stops, scheduler.to_stop = scheduler.to_stop, []
            self._stop(stops)
        for batch in self.dispatcher.batches():
            self.node.background(self._start_at(batch))
        trainer = self.roster.has("trainer")
        if scheduler.to_discard and trainer is not None:
            discarded, scheduler.to_discard = scheduler.to_discard, []
            self.node.background(self.order(trainer, Discard(discarded), Discarded))

    def adopt(self, host: Ref, tickets: Sequence[str]) -> None:
        """What a host runs by the order of an earlier leader; what has no place in the books is stopped there."""
        ledger = self._scheduler.ledger
        known = [ticket for ticket in tickets if ticket in ledger]
        running = [ticket for ticket in known if ledger.entry(ticket).state == "admitted"]
        self.dispatcher.hosts.adopt(host, running)
        strangers = [ticket for ticket in tickets if ticket not in known]
        if strangers:
            self.node.background(self.order(host, Stop(strangers, "abandoned"), Noted))

    def end(self) -> None:
        """The run ends: what comes back is still counted, but nothing more is started."""
        self._over = True
        self._scheduler.close()

    async def _start_at(self, batch: Batch) -> None:
        if await self.order(batch.host, Start(batch.tickets, batch.more), Noted):
            return
        for ticket in batch.tickets:
            host = self.dispatcher.hosts.host_of(ticket.id)
            if host is not None and host.ref == batch.host:
                self.ended(Outcome(ticket.id, "lost", "env_host_lost"))

    async def order(self, to: Ref, message: object, reply: type[T]) -> bool:
        """Whether an order has arrived, for sure. If not, the watch over its node ends the run or its part in it."""
        try:
            await self.node.ask(to, message, reply, timeout_s=ORDER_TIMEOUT_S, retries=ORDER_RETRIES)
        except BusError as error:
            log.info("an order has not arrived: %s", error)
            return False
        return True

    def _stop(self, stops: list[tuple[str, str]]) -> None:
        shares: dict[tuple[Ref, str], list[str]] = {}
        for ticket, reason in stops:
            had = self.dispatcher.stop(ticket)
            if had is not None:
                shares.setdefault((had.ref, reason), []).append(ticket)
        for (host, reason), tickets in shares.items():
            self.node.background(self.order(host, Stop(tickets, reason), Noted))

    def stop_there(self, host: Ref, ticket: str, reason: str) -> None:
        """End one that runs; its outcome will say so."""
        self.node.background(self.order(host, Stop([ticket], reason), Noted))

    @handler
    async def sweep(self, message: Sweep) -> None:
        self.roster.casting.book.settle()
        if not self._over:
            self.dispatcher.sweep()
            self.flush()

    @handler
    async def outcome(self, message: Outcome) -> Noted:
        await self._authority.certain()
        self.ended(message)
        return Noted()

    def ended(self, outcome: Outcome) -> None:
        """A ticket's outcome, from its host or instead of one that will not come."""
        self.dispatcher.ended(outcome)
        self._watch_losses(outcome)
        evaluation = self._evaluations.pop(outcome.ticket, None)
        if evaluation is not None:
            if not evaluation.done():
                evaluation.set_result(outcome)
            self.flush()
            return
        if outcome.state == "stored":
            self._scheduler.stored(outcome)
        else:
            self._scheduler.lost(outcome)
        self.flush()

    def _watch_losses(self, outcome: Outcome) -> None:
        """People hear of the first of a kind; the log has them all."""
        try:
            warning = self._losses.ended(outcome)
        except TooManyLosses as error:
            self._failed(error)
        else:
            if warning is not None:
                self._warn(warning)

    def learner_version(self, version: int, alpha: int) -> None:
        """Tell all env hosts which trajectories may still be trained on."""
        self._learner = LearnerVersion(version, alpha)
        for host in self.dispatcher.hosts.refs():
            self.node.tell(host, self._learner)

    async def evaluate(
        self, tickets: list[Ticket], timeout_s: float, told: Callable[[Outcome], None] | None = None
    ) -> list[Outcome]:
        """Run tickets that are nobody's business but the caller's to their outcomes; ``told`` hears of each as it
        comes. Raises ``TimeoutError`` naming how many are missing."""
        loop = asyncio.get_running_loop()
        futures: dict[str, asyncio.Future[Outcome]] = {ticket.id: loop.create_future() for ticket in tickets}
        for future in futures.values():
            future.add_done_callback(lambda done: _tell(done, told))
        self._evaluations |= futures
        self.dispatcher.evaluate(tickets)
        self.flush()
        try:
            async with asyncio.timeout(timeout_s):
                return list(await asyncio.gather(*futures.values()))
        except TimeoutError:
            missing = [id_ for id_ in futures if id_ in self._evaluations]
            raise TimeoutError(
                f"evaluation: {len(missing)} of {len(tickets)} episodes did not end within {timeout_s:g} s"
            ) from None
        finally:
            for id_ in futures:
                if self._evaluations.pop(id_, None) is not None:
                    self.dispatcher.withdraw(id_)

    @handler
    async def spans(self, message: SpansTaken) -> None:
        self._spans(message)

    # ---- the admin shell -----------------------------------------------------------------------------------------

    @handler(concurrent=True)
    async def status(self, message: GetStatus) -> Status:
        return await self._desk.status(self.engines)

    @handler
    async def pools(self, message: GetPools) -> Pools:
        return pools_of(self.roster.joins, self.roster.casting.job.resource_profile)

    @handler(concurrent=True)
    async def trajectories(self, message: GetTrajectories) -> Trajectories:
        states = [
            await self.node.ask(host, DescribeEnv(), EnvState, timeout_s=DESCRIBE_TIMEOUT_S)
            for host in self.dispatcher.hosts.refs()
        ]
        return Trajectories([running for state in states for running in state.running])

    @handler
    async def pause(self, message: Pause) -> Changed:
        return self._desk.pause()

    @handler
    async def unpause(self, message: Unpause) -> Changed:
        changed = self._desk.unpause()
        self.flush()
        return changed

    @handler
    async def set_alpha(self, message: SetAlpha) -> Changed:
        changed = self._desk.set_alpha(message.alpha)
        self.learner_version(self._scheduler.version, self._scheduler.rules.alpha)
        self.flush()
        return changed


def _tell(done: asyncio.Future[Outcome], told: Callable[[Outcome], None] | None) -> None:
    if told is not None and not done.cancelled() and done.exception() is None:
        told(done.result())
