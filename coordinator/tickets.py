"""Single trajectories for people: their lives, why they wait, and what can be ordered for them.

Invariant: what is said here is what the parts say that decide: the ledger (state), the dispatcher (queue and host), the
env host (what a running one waits for), the journal (what ended before this sitting). Nothing is kept twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from actors.core import Actor, Node, Ref, handler
from actors.env.messages import DescribeEnv, EnvState, LeftPlaces, Outcome, RunningTrajectory
from bus.message import BusError
from coordinator.dispatch import ABORTED, Dispatcher
from coordinator.engines import Engines
from coordinator.messages import Changed
from coordinator.orders import (
    AbortTrajectory,
    DrainHost,
    Explain,
    Explained,
    FillHost,
    GetPlaces,
    GetQueues,
    GetTrajectory,
    Moment,
    Places,
    Queues,
    SetPlaces,
    SetWeights,
    TrajectoryLife,
)
from coordinator.scheduling.journal import Event
from coordinator.scheduling.ledger import Entry
from coordinator.scheduling.lives import Life, life_in
from coordinator.scheduling.rolling import RollingScheduler

DESCRIBE_TIMEOUT_S = 5.0

_WAITS_FOR = {
    "place": "a place on its env host, which has a few more tickets than places so that none stays free",
    "reset": "its environment to be reset",
    "engine": "an engine to generate its next turn",
    "environment": "its environment to take a step",
    "reward": "its reward",
    "store": "the trainer's store to keep it",
}


class Hands(Protocol):
    """What orders need of the coordinator."""

    node: Node
    engines: Engines

    def stop_there(self, host: Ref, ticket: str, reason: str) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...

    def flush(self) -> None: ...


class TicketDesk:
    """See the module docstring. ``journal``: the ledger's file, where there is one."""

    def __init__(
        self, scheduler: RollingScheduler, dispatcher: Dispatcher, hands: Hands, journal: Path | None = None
    ) -> None:
        self._scheduler = scheduler
        self._dispatcher = dispatcher
        self._hands = hands
        self._journal = journal

    # ---- questions -----------------------------------------------------------------------------------------------

    async def life(self, id_: str) -> TrajectoryLife:
        """All that is known of one ticket."""
        life = self._dispatcher.lives.of(id_)
        moments = [] if life is None else self._dispatcher.lives.moments(life)
        if life is None or moments[0].what not in ("admitted", "queued"):  # it began before this sitting, or long ago
            told = [] if self._journal is None else await asyncio.to_thread(life_in, self._journal, id_)
            moments = told[: len(told) - _common(told, moments)] + moments
        entry = self._scheduler.ledger.entry(id_) if id_ in self._scheduler.ledger else None
        ticket = entry.ticket if entry is not None else None if life is None else life.ticket
        running = await self._running(id_)
        state = self._state(id_, entry, running, moments)
        group, host = self._scheduler.group_of(id_), self._dispatcher.hosts.host_of(id_)
        return TrajectoryLife(
            ticket=id_,
            state=state,
            group=None if ticket is None else ticket.group,
            task=None if ticket is None else ticket.task,
            stream=group.stream if group is not None else "" if life is None else life.stream,
            purpose="" if ticket is None else ticket.purpose,
            host=host.name if host is not None else "" if life is None else life.host,
            moments=moments,
            running=running,
            why=await self._why(id_, state, life, running, moments),
        )

    async def _running(self, id_: str) -> RunningTrajectory | None:
        """What its env host says of it; nothing where that does not answer."""
        host = self._dispatcher.hosts.host_of(id_)
        if host is None:
            return None
        try:
            state = await self._hands.node.ask(host.ref, DescribeEnv(), EnvState, timeout_s=DESCRIBE_TIMEOUT_S)
        except BusError:
            return None
        return next((running for running in state.running if running.ticket == id_), None)

    def _state(self, id_: str, entry: Entry | None, running: RunningTrajectory | None, moments: list[Moment]) -> str:
        if self._dispatcher.waits(id_):
            return "waiting"
        if entry is not None and entry.state != "admitted":
            return "training" if entry.state == "taken" else "stored"
        if self._dispatcher.hosts.host_of(id_) is not None:
            return "settling" if running is not None and running.state in ("reward", "store") else "running"
        return "waiting" if entry is not None else moments[-1].what if moments else "unknown"

    # ---- why -----------------------------------------------------------------------------------------------------

    async def _why(
        self,
        id_: str,
        state: str,
        life: Life | None,
        running: RunningTrajectory | None,
        moments: list[Moment],
    ) -> str:
        match state:
            case "waiting":
                return self._why_it_waits(id_)
            case "running" | "settling":
                return await self._why_it_runs(id_, running)
            case "stored":
                return self._why_it_is_not_trained(id_)
            case "training":
                return f"{id_} is in the batch that is trained on now, for version {self._scheduler.version + 1}."
            case "unknown":
                return f"There is no ticket {id_}, in this sitting or an earlier one of the run."
        ran = f" It ran on env host {life.host}." if life is not None and life.host else ""
        return f"{id_} does not wait: it was {', '.join(filter(None, (moments[-1].what, moments[-1].detail)))}.{ran}"

    def _why_it_waits(self, id_: str) -> str:
        dispatcher = self._dispatcher
        entry = dispatcher.queues.entry(id_)
        if entry is None:
            return f"{id_} runs again once the resumed run has its engines ready."
        level, before, higher = dispatcher.queues.position(id_)
        waited = dispatcher.now() - entry.since
        ahead = f"{_number(before, 'ticket')} of its own stream {_are(before)} before it"
        if higher:
            ahead += f", {_number(higher, 'ticket')} on higher levels go first"
        flows = dispatcher.queues.flows(level)
        if len(flows) > 1:
            ahead += f", and it shares with {_number(len(flows) - 1, 'other stream')} by weight"
        return f"{id_} has waited {waited:.1f} s in the {level} queue: {ahead}. {self._why_no_host()}"

    def _why_no_host(self) -> str:
        hosts = self._dispatcher.hosts.states()
        if not hosts:
            return "There is no env host yet."
        if all(host.draining for host in hosts):
            return f"Every env host is being drained ({', '.join(host.node for host in hosts)}): fill one again."
        full = [host for host in hosts if not host.draining]
        drained = [host.node for host in hosts if host.draining]
        also = f" ({', '.join(drained)} being drained)" if drained else ""
        bound = self._dispatcher.hosts.bound
        if bound is not None and self._dispatcher.hosts.used >= bound:
            return f"This job may use {_number(bound, 'place')} of the cluster's, and does; other jobs have the rest."
        used, places = sum(host.used for host in full), sum(host.places for host in full)
        return f"Places are taken: {used} tickets are on {_number(len(full), 'env host')} with {places} places{also}."

    async def _why_it_runs(self, id_: str, running: RunningTrajectory | None) -> str:
        host = self._dispatcher.hosts.host_of(id_)
        where = "an env host" if host is None else f"env host {host.name}"
        if running is None:
            return f"{id_} is on {where}, which does not tell of it: its start or its outcome is on its way."
        text = (
            f"{id_} is on {where} since {running.seconds:.1f} s, has played {_number(running.turns, 'turn')} and "
            f"waits for {_WAITS_FOR.get(running.state, running.state)}."
        )
        return f"{text} {await self._engines()}" if running.state == "engine" else text

    async def _engines(self) -> str:
        if not self._hands.engines.proxies:
            return "There is no proxy yet."
        try:
            state = await self._hands.engines.describe(DESCRIBE_TIMEOUT_S)
        except BusError as error:
            return f"The proxy does not answer: {error}."
        engines = ", ".join(f"{engine.name} {engine.state} with {engine.in_flight}" for engine in state.engines)
        return f"Requests in flight by engine: {engines}; {state.queued} wait at the proxy for an engine that serves."

    def _why_it_is_not_trained(self, id_: str) -> str:
        scheduler = self._scheduler
        group = scheduler.group_of(id_)
        if group is None:
            return f"{id_} is stored."
        size = len(group.stored) + len(group.missing)
        if not group.complete:
            missing = ", ".join(sorted(group.missing)[:8])
            return (
                f"{id_} is stored and waits for its group {group.index}: {len(group.stored)} of {size} members are, "
                f"{missing} still to come. A group is trained on whole."
            )
        needed = scheduler.rules.groups_per_step
        batch = " A batch is being trained on; the next is taken after it." if scheduler.training else ""
        return (
            f"{id_} is stored, its group {group.index} is complete (version {group.version}) and waits for a batch: "
            f"{scheduler.complete_groups} groups are complete, {needed} make a batch, the oldest go first.{batch}"
        )

    async def explain(self, id_: str) -> Explained:
        return Explained((await self.life(id_)).why)

    # ---- orders --------------------------------------------------------------------------------------------------

    def abort(self, id_: str) -> Changed:
        """Raises ``ValueError`` for one that neither waits nor runs."""
        ledger, host = self._scheduler.ledger, self._dispatcher.hosts.host_of(id_)
        if host is not None:
            self._hands.stop_there(host.ref, id_, ABORTED)
            return Changed(f"{id_} is told to stop on env host {host.name}; it ends as lost, {ABORTED}")
        if self._dispatcher.waits(id_):
            self._hands.ended(Outcome(id_, "lost", ABORTED))
            return Changed(f"{id_} waited and is lost, {ABORTED}")
        state = f"is {ledger.entry(id_).state}" if id_ in ledger else "is not live"
        raise ValueError(f"{id_} {state}: only one that waits or runs can be aborted")

    def set_weights(self, weights: Mapping[str, float]) -> Changed:
        """Raises ``ValueError``."""
        shares = self._scheduler.set_weights(weights)
        self._dispatcher.queues.set_weights(shares)
        return Changed("shares are now " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))

    def drain(self, node: str, *, draining: bool) -> Changed:
        """Raises ``ValueError``."""
        running = self._dispatcher.hosts.drain(node, draining=draining)
        self._dispatcher.hosts_changed()
        self._hands.flush()
        if draining:
            return Changed(f"{node} is given no new tickets; {_number(running, 'trajectory')} still there")
        return Changed(f"{node} is given tickets again")

    def bind(self, bound: int) -> Places:
        """Raises ``ValueError``."""
        if bound < 0:
            raise ValueError(f"bound: expected 0 or more places, found {bound}")
        if bound != self._dispatcher.hosts.bound:
            self._scheduler.ledger.ruled(Event("ruled", [], places=bound))
        self._dispatcher.bind(bound)
        self._hands.flush()
        return self._dispatcher.places()

    def left_places(self, tickets: list[str]) -> None:
        """They are only scored and stored from now on."""
        self._dispatcher.left_places(tickets)
        self._hands.flush()


