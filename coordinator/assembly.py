"""The parts of a run: made in its control process, brought together, and handed to the pipeline.

    open: coordinator, desk --> address, leader's entry --> nodes that follow --> roles of this process
    peers: wait for every role, wherever it is --> pipeline

Invariant: the pipeline begins when every role is there, and not before; whatever keeps one from starting ends the run,
by name.
"""

from __future__ import annotations

import asyncio
import os

import msgspec

from actors.core import Node, Ref
from actors.core.leader import Leader
from actors.telemetry import Spans, report_spans
from actors.version import VERSION
from bus.message import BusError
from coordinator.admin import AdminDesk, RunState
from coordinator.checkpoints import Checkpoints
from coordinator.coordinator import Coordinator
from coordinator.desk.desk import Desk
from coordinator.desk.messages import DESK
from coordinator.dispatch import Terms
from coordinator.engines import Engines
from coordinator.fate import Fate
from coordinator.handover import Handover
from coordinator.hostbook import HostBook
from coordinator.job import declared_classes
from coordinator.launch import ADDRESS_FILE, CONTROL, Launch, policy_directory
from coordinator.launching.readiness import keep_telling, tell_ready
from coordinator.leadership import SOLE, Authority
from coordinator.losses import LossWatch
from coordinator.messages import ROLES, Join, Role, Welcome
from coordinator.metadata.measured import Shard
from coordinator.observe.progress import Progress
from coordinator.observe.recorder import Recorder
from coordinator.observe.rundir import RunDirectory
from coordinator.pipeline import Peers, Pipeline
from coordinator.resources.mapper import COST_FILE, Mapper
from coordinator.resources.mappings import mapping_of
from coordinator.resources.rebinder import Rebinder
from coordinator.roles import START, RoleContext
from coordinator.scheduling.hotwatch import HotWatch
from coordinator.scheduling.rolling import RollingScheduler
from coordinator.scheduling.succession import Found
from coordinator.takeover import Led, Takeover, take_over
from coordinator.telling import Told
from coordinator.vigil import Vigil
from hwprobe import encode


