"""A node's part in a run: it joins, takes its roles, and begins again when the run does, until the run is over.

    join --Welcome--> takes its roles --BeginAgain (roles)--> ends them, joins anew ...
                      has none: a spare --Take (roles)--> takes them
                                                          RunOver, a signal, no leader --> the end

Invariant: between two sittings nothing of the earlier one is left in this process: its actors and their child processes
have ended, and the node that joins again is another incarnation.

A spare takes its roles within this process, whose modules are loaded already, and may have a standby coordinator beside
it, in a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from actors.core import Node, Ref
from actors.core.leader import Leader
from actors.core.logs import configure_logging
from actors.version import VERSION
from bus.message import NodeAddress, NoSuchActor
from bus.security import read_key
from coordinator.allegiance import Allegiance, Spare
from coordinator.job import Job
from coordinator.launch import CONTROL, policy_directory
from coordinator.launching.readiness import keep_telling, tell_ready, tell_stopping
from coordinator.launching.standby import OVER_S, Standby
from coordinator.messages import MEMBER, BeginAgain, Join, Role, RoleFailed, Welcome
from coordinator.pulse import pulse
from coordinator.resources.binder import Binder
from coordinator.resources.resolve import resolve
from coordinator.roles import START, RoleContext
from coordinator.vigil import Vigil
from hwprobe import Hardware, build_affinity_map, encode, probe

log = logging.getLogger(__name__)

JOIN_RETRIES = 1_000
"""As many as fit: an ask with retries is repeated every two seconds until its deadline."""
JOIN_AGAIN_S = 0.5


class RoleNotTaken(RuntimeError):
    """This process could not do what it was started for; the message says why."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On which a node takes part."""

    name: str
    roles: list[Role]  # none: as a spare
    join: str  # the coordinator's address
    join_timeout_s: float
    beside: tuple[Role, ...]  # roles that share this host with its own ones
    host: str
    key_file: Path | None


