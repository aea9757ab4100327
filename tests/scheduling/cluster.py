"""The real coordinator on virtual time, among env hosts that only pretend to play: how long each trajectory takes and
how it ends, their script says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from actors.core import Actor, Node, Ref, handler
from actors.env.messages import (
    DescribeEnv,
    EnvState,
    LearnerVersion,
    LeftPlaces,
    Noted,
    Outcome,
    RunningTrajectory,
    Start,
    Stop,
    Ticket,
)
from bus.message import BusError
from bus.simulated import Link, SimulatedNetwork, SimulatedTransport
from coordinator.admin import AdminDesk, RunState
from coordinator.coordinator import Coordinator
from coordinator.dispatch import Terms
from coordinator.losses import LossWatch
from coordinator.messages import Announce, Announced, Join, Welcome
from coordinator.scheduling.journal import FileJournal
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.mix import Mix, TaskStream
from coordinator.scheduling.rolling import RollingScheduler, Rules
from tests.scheduling.support import Written

REPORT_TIMEOUT_S = 120.0
SETTLE_S = 0.5
"""How long a trajectory that has left its place is scored and stored."""


class PretendHost(Actor):
    """Plays ``places`` trajectories at once, those that came first first. ``script`` says of a ticket how long it plays
    and how it ends ("stored", or the reason of its loss)."""

    def __init__(self, coordinator: Ref, places: int, script: Callable[[Ticket], tuple[float, str]]) -> None:
        self._coordinator = coordinator
        self.places = places
        self.script = script
        self._free = asyncio.Semaphore(places)
        self._learner = LearnerVersion(0, 1_000_000)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopped: dict[str, str] = {}
        self.served = 0
        self.started: list[str] = []
        self.states: dict[str, str] = {}
        self.tickets: dict[str, Ticket] = {}

    async def on_stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    @handler
    async def start(self, message: Start) -> Noted:
        for ticket in message.tickets:
            if ticket.id not in self.tickets:
                self.tickets[ticket.id] = ticket
                self._tasks[ticket.id] = asyncio.create_task(self._play(ticket))
        return Noted()

    @handler
    async def stop(self, message: Stop) -> Noted:
        for id_ in message.tickets:
            self._stopped[id_] = message.reason
            if self.states.get(id_) in ("place", "engine"):
                self._tasks[id_].cancel()
        return Noted()

    @handler
    async def learner_version(self, message: LearnerVersion) -> None:
        self._learner = message

    @handler
    async def describe(self, message: DescribeEnv) -> EnvState:
        running = [
            RunningTrajectory(id_, self.tickets[id_].task, self.tickets[id_].purpose, 1, 0, state, 1.0)
            for id_, state in self.states.items()
        ]
        return EnvState(running, {})

    async def _play(self, ticket: Ticket) -> None:
        self.states[ticket.id] = "place"
        began = self.served
        try:
            async with self._free:
                self.states[ticket.id] = "engine"
                self.started.append(ticket.id)
                began = max(self.served, ticket.from_version)
                seconds, end = self.script(ticket)
                await asyncio.sleep(seconds)
            self.states[ticket.id] = "reward"
            self.node.tell(self._coordinator, LeftPlaces([ticket.id]))
            await asyncio.sleep(SETTLE_S)
        except asyncio.CancelledError:
            if ticket.id not in self._stopped:
                raise
        if ticket.id in self._stopped:
            end = self._stopped[ticket.id]
        elif ticket.purpose == "train" and began < self._learner.version - self._learner.alpha:
            end = "stale"
        del self.states[ticket.id]
        await self._report(ticket, end, began)

    async def _report(self, ticket: Ticket, end: str, began: int) -> None:
        if end != "stored":
            outcome = Outcome(ticket.id, "lost", end)
        elif ticket.purpose == "evaluate":
            outcome = Outcome(ticket.id, "evaluated", success=True)
        else:
            outcome = Outcome(ticket.id, "stored", initiating_version=began, reward=1.0, turns=1, sampled_tokens=1)
        try:
            await self.node.ask(self._coordinator, outcome, Noted, timeout_s=REPORT_TIMEOUT_S, retries=50)
        except BusError:  # nobody is left to hear of it
            return


def ten_seconds(ticket: Ticket) -> tuple[float, str]:
    return 10.0, "stored"


class Cluster:
    """What a test gets to see; ``node`` is the coordinator's, ``admin`` a person's."""

    def __init__(self, network: SimulatedNetwork, node: Node, admin: Node, ref: Ref, coordinator: Coordinator) -> None:
        self.network = network
        self.node = node
        self.admin = admin
        self.ref = ref
        self.coordinator = coordinator
        self.hosts: dict[str, PretendHost] = {}
        self.failures: list[BaseException] = []
        self.warnings: list[str] = []
        self.journal: Written | FileJournal
        self._served = 0
        self.nodes: dict[str, Node] = {}
        self._transports: dict[str, SimulatedTransport] = {}

    @property
    def scheduler(self) -> RollingScheduler:
        return self.coordinator.dispatcher.scheduler

    async def add_host(
        self, name: str, places: int, script: Callable[[Ticket], tuple[float, str]] = ten_seconds, *, tell: int = -1
    ) -> PretendHost:
        """``tell``: how many places it says it has, where that differs."""
        transport = self._transports[name] = self.network.join(name)
        node = self.nodes[name] = Node(name, transport=transport)
        await node.__aenter__()
        host = self.hosts[name] = PretendHost(self.ref, places, script)
        host.served = self._served
        env = await node.spawn(lambda: host, "env", restarts=0)
        await node.ask(self.ref, Join(node.address, ["env"], 1, b"{}"), Welcome, timeout_s=30.0, retries=5)
        announce = Announce("env", env, places if tell < 0 else tell)
        await node.ask(self.ref, announce, Announced, timeout_s=30.0, retries=5)
        return host

    async def kill_host(self, name: str) -> None:
        """It is gone without a word; the coordinator notices when it has been silent for long enough."""
        del self.hosts[name]
        self._transports.pop(name).crash()
        await self.nodes.pop(name).close()

    async def restart_host(self, name: str) -> None:
        """Killed, and started again before anybody has noticed."""
        host = self.hosts[name]
        await self.kill_host(name)
        await self.add_host(name, host.places, host.script)

    async def cut_off(self, name: str, seconds: float = 60.0) -> None:
        """Nothing gets to it or from it for so long that it is given up; then it is heard again, and ends."""
        self.network.partition({name}, {"control", "admin"}, cut=True)
        await asyncio.sleep(seconds)
        self.network.heal()
        await asyncio.sleep(seconds)
        await self.kill_host(name)

    def begin(self) -> None:
        self.scheduler.open()
        self.coordinator.flush()

    def serve(self, version: int) -> None:
        """Engines serve it from now on."""
        self._served = version
        for host in self.hosts.values():
            host.served = version

    def train(self) -> None:
        """Take a batch, make a version, serve it."""
        self.scheduler.take()
        self.coordinator.flush()
        version = self.scheduler.version + 1
        self.scheduler.trained(version)
        self.coordinator.learner_version(version, self.scheduler.rules.alpha)
        self.coordinator.flush()
        self.serve(version)

    async def close(self) -> None:
        self.coordinator.end()
        for node in self.nodes.values():
            await node.close()


def _unexpected(what: object) -> None:
    raise AssertionError(what)


def _no_news(what: object) -> None:
    """Of what the tests do not look at."""


@asynccontextmanager
async def cluster(
    rules: Rules,
    *,
    mix: dict[str, TaskStream] | None = None,
    terms: Terms | None = None,
    link: Link | None = None,
    seed: int = 0,
    journal: Path | None = None,
    network: SimulatedNetwork | None = None,
    name: str = "",
    job: bytes = b"{}",
) -> AsyncIterator[Cluster]:
    """Without env hosts, before anything is admitted. ``name``: of a run among others on one ``network``."""
    network = network or SimulatedNetwork(seed=seed, link=link or Link(latency_s=0.001))
    books = Written() if journal is None else FileJournal(journal)
    scheduler = RollingScheduler(rules, Ledger(books), Mix(mix or {}))
    control, person = network.join(f"control{name}"), network.join(f"admin{name}")
    async with Node(f"control{name}", transport=control) as node, Node(f"admin{name}", transport=person) as admin:
        failures: list[BaseException] = []
        warnings: list[str] = []
        coordinator = Coordinator(
            scheduler,
            Welcome("run", job, "", "", "", 0),
            failed=failures.append,
            joined=_no_news,
            spans=_unexpected,
            desk=AdminDesk(RunState("run", 10), scheduler),
            warn=warnings.append,
            losses=LossWatch(10_000),
            silence_s=20.0,
            terms=terms or Terms(),
            journal=journal,
        )
        ref = await node.spawn(lambda: coordinator, "coordinator", restarts=0)
        made = Cluster(network, node, admin, ref, coordinator)
        made.failures, made.warnings, made.journal = failures, warnings, books
        try:
            yield made
        finally:
            await made.close()
            if isinstance(books, FileJournal):
                books.close()


def sampled(seed: int, *, lost: float = 0.1) -> Callable[[Ticket], tuple[float, str]]:
    """A script: trajectories of 2 to 60 s, a share of which is lost; the same for the same ticket."""

    def script(ticket: Ticket) -> tuple[float, str]:
        chance = random.Random(f"{seed} {ticket.id}")
        return chance.uniform(2.0, 60.0), "env_failed" if chance.random() < lost else "stored"

    return script