class Sitting(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts of a run share, from its first process to the last one's end."""

    launch: Launch
    directory: RunDirectory
    progress: Progress
    fate: Fate
    scheduler: RollingScheduler
    recorder: Recorder
    checkpoints: Checkpoints
    state: RunState
    shards: list[Shard]
    spans: Spans
    losses: LossWatch
    version: int  # that it begins with
    led: Led | None  # of a run that other processes may lead on
    found: Found | None  # what another process left that led it before
    hosts: HostBook | None = None  # of a run whose hosts may be replaced

    @property
    def name(self) -> str:
        return self.directory.path.name

    @property
    def authority(self) -> Authority:
        return SOLE if self.led is None else self.led.term


class Assembly:
    """See the module docstring; made by ``open``."""

    def __init__(
        self,
        sitting: Sitting,
        node: Node,
        told: Told,
        *,
        coordinator: Coordinator,
        handover: Handover,
        takeover: Takeover | None,
    ) -> None:
        self.takeover = takeover
        self._handover = handover
        self._sitting = sitting
        self._node = node
        self._told = told
        self.coordinator = coordinator
        ref = Ref(node.address, "coordinator")
        self._starting = asyncio.gather(*(self._start_role(role, ref) for role in sitting.launch.local_roles))

    @classmethod
    async def open(cls, sitting: Sitting, node: Node, told: Told) -> Assembly:
        """Raises ``BusError`` where a run cannot be led on, and what the metadata store raises."""
        led, found = sitting.led, sitting.found
        takeover = None if led is None or found is None else await take_over(node, led, sitting.scheduler, found)
        coordinator = _coordinator(sitting, node, told)
        if found is not None and found.places is not None:
            coordinator.dispatcher.bind(found.places)
        together = takeover
        if led is not None:
            coordinator.roster.casting.expect(led.told)
            if takeover is None and led.kept is not None:
                together = Takeover(led.kept, None, None)
        if together is not None:
            coordinator.roster.casting.expect(together.joins)
        ref = await node.spawn(lambda: coordinator, "coordinator", restarts=0)
        handover = _handover(sitting, node, coordinator)
        await node.spawn(lambda: _desk(sitting, coordinator, handover), DESK)
        _write_address(sitting, ref)
        if led is not None:
            await led.term.listens_at(ref.node.control)
        if together is not None:
            with coordinator.roster.calling_together():
                await together.call_together(node, ref, coordinator.adopt)
        node.background(coordinator.roster.miss_who_does_not_join())
        node.background(report_spans(node, ref, sitting.spans))
        node.background(keep_telling())
        told.beside(node, told.facts.tell_again())
        await told.facts.status("starting", sitting.version)
        await _join_locally(sitting, node, ref, told)
        return cls(sitting, node, told, coordinator=coordinator, handover=handover, takeover=takeover)

    async def pipeline(self) -> Pipeline:
        """Once every role is there. Raises what the run fails for, and ``Interrupted``."""
        finding = asyncio.create_task(self._peers())
        try:
            peers = await self._sitting.fate.race(finding)
        finally:
            finding.cancel()
            await asyncio.gather(finding, return_exceptions=True)
        await self._look_after(self.coordinator.engines)
        return self._pipeline(peers)

    async def _look_after(self, engines: Engines) -> None:
        """Begin to look after the engines: which class plays what, and how load is evened out between classes, and
        within one."""
        job, say = self._sitting.launch.job, self._sitting.progress.note
        rollout = job.rollout
        await self._map(engines)
        if rollout.affinity and rollout.mapping == "declared":
            rebinder = Rebinder(self._node, engines, declared_classes(job), say=say)
            self._node.background(rebinder.run())
        if rollout.hot_spots:
            apart, authority = bool(rollout.affinity) or rollout.mapping != "declared", self._sitting.authority
            watch = HotWatch(self._node, engines, apart=apart, say=say, authority=authority)
            self._node.background(watch.run())

    async def _map(self, engines: Engines) -> None:
        sitting, job = self._sitting, self._sitting.launch.job
        mapper = Mapper(
            self._node,
            engines,
            await mapping_of(job, self._node, engines, warn=sitting.progress.warn),
            declared=declared_classes(job),
            file=sitting.directory.path / COST_FILE,
            say=sitting.progress.note,
            authority=sitting.authority,
        )
        self._node.background(mapper.run())

    async def close(self) -> None:
        """The run ends: nothing more is started."""
        self.coordinator.end()
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)

    async def _start_role(self, role: Role, coordinator: Ref) -> None:
        launch, directory = self._sitting.launch, self._sitting.directory.path
        context = RoleContext(
            self._node,
            Leader(coordinator),
            launch.job,
            launch.placement,
            run=self._sitting.name,
            job_directory=launch.job_directory,
            policy_directory=policy_directory(launch.job, directory),
            run_directory=directory,
            resume=launch.resume_directory,
            version=self._sitting.version,
            host=launch.host,
            key_file=launch.key_file,
            proxies=self.coordinator.roster.proxies,
        )
        try:
            await START[role](context)
        except Exception as error:  # whatever keeps a role from starting ends the run, by name
            self._sitting.fate.fail(BusError(f"{role} did not start: {error}"))

    async def _peers(self) -> Peers:
        """Wait for the roles; the env host last, because it needs all others."""
        job = self._sitting.launch.job
        timeout_s = job.coordinator.start_timeout_s
        await self.coordinator.roster.role("proxy", timeout_s)
        if self._is_new():
            await self.coordinator.roster.several_proxies(job.rollout.proxies, timeout_s)
        trainer = await self.coordinator.roster.role("trainer", timeout_s)
        weightsync = await self.coordinator.roster.role("weightsync", timeout_s)
        await self.coordinator.roster.role("env", timeout_s)
        await self._starting
        return Peers(trainer, weightsync)

    def _is_new(self) -> bool:
        """Whether the run begins, with roles in processes of their own: later it does with what proxies there are."""
        sitting, led = self._sitting, self._sitting.led
        goes_on = sitting.launch.resume is not None or sitting.found is not None or (led is not None and led.told)
        return not goes_on and "proxy" not in sitting.launch.local_roles

    def _pipeline(self, peers: Peers) -> Pipeline:
        sitting, resume = self._sitting, self._sitting.launch.resume
        pipeline = Pipeline(
            sitting.launch.job,
            self._node,
            peers,
            coordinator=self.coordinator,
            scheduler=sitting.scheduler,
            checkpoints=sitting.checkpoints,
            recorder=sitting.recorder,
            state=sitting.state,
            spans=sitting.spans,
            losses=sitting.losses,
            best_success=sitting.recorder.best_success() if resume is None else resume.best_success,
            served=lambda version: self._told.beside(self._node, self._told.facts.status("running", version)),
            authority=sitting.authority,
            evaluated=sitting.recorder.evaluated() if sitting.found is not None else -1,
        )
        sitting.scheduler.on_change(pipeline.changed)
        self._handover.pipeline = pipeline
        return pipeline