class Membership:
    """See the module docstring. ``say`` takes lines for people."""

    def __init__(self, terms: Terms, say: Callable[[str], None]) -> None:
        self._terms = terms
        self.say = say
        self._key = read_key(terms.key_file) if terms.key_file is not None else None
        self._standby = Standby(terms.host, terms.key_file, self._lost_standby) if not terms.roles else None
        self._sitting: _Sitting | None = None
        self._over: asyncio.Future[str | BeginAgain] = asyncio.get_running_loop().create_future()
        self._hardware: Hardware | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._final = ""  # why it is over for good

    async def run(self) -> str:
        """Take part until the run is over; returns how that came. Raises ``RoleNotTaken``, ``BusError``."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        terms = self._terms
        try:
            while True:
                with ExitStack() as ends:
                    over = await self._sit(terms, ends)
                if isinstance(over, str) or self._final:
                    return self._final
                terms = msgspec.structs.replace(terms, roles=over.roles, join=over.leader.node.control)
                self.say(f"{terms.name}: the run begins again")
        finally:
            if self._standby is not None:
                await self._standby.stop(grace_s=OVER_S)

    def _signalled(self) -> None:
        """The coordinator beside a spare first: it may lead, and then needs everybody to save; a second one insists."""
        if self._standby is None or self._stopping is not None:
            self.end("stopped")
        else:
            self._stopping = asyncio.create_task(self._standby.stop())
            self._stopping.add_done_callback(lambda _: self.end("stopped"))

    def end(self, outcome: str | BeginAgain) -> None:
        if isinstance(outcome, str):
            self._final = self._final or outcome
        if not self._over.done():
            self._over.set_result(outcome)

    async def _sit(self, terms: Terms, ends: ExitStack) -> str | BeginAgain:
        if self._over.done():  # of the sitting before
            self._over = asyncio.get_running_loop().create_future()
        async with pulse(terms.host) as place, Node(terms.name, host=terms.host, key=self._key) as node:
            sitting = self._sitting = _Sitting(terms, node, place, self, ends)
            starting = asyncio.create_task(sitting.start())
            try:
                first: set[asyncio.Future[Any]] = {starting, self._over}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    self.ready(node, f"{', '.join(sitting.roles) or 'spare'} is ready for run {starting.result()}")
                return await self._over
            finally:
                self._sitting = None
                if self._final:
                    tell_stopping("ending")
                starting.cancel()
                await asyncio.gather(starting, *sitting.taking, return_exceptions=True)

    def ready(self, node: Node, what: str) -> None:
        tell_ready(what)
        node.background(keep_telling())
        self.say(f"{node.address.name}: {what}")

    def hardware(self) -> Hardware:
        """Of this host, looked at once."""
        if self._hardware is None:
            self._hardware = probe()
        return self._hardware

    def standby_pid(self) -> int | None:
        return None if self._standby is None else self._standby.pid

    def stand_by(self, run_directory: Path) -> None:
        if self._standby is not None:
            self._standby.start(run_directory)

    def _lost_standby(self, reason: str) -> None:
        """Between two sittings nobody is told: the next join says that there is none."""
        self.say(f"{self._terms.name}: no standby coordinator is here any more: {reason}")
        if self._sitting is not None:
            self._sitting.lost_standby(reason)


class _Sitting(Spare):
    """From one join to its end."""

    def __init__(self, terms: Terms, node: Node, pulse: str, owner: Membership, ends: ExitStack) -> None:
        """``ends``: what is to be done once the node is closed."""
        self._terms = terms
        self._node = node
        self._pulse = pulse
        self._owner = owner
        self._ends = ends
        self._welcome: Welcome
        self._leader: Leader
        self._allegiance = Allegiance(owner.end, self)
        self.roles: list[Role] = []
        self.taking: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Join and take what roles there are to take; returns the run's name. Where that fails the run is told."""
        node, terms, owner = self._node, self._terms, self._owner
        await node.spawn(lambda: self._allegiance, MEMBER, restarts=0)
        coordinator = Ref(NodeAddress(CONTROL, terms.join, "", 0), "coordinator")
        affinity = build_affinity_map(owner.hardware())
        join = Join(
            node.address,
            terms.roles,
            os.getpid(),
            encode(affinity),
            VERSION,
            pulse=self._pulse,
            standby=owner.standby_pid(),
        )
        self._welcome = welcome = await self._join(coordinator, join)
        self.roles = list(terms.roles if welcome.roles is None else welcome.roles)
        self._directory = _local_directory(welcome)
        configure_logging(node.address.name, self._directory / "logs", job=welcome.run)
        self._job = msgspec.json.decode(welcome.job, type=Job)
        settings = self._job.coordinator
        self._leader = self._allegiance.joined(
            msgspec.structs.replace(join, roles=self.roles),
            welcome.coordinator or coordinator,
            silence_s=settings.silence_s,
            takeover_s=settings.takeover_s,
        )
        vigil = Vigil(node.address, self._leader, affinity, keep=self._allegiance.hardware)
        node.background(vigil.run(node))
        await self._take(self.roles, self._terms.beside)
        return welcome.run

    def stand_by(self, run_directory: str) -> None:
        path = Path(run_directory)
        if not path.is_dir():
            log.warning("no standby coordinator here: the run directory %s is not visible", path)
            raise ValueError(f"the run directory {path} is not visible")
        self._owner.stand_by(path)

    def standby_pid(self) -> int | None:
        return self._owner.standby_pid()

    def lost_standby(self, reason: str) -> None:
        self._allegiance.lost_standby(reason)

    def take(self, roles: list[Role]) -> None:
        self.roles = list(roles)
        self.taking.append(self._node.background(self._take_alone(roles)))

    async def _take_alone(self, roles: list[Role]) -> None:
        try:
            await self._take(roles, tuple(roles))
        except RoleNotTaken as error:
            self._owner.say(f"{self._node.address.name}: {error}")
        else:
            self._owner.ready(self._node, f"{', '.join(roles)} is ready for run {self._welcome.run}")

    async def _take(self, roles: Sequence[Role], beside: tuple[Role, ...]) -> None:
        """Raises ``RoleNotTaken``, and tells the run."""
        if not roles:
            return
        try:
            context = self._context(tuple({*beside, *roles}))
            await asyncio.gather(*(START[role](context) for role in roles))
        except Exception as error:  # whatever keeps a role from starting ends the run, by name
            failure = RoleFailed(roles[0], self._node.address.name, str(error))
            self._node.tell(self._allegiance.leader.ref, failure)
            log.info("the role could not be taken", exc_info=error)
            words = " ".join(str(error).split()) or repr(error)
            raise RoleNotTaken(f"{', '.join(roles)} did not start: {words}") from error

    def _context(self, here: tuple[Role, ...]) -> RoleContext:
        """Raises ``JobError`` where what is here does not do for these roles."""
        welcome, terms, directory = self._welcome, self._terms, self._directory
        affinity = build_affinity_map(self._owner.hardware(), self._job.resource_profile)
        job, placement = resolve(self._job, affinity, here=here)
        for note in placement.notes:
            self._owner.say(note)
        binder = Binder(job.binding, placement, affinity, directory=directory, say=self._owner.say)
        self._ends.callback(binder.close)
        binder.open()
        return RoleContext(
            self._node,
            self._leader,
            job,
            placement,
            run=welcome.run,
            job_directory=Path(welcome.job_directory),
            policy_directory=policy_directory(job, directory),
            run_directory=directory,
            resume=Path(welcome.resume) if welcome.resume else None,
            version=welcome.version,
            host=terms.host,
            key_file=terms.key_file,
            allegiance=self._allegiance,
            proxies=self._allegiance.proxies,
            keeps_store=welcome.keeps_store,
        )

    async def _join(self, coordinator: Ref, join: Join) -> Welcome:
        """A coordinator's node listens before its actor is there: whoever comes that early comes again."""
        loop, terms = asyncio.get_running_loop(), self._terms
        deadline = loop.time() + terms.join_timeout_s
        about = f"is a coordinator listening at {terms.join}?"
        while True:
            left_s = deadline - loop.time()
            try:
                return await self._node.ask(
                    coordinator, join, Welcome, timeout_s=left_s, retries=JOIN_RETRIES, about=about
                )
            except NoSuchActor:
                if deadline - loop.time() < JOIN_AGAIN_S:
                    raise
                await asyncio.sleep(JOIN_AGAIN_S)


def _local_directory(welcome: Welcome) -> Path:
    """The run's directory where it is visible from here, else one of the same name below ``runs``."""
    shared = Path(welcome.run_directory)
    if shared.is_dir():
        return shared
    local = Path("runs") / welcome.run
    local.mkdir(parents=True, exist_ok=True)
    return local.resolve()