class TicketHandlers(Actor):
    """The coordinator's handlers for single trajectories; it has the desk and the dispatcher."""

    ticket_desk: TicketDesk
    dispatcher: Dispatcher

    @handler(concurrent=True)
    async def trajectory(self, message: GetTrajectory) -> TrajectoryLife:
        return await self.ticket_desk.life(message.ticket)

    @handler(concurrent=True)
    async def explain(self, message: Explain) -> Explained:
        return await self.ticket_desk.explain(message.ticket)

    @handler
    async def queues(self, message: GetQueues) -> Queues:
        return self.dispatcher.describe()

    @handler
    async def abort_trajectory(self, message: AbortTrajectory) -> Changed:
        return self.ticket_desk.abort(message.ticket)

    @handler
    async def set_weights(self, message: SetWeights) -> Changed:
        return self.ticket_desk.set_weights(message.weights)

    @handler
    async def drain_host(self, message: DrainHost) -> Changed:
        return self.ticket_desk.drain(message.node, draining=True)

    @handler
    async def fill_host(self, message: FillHost) -> Changed:
        return self.ticket_desk.drain(message.node, draining=False)

    @handler
    async def places(self, message: GetPlaces) -> Places:
        return self.dispatcher.places()

    @handler
    async def set_places(self, message: SetPlaces) -> Places:
        return self.ticket_desk.bind(message.bound)

    @handler
    async def left_places(self, message: LeftPlaces) -> None:
        self.ticket_desk.left_places(message.tickets)


def _common(told: list[Moment], remembered: list[Moment]) -> int:
    """How many of the last things that the journal tells are remembered, too."""
    known = {moment.what for moment in remembered}
    common = 0
    for moment in reversed(told):
        if moment.what not in known:
            break
        common += 1
    return common


def _number(count: int, what: str) -> str:
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{count} {what if count == 1 else plural}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
