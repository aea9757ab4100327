"""The coordinator actor: who takes part in a run, which tickets go where, and what came of them.

Invariant: every decision of the scheduler leaves here in the same turn of the loop, as a message that is sent until it
is answered, and every ticket is on exactly one env host until its outcome arrives or that host is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from actors.core import Ref, handler
from actors.env.messages import DescribeEnv, EnvState, LearnerVersion, Noted, Outcome, Start, Stop, Ticket
from actors.telemetry import SpansTaken
from actors.trainer.messages import Discard, Discarded
from bus.message import BusError
from coordinator.admin import AdminDesk
from coordinator.dispatch import USUAL, Batch, Dispatcher, Terms
from coordinator.hostbook import HostBook
from coordinator.hosts import HostHandlers, Hosts
from coordinator.job import Job
from coordinator.leadership import SOLE, Authority
from coordinator.losses import LossWatch, NodeLost, RoleLost, TooManyLosses
from coordinator.messages import (
    ROLES,
    Announce,
    Announced,
    Changed,
    Ending,
    Find,
    Found,
    GetPools,
    GetStatus,
    GetTrajectories,
    Join,
    Known,
    LetGo,
    Moved,
    Obeyed,
    Pause,
    Pools,
    Role,
    RoleFailed,
    RunOver,
    SetAlpha,
    StandBy,
    Status,
    Take,
    Trajectories,
    Unpause,
    Welcome,
)
from coordinator.resources.pools import pools_of
from coordinator.scheduling.rolling import RollingScheduler
from coordinator.tickets import TicketDesk, TicketHandlers

T = TypeVar("T")
log = logging.getLogger(__name__)

ORDERED = -1
"""Process id of a standby that is about to start."""

MEMBER = "member"
"""The actor of a joined node that is told when the run is over."""
DESCRIBE_TIMEOUT_S = 5.0
JOIN_S = 60.0
"""How long a node that begins again may take to end what it has and to join. It starts its roles after that."""
LET_GO_S = 10.0
MOVED_S = 5.0
"""Less than an actor waits for the answer to its announcement."""
ORDER_TIMEOUT_S = 60.0
ORDER_RETRIES = 10
SWEEP_EVERY_S = 5.0
"""How often it is looked whether tickets have waited too long, or are too many."""


class Sweep(msgspec.Struct, frozen=True):
    """From the coordinator to itself."""


class Coordinator(TicketHandlers, HostHandlers):
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
    ) -> None:
        self._left = left
        self._authority = authority
        self._scheduler = scheduler
        self._welcome = welcome
        self._failed = failed
        self._joined = joined
        self._spans = spans
        self._desk = desk
        self._warn = warn
        self._silence_s = silence_s
        self._least_silence_s = least_silence_s
        self.dismisses = True
        """Whether the others end with this actor."""
        self.host_desk = Hosts(self, welcome, hosts or HostBook())
        self._joins: dict[str, Join] = {}
        self._roles: dict[Role, asyncio.Future[Ref]] = {}
        self.dispatcher = Dispatcher(scheduler, terms, lambda: asyncio.get_running_loop().time())
        self.ticket_desk = TicketDesk(scheduler, self.dispatcher, self, journal)
        self._evaluations: dict[str, asyncio.Future[Outcome]] = {}
        self._over = False
        self._losses = losses
        self._learner: LearnerVersion | None = None
        self._vacant: set[Role] = set()  # that somebody had
        self._followers: defaultdict[Role, list[Callable[[Ref], object]]] = defaultdict(list)

    async def on_start(self) -> None:
        loop = asyncio.get_running_loop()
        self._roles = {role: loop.create_future() for role in ROLES}
        self.every(SWEEP_EVERY_S, Sweep())

    async def on_stop(self) -> None:
        waiting: list[asyncio.Future[Any]] = [*self._roles.values(), *self._evaluations.values()]
        for future in waiting:
            future.cancel()
        for join in self._joins.values() if self.dismisses and self._authority.leads() else ():
            if join.node.name != self.node.address.name:
                self.node.tell(Ref(join.node, MEMBER), RunOver("the run has ended"))

    # ---- who takes part ------------------------------------------------------------------------------------------

    @handler
    async def join(self, message: Join) -> Welcome:
        name = message.node.name
        before = self._joins.get(name)
        if before is not None and before.node != message.node:
            self._node_restarted(before)
        others = [join for other, join in self._joins.items() if other != name]
        here = name == self.node.address.name
        roles = message.roles if here else self.host_desk.roles_for(message, others)
        taken = msgspec.structs.replace(message, roles=roles)
        self._joins[name] = taken
        self._joined(taken)
        if not here:
            self._watch(taken)
        self._see_to_a_standby()
        return msgspec.structs.replace(self._welcome, roles=roles)

    def _see_to_a_standby(self) -> None:
        able = self.host_desk.next_standby(self._joins.values())
        if able is not None:
            self._joins[able.node.name] = msgspec.structs.replace(able, standby=ORDERED)
            self.node.background(self._order_a_standby(able))

    async def _order_a_standby(self, at: Join) -> None:
        """Where it cannot be, another node is to start it."""
        if await self._order(Ref(at.node, MEMBER), StandBy(self._welcome.run_directory), Obeyed):
            return
        now = self._joins.get(at.node.name)
        if now is not None and now.node == at.node:
            self._joins[at.node.name] = msgspec.structs.replace(now, standby=None)
            self._see_to_a_standby()

    def _watch(self, join: Join) -> None:
        name = join.node.name

        def lost(why: str) -> None:
            if self._joins.get(name) is not None and self._joins[name].node == join.node:
                self._node_lost(name, why)

        self.node.watch(join.node, silence_s=self._silence_s, least_s=self._least_silence_s, on_lost=lost)
        if join.pulse:
            self.node.background(self.host_desk.until_gone(join, lost))

    async def miss_who_does_not_join(self) -> None:
        """Of those who were told to begin again: who is not here in time is lost, though nobody could watch it."""
        await asyncio.sleep(JOIN_S)
        held = {role for join in self._joins.values() for role in join.roles}
        for join in self.host_desk.missed():
            name, roles = join.node.name, ", ".join(join.roles)
            why = f"it was told to begin again and has not joined within {JOIN_S:g} s"
            log.error("node %s (%s) is lost: %s", name, roles, why)
            self.host_desk.fell("lost", join, why)
            missing = [role for role in join.roles if role not in held]
            if missing:
                self._failed(NodeLost(missing[0], name, f"node {name} ({roles}) is lost: {why}"))

    async def dismiss(self, join: Join) -> None:
        """A node ends while the run goes on: its roles are vacant from now on. Raises ``BusError`` where it does not
        listen; it is lost then."""
        name = join.node.name
        self._joins.pop(name, None)  # first: from here on nobody misses it, and it has nothing
        self.node.unwatch(name)
        self._left(name)
        for role in join.roles:
            if role == "env":
                self._host_left(name)
            else:
                self._roles[role] = asyncio.get_running_loop().create_future()
                self._vacant.add(role)
        order = LetGo("let go: another node takes its place")
        try:
            await self.node.ask(Ref(join.node, MEMBER), order, Ending, timeout_s=LET_GO_S, retries=3)
        except BusError as error:
            self.host_desk.fell("lost", join, f"it does not hear that it is let go: {error}")
            self.node.lose(join.node, "it does not hear that it is let go")
            raise

    def welcome_at(self, checkpoint: Path) -> None:
        """A trainer that joins from now on begins there, at the run's version, with what is stored."""
        self._welcome = msgspec.structs.replace(
            self._welcome, resume=str(checkpoint), version=self._scheduler.version, keeps_store=True
        )

    def on_moved(self, role: Role, follow: Callable[[Ref], object]) -> None:
        """``follow`` is told, in this process, whenever another actor has a role."""
        self._followers[role].append(follow)

    async def _tell_moved(self, role: Role, ref: Ref) -> None:
        """Everybody who takes part talks to another actor from now on; who does not answer is watched anyway."""
        others = [join.node for join in self._joins.values() if join.node.name != self.node.address.name]
        asked = (
            self.node.ask(Ref(node, MEMBER), Moved(role, ref), Known, timeout_s=MOVED_S, retries=3) for node in others
        )
        for node, answer in zip(others, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, BusError):
                log.warning("node %s does not know that another actor is the %s now: %s", node.name, role, answer)
            elif isinstance(answer, BaseException):
                raise answer

    def _node_lost(self, name: str, why: str) -> None:
        join = self._joins.pop(name)
        self._left(name)
        self._see_to_a_standby()
        self.host_desk.fell("lost", join, why)
        roles = ", ".join(join.roles)
        if not join.roles:
            log.error("spare %s is lost: %s", name, why)
        elif join.roles == ["env"] and self._env_replaced(name):  # env hosts are interchangeable
            log.error("node %s (%s): %s; its trajectories run again elsewhere", name, roles, why)
            self._host_left(name)
        else:
            self._failed(NodeLost(join.roles[0], name, f"node {name} ({roles}) is lost: {why}"))

    def _env_replaced(self, name: str) -> bool:
        """Whether there are, or will be, other env hosts than a node that is gone."""
        spare = self.host_desk.spare_for_env(self._joins.values())
        if spare is not None:
            self._joins[spare.node.name] = taking = msgspec.structs.replace(spare, roles=["env"])
            self._joined(taking)
            self.node.background(self._order(Ref(spare.node, MEMBER), Take(["env"]), Obeyed))
        return spare is not None or any("env" in join.roles for other, join in self._joins.items() if other != name)

    def _node_restarted(self, before: Join) -> None:
        """It joins again before anybody has missed it: what ran there is gone. Only env hosts can be had back."""
        name = before.node.name
        self.host_desk.fell("lost", before, "it has restarted")
        if not before.roles:
            return
        if before.roles != ["env"]:
            roles = ", ".join(before.roles)
            text = f"node {name} ({roles}) has restarted: what its roles held is lost"
            self._failed(NodeLost(before.roles[0], name, text))
            return
        log.error("node %s (env) has restarted; its trajectories run again", name)
        self._host_left(name)

    def _host_left(self, name: str) -> None:
        tickets = self.dispatcher.hosts.leave(name)
        self.dispatcher.hosts_changed()
        for ticket in tickets:
            self.ended(Outcome(ticket, "lost", "env_host_lost"))

    @handler(concurrent=True)
    async def announce(self, message: Announce) -> Announced:
        """A successor is there for all others before it hears so."""
        if message.role in self._vacant:
            await self._tell_moved(message.role, message.ref)
            self._vacant.discard(message.role)
            for follow in self._followers[message.role]:
                follow(message.ref)
        if message.role == "env":
            self.dispatcher.hosts.join(message.ref, message.places)
            self.dispatcher.hosts_changed()
            if self._learner is not None:  # it joins a run that is under way
                self.node.tell(message.ref, self._learner)
        self.host_desk.up(message)
        future = self._roles[message.role]
        if not future.done():
            future.set_result(message.ref)
        self.flush()
        return Announced()

    @handler(concurrent=True)
    async def find(self, message: Find) -> Found:
        return Found(await self.role(message.role, message.timeout_s))

    async def role(self, role: Role, timeout_s: float) -> Ref:
        """The actor that has the role. Raises ``TimeoutError`` naming it."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._roles[role]), timeout_s)
        except TimeoutError:
            raise TimeoutError(f"nobody took the role {role!r} within {timeout_s:g} s") from None

    @property
    def authority(self) -> Authority:
        """By which this process decides."""
        return self._authority

    @property
    def joins(self) -> list[Join]:
        """Who takes part at the moment."""
        return list(self._joins.values())

    @property
    def env_hosts(self) -> list[Ref]:
        return self.dispatcher.hosts.refs()

    def has(self, role: Role) -> Ref | None:
        """The actor that has a role, if anybody has it by now."""
        future = self._roles[role]
        return future.result() if future.done() and not future.cancelled() else None

    def host_of(self, ticket: str) -> Ref | None:
        """The env host on which a ticket is, until its outcome arrives."""
        host = self.dispatcher.hosts.host_of(ticket)
        return None if host is None else host.ref

    @handler
    async def role_failed(self, message: RoleFailed) -> None:
        join = self._joins.get(message.node)
        if join is not None:
            self.host_desk.fell("failed", join, message.reason)
        self._failed(RoleLost(message.role, message.node, message.reason))

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
        trainer = self._roles["trainer"]
        if scheduler.to_discard and trainer.done():
            discarded, scheduler.to_discard = scheduler.to_discard, []
            self.node.background(self._order(trainer.result(), Discard(discarded), Discarded))

    def adopt(self, host: Ref, tickets: Sequence[str]) -> None:
        """What a host runs by the order of an earlier leader; what has no place in the books is stopped there."""
        ledger = self._scheduler.ledger
        known = [ticket for ticket in tickets if ticket in ledger]
        running = [ticket for ticket in known if ledger.entry(ticket).state == "admitted"]
        self.dispatcher.hosts.adopt(host, running)
        strangers = [ticket for ticket in tickets if ticket not in known]
        if strangers:
            self.node.background(self._order(host, Stop(strangers, "abandoned"), Noted))

    def end(self) -> None:
        """The run ends: what comes back is still counted, but nothing more is started."""
        self._over = True
        self._scheduler.close()

    async def _start_at(self, batch: Batch) -> None:
        if await self._order(batch.host, Start(batch.tickets, batch.more), Noted):
            return
        for ticket in batch.tickets:
            host = self.dispatcher.hosts.host_of(ticket.id)
            if host is not None and host.ref == batch.host:
                self.ended(Outcome(ticket.id, "lost", "env_host_lost"))

    async def _order(self, to: Ref, message: object, reply: type[T]) -> bool:
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
            self.node.background(self._order(host, Stop(tickets, reason), Noted))

    def stop_there(self, host: Ref, ticket: str, reason: str) -> None:
        """End one that runs; its outcome will say so."""
        self.node.background(self._order(host, Stop([ticket], reason), Noted))

    def proxy(self) -> Ref | None:
        """If there is one yet."""
        proxy = self._roles["proxy"]
        return proxy.result() if proxy.done() else None

    @handler
    async def sweep(self, message: Sweep) -> None:
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
        return await self._desk.status(self.node, self._roles["proxy"])

    @handler
    async def pools(self, message: GetPools) -> Pools:
        job = msgspec.json.decode(self._welcome.job, type=Job)
        return pools_of(self._joins.values(), job.resource_profile)

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