def _coordinator(sitting: Sitting, node: Node, told: Told) -> Coordinator:
    job = sitting.launch.job

    def joined(join: Join) -> None:
        if join.node.name != CONTROL:
            other = f" (software {join.software or 'unknown'}, this is {VERSION})" if join.software != VERSION else ""
            sitting.progress.note(f"{join.node.name} joined: {', '.join(join.roles) or 'spare'}{other}")
        told.beside(node, told.facts.joined(join))

    return Coordinator(
        sitting.scheduler,
        _welcome(sitting, Ref(node.address, "coordinator")),
        failed=sitting.fate.fail,
        joined=joined,
        spans=sitting.recorder.spans,
        desk=AdminDesk(sitting.state, sitting.scheduler),
        warn=sitting.progress.warn,
        losses=sitting.losses,
        silence_s=job.coordinator.silence_s,
        terms=Terms(job.environment.max_turns, job.scheduling.queue_ttl_s),
        journal=sitting.directory.ledger,
        left=lambda name: told.beside(node, told.facts.left(name)),
        authority=sitting.authority,
        hosts=sitting.hosts,
        least_silence_s=job.coordinator.least_silence_s,
        changed=lambda join: told.beside(node, told.facts.hardware(join)),
    )


def _welcome(sitting: Sitting, coordinator: Ref) -> Welcome:
    launch = sitting.launch
    return Welcome(
        run=sitting.name,
        job=msgspec.json.encode(launch.written or launch.job),
        job_directory=str(launch.job_directory),
        run_directory=str(sitting.directory.path),
        resume="" if launch.resume_directory is None else str(launch.resume_directory),
        version=sitting.version,
        coordinator=coordinator,
    )


def _handover(sitting: Sitting, node: Node, coordinator: Coordinator) -> Handover:
    return Handover(
        node,
        coordinator,
        start_timeout_s=sitting.launch.job.coordinator.start_timeout_s,
        failed=sitting.fate.fail,
        say=sitting.progress.note,
    )


def _desk(sitting: Sitting, coordinator: Coordinator, handover: Handover) -> Desk:
    launch, settings = sitting.launch, sitting.launch.job.coordinator
    return Desk(
        coordinator,
        sitting.scheduler,
        sitting.state,
        launch.placement,
        store=settings.store,
        shards=sitting.shards,
        directory=sitting.directory.path,
        key=launch.key,
        listening=lambda address: sitting.progress.note(f"metrics for Prometheus: {address}"),
        metrics=(settings.metrics_host, settings.metrics_port) if settings.metrics_port else None,
        handover=handover,
    )


def _write_address(sitting: Sitting, ref: Ref) -> None:
    """Where the admin shell finds a run on this machine, and roles elsewhere find it."""
    address = ref.node.control
    (sitting.directory.path / ADDRESS_FILE).write_text(f"{address}\n")
    tell_ready(f"run {sitting.name} listens at {address}")
    missing = [role for role in ROLES if role not in sitting.launch.local_roles]
    if missing:
        sitting.progress.note(f"waiting at {address} for {', '.join(missing)}: start-ROLE --join {address}")


async def _join_locally(sitting: Sitting, node: Node, ref: Ref, told: Told) -> None:
    roles: list[Role] = ["coordinator", *sitting.launch.local_roles]
    join = Join(node.address, roles, os.getpid(), encode(sitting.launch.affinity), VERSION)
    await node.ask(ref, join, Welcome, timeout_s=10.0)
    node.background(Vigil(node.address, Leader(ref), sitting.launch.affinity).run(node))
    await told.facts.bound(CONTROL, sitting.launch.placement)
