"""The desk: an actor beside the coordinator's that answers what people ask of a run.

Invariant: no question holds up the run. Each is answered in a task of its own, from what the parts say of themselves
within a deadline; a part that does not answer is named in the error.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

from actors.core import Actor, Ref, handler
from actors.env.messages import DescribeEnv, EnvState, Followed, FollowTrajectory
from actors.proxy.messages import CostsState, DescribeCosts, ProxyState
from actors.weightsync.messages import DescribeWeights
from bus.message import BusError, CannotListen
from bus.security import ClusterKey
from coordinator.admin import RunState
from coordinator.bundle.files import run_files
from coordinator.bundle.redaction import Redactor, secrets_of
from coordinator.coordinator import Coordinator
from coordinator.desk import figures
from coordinator.desk.audit import FILE as AUDIT_FILE
from coordinator.desk.audit import AuditLog
from coordinator.desk.endpoint import Endpoint
from coordinator.desk.exposition import Exposition
from coordinator.desk.hostlooks import look_at_hosts
from coordinator.desk.messages import (
    Audit,
    Backlog,
    Engines,
    FetchFiles,
    FilePiece,
    Follow,
    GetAudit,
    GetBacklog,
    GetEngines,
    GetHardware,
    GetMetrics,
    GetShards,
    GetSurvey,
    GetVersions,
    Hardware,
    MetricsText,
    NodeHardware,
    Shards,
    Survey,
    Versions,
)
from coordinator.desk.orders import GiveOrder, Orders
from coordinator.desk.survey import Surveyor
from coordinator.handover import Handover
from coordinator.messages import Changed, Role
from coordinator.metadata.measured import Shard
from coordinator.resources.mapper import merged
from coordinator.resources.resolve import Placement
from coordinator.scheduling.rolling import RollingScheduler
from hwprobe import decode

PART_ANSWERS_S = 5.0
PIECE_BYTES = 256 * 1024
FOLLOW_ITEM_S = 15.0
"""A trajectory that is followed says something at least this often, if only that it still waits."""


class NotRunning(BusError):
    """What was asked about is not there; the message says what is."""


class Desk(Actor):
    """See the module docstring."""

    def __init__(
        self,
        coordinator: Coordinator,
        scheduler: RollingScheduler,
        state: RunState,
        placement: Placement,
        *,
        store: str,
        shards: list[Shard],
        directory: Path,
        key: ClusterKey | None,
        listening: Callable[[str], None],
        metrics: tuple[str, int] | None = None,
        handover: Handover | None = None,
    ) -> None:
        """``metrics``: host and port of the endpoint for Prometheus, if there is to be one; ``listening`` hears where
        it is."""
        self._coordinator = coordinator
        self._scheduler = scheduler
        self._state = state
        self._placement = placement
        self._store = store
        self._shards = shards
        self._metrics = metrics
        self._handover = handover
        self._listening = listening
        self._endpoint = Endpoint(self._figures)
        self._directory = directory
        self._audit = AuditLog(directory / AUDIT_FILE)
        self._key = key
        self._surveyor: Surveyor
        self._orders: Orders

    async def on_start(self) -> None:
        """Raises ``CannotListen`` where the metrics endpoint cannot be."""
        self._surveyor = Surveyor(self.node, lambda: self._coordinator.roster.joins)
        self._orders = Orders(
            self.node,
            self._coordinator,
            self._scheduler,
            state=self._state,
            audit=self._audit,
            key=self._key,
            handover=self._handover,
            directory=self._directory,
        )
        if self._metrics is not None:
            host, port = self._metrics
            try:
                self._listening(await self._endpoint.start(host, port))
            except OSError as error:
                raise CannotListen(f"coordinator.metrics_port: {host}:{port}: {error.strerror or error}") from None

    async def on_stop(self) -> None:
        await self._endpoint.stop()

    # ---- looking -------------------------------------------------------------------------------------------------

    @handler(concurrent=True)
    async def survey(self, message: GetSurvey) -> Survey:
        return await self._surveyor.take()

    @handler(concurrent=True)
    async def engines(self, message: GetEngines) -> Engines:
        state = await self._proxy()
        return Engines(state.engines, state.queued, state.tokens, state.counters)

    @handler(concurrent=True)
    async def queues(self, message: GetBacklog) -> Backlog:
        scheduler = self._scheduler
        proxy, running, survey = await self._proxy(), await self._running(), await self._surveyor.take()
        in_flight, buffered = scheduler.counts()
        return Backlog(
            admission="open" if scheduler.is_open else "closed",
            capacity=scheduler.rules.capacity,
            groups=scheduler.groups,
            groups_complete=scheduler.complete_groups,
            groups_needed=scheduler.rules.groups_per_step,
            in_flight=in_flight,
            buffered=buffered,
            waiting=dict(Counter(one.state for state in running for one in state.running)),
            proxy=proxy.queued,
            engines={engine.name: engine.in_flight for engine in proxy.engines},
            mailboxes={
                f"{actor}@{node.name}": described.queued
                for node in survey.nodes
                if node.description is not None
                for actor, described in node.description.actors.items()
                if described.queued
            },
            tickets=self._coordinator.dispatcher.describe(),
        )

    @handler(concurrent=True)
    async def versions(self, message: GetVersions) -> Versions:
        weightsync = self._part("weightsync")
        weights = await self.node.ask(weightsync, DescribeWeights(), timeout_s=PART_ANSWERS_S, about="weightsync")
        return Versions(self._scheduler.version, self._scheduler.rules.alpha, weights)

    @handler
    async def shards(self, message: GetShards) -> Shards:
        return Shards(self._store, self._shards)

    @handler(concurrent=True)
    async def hardware(self, message: GetHardware) -> Hardware:
        nodes = [NodeHardware(join.node.name, decode(join.affinity)) for join in self._coordinator.roster.joins]
        try:
            known = await self._coordinator.engines.ask_each(DescribeCosts(), CostsState, timeout_s=PART_ANSWERS_S)
        except BusError:  # what is known without it is worth an answer
            return Hardware(nodes, self._placement.places)
        return Hardware(nodes, self._placement.places, merged(list(known.values())))

    @handler(concurrent=True)
    async def metrics(self, message: GetMetrics) -> MetricsText:
        return MetricsText(await self._figures())

    async def _figures(self) -> str:
        """Everything that Prometheus may see; parts that do not answer are reported, not waited for twice."""
        text = Exposition()
        survey, hosts = await asyncio.gather(
            self._surveyor.take(), look_at_hosts(self.node, self._coordinator.roster.joins)
        )
        await figures.add_nodes(text, survey)
        for host, reading in hosts.items():
            figures.add_host(text, host, reading)
        figures.add_run(text, self._state, self._scheduler)
        figures.add_hosts(text, self._coordinator.roster.describe())
        figures.add_shards(text, self._shards)
        about = "Whether a part of the run answered."
        try:
            figures.add_proxy(text, await self._proxy())
            text.gauge("rollart_part_up", about, 1, part="proxy")
        except BusError:
            text.gauge("rollart_part_up", about, 0, part="proxy")
        try:
            figures.add_environments(text, await self._running())
            text.gauge("rollart_part_up", about, 1, part="env")
        except BusError:
            text.gauge("rollart_part_up", about, 0, part="env")
        return str(text)

    @handler
    async def follow(self, message: Follow) -> AsyncIterator[Followed]:
        """Raises ``NotRunning``."""
        ticket = message.ticket
        host = self._coordinator.host_of(ticket) if ticket else await self._busiest_host()
        if host is None:
            raise NotRunning(f"trajectory {ticket} does not run; 'explain {ticket}' says what became of it")
        items = self.node.stream(
            host, FollowTrajectory(ticket), timeout_s=FOLLOW_ITEM_S, about=ticket or "the next one"
        )
        async with aclosing(items) as steps:
            async for step in steps:
                yield step

    @handler
    async def files(self, message: FetchFiles) -> AsyncIterator[FilePiece]:
        """Read beside the event loop."""
        files = run_files(self._directory, Redactor(secrets_of(os.environ)))
        while (file := await asyncio.to_thread(next, files, None)) is not None:
            for start in range(0, max(len(file.data), 1), PIECE_BYTES):
                end = start + PIECE_BYTES
                yield FilePiece(file.name, file.data[start:end], end >= len(file.data), file.note)

    # ---- orders --------------------------------------------------------------------------------------------------

    @handler(concurrent=True, cancellable=False)
    async def give_order(self, message: GiveOrder) -> Changed:
        return await self._orders.give(message)

    @handler
    async def audit(self, message: GetAudit) -> Audit:
        return Audit(self._audit.newest(message.count))

    # ---- the parts -----------------------------------------------------------------------------------------------

    def _part(self, role: Role) -> Ref:
        """Raises ``NotRunning`` while nobody has the role."""
        ref = self._coordinator.roster.has(role)
        if ref is None:
            raise NotRunning(f"the {role} is not up yet; 'nodes' says who has joined")
        return ref

    async def _proxy(self) -> ProxyState:
        """All of them. Raises ``BusError``."""
        self._part("proxy")
        return await self._coordinator.engines.describe(PART_ANSWERS_S)

    async def _running(self) -> list[EnvState]:
        """Of all env hosts, one after the other."""
        return [
            await self.node.ask(host, DescribeEnv(), EnvState, timeout_s=PART_ANSWERS_S, about="env host")
            for host in self._coordinator.env_hosts
        ]

    async def _busiest_host(self) -> Ref:
        """The env host with most trajectories. Raises ``NotRunning``."""
        hosts = self._coordinator.env_hosts
        if not hosts:
            raise NotRunning("there is no env host yet")
        running = await self._running()
        return max(zip(hosts, running, strict=True), key=lambda pair: len(pair[1].running))[0]
