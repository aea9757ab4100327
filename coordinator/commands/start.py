"""``bin/start-ROLE``: one role of a run as a process of its own, on this or another host.

    start-coordinator JOB.yaml [--host ADDRESS --port PORT --key-file FILE]     prints the address to join
    start-coordinator --standby-of RUN [--host ADDRESS --port PORT --key-file FILE]
    start-proxy --join tcp://HOST:PORT [--host ADDRESS --key-file FILE]
    (likewise env, reward, trainer, weightsync)

Roles may start in any order and look for each other through the coordinator. Beyond loopback everybody needs the same
key file; the run directory must be on a file system that the coordinators and the trainer share. Standbys lead the run
on once its leader is gone (``coordinator.commands.lead``); the roles follow whoever leads. Exit statuses:
``coordinator.launching.exits``; readiness (systemd, Kubernetes): ``coordinator.launching.readiness``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from actors.core import Node, Ref
from actors.core.logs import configure_logging
from actors.version import VERSION
from bus.message import BusError, NodeAddress, NoSuchActor
from bus.security import ClusterKey, SecurityError, check_exposure, read_key
from coordinator.allegiance import Allegiance
from coordinator.commands.lead import lead, stand_by
from coordinator.commands.train import settled, write_as_written, write_job_directory
from coordinator.coordinator import MEMBER
from coordinator.facts import FactsUnreadable
from coordinator.job import Job, JobError, load
from coordinator.launch import CONTROL, Launch, policy_directory
from coordinator.launching.exits import DONE, FAILED, INTERRUPTED, NOT_TAKEN, USAGE
from coordinator.launching.hosts import LaunchError, numeric
from coordinator.launching.leash import end_with_input
from coordinator.launching.readiness import keep_telling, tell_ready, tell_stopping
from coordinator.leadership import Deposed
from coordinator.messages import ROLES, Join, Role, RoleFailed, Welcome
from coordinator.metadata.protocol import StoreError
from coordinator.observe.rundir import RunDirectory, RunDirectoryError
from coordinator.preflight import check_job, check_trackers
from coordinator.resources.binder import Binder
from coordinator.resources.resolve import resolve
from coordinator.roles import START, RoleContext
from hwprobe import build_affinity_map, encode, probe

log = logging.getLogger(__name__)


class RoleNotTaken(RuntimeError):
    """This process could not do what it was started for; the message says why."""


JOIN_TIMEOUT_S = 60.0
JOIN_RETRIES = 1_000
"""As many as fit: an ask with retries is repeated every two seconds until its deadline."""
JOIN_AGAIN_S = 0.5


def parser(role: str) -> argparse.ArgumentParser:
    """Of ``bin/start-ROLE``."""
    result = argparse.ArgumentParser(prog=f"start-{role}")
    if role == "coordinator":
        result.description = "Lead a run; the other roles join it at the address that is printed."
        result.add_argument("job", nargs="?", type=Path, help="job file (YAML)")
        result.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings to change")
        result.add_argument(
            "--standby-of", type=Path, metavar="RUN", help="lead this run (its directory) on once its leader is gone"
        )
        result.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
        result.add_argument("--runs", type=Path, default=Path("runs"), help="where run directories go (default: runs)")
    else:
        result.description = f"Take the role {role} of a run, on this host."
        result.add_argument("--join", required=True, metavar="tcp://HOST:PORT", help="the coordinator's address")
        result.add_argument("--name", default="", help="name of this node (default: ROLE-PID)")
        wait = f"seconds to look for the coordinator (default: {JOIN_TIMEOUT_S:g})"
        beside = "roles that share this host's devices, itself among them (default: all; for a host of its own: itself)"
        result.add_argument("--beside", type=_roles, default=ROLES, metavar="ROLE,ROLE", help=beside)
        result.add_argument("--join-timeout", type=float, default=JOIN_TIMEOUT_S, metavar="SECONDS", help=wait)
    result.add_argument("--host", default="127.0.0.1", help="address of this host to listen on (default: loopback)")
    result.add_argument("--key-file", type=Path, help="cluster key; needed beyond loopback (make one with bin/keys)")
    result.add_argument("--stop-on-eof", action="store_true", help="end in order when standard input does")
    return result


def _roles(text: str) -> tuple[Role, ...]:
    names = [name for name in text.split(",") if name != "coordinator"]
    unknown = [name for name in names if name not in ROLES]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected roles out of {', '.join(ROLES)}; found {', '.join(unknown)}")
    return tuple(role for role in ROLES if role in names)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    role = words[0] if words else ""
    if role in ("-h", "--help"):
        print(f"usage: start ROLE [options]; ROLE is coordinator, {', '.join(ROLES)}; start ROLE --help says more")
        return DONE
    if role not in ("coordinator", *ROLES):
        print(f"error: expected a role first: coordinator, {', '.join(ROLES)}; found {role!r}", file=sys.stderr)
        return USAGE
    arguments = parser(role).parse_intermixed_args(words[1:])
    arguments.role = role
    try:
        arguments.host = numeric(arguments.host)
        if arguments.stop_on_eof:
            end_with_input()
        return _coordinate(arguments) if role == "coordinator" else asyncio.run(_take_role(arguments))
    except (JobError, LaunchError, RunDirectoryError, SecurityError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except (BusError, RoleNotTaken, StoreError, FactsUnreadable, Deposed) as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_TAKEN
    except KeyboardInterrupt:  # before a run listens for it
        return INTERRUPTED


def _coordinate(arguments: argparse.Namespace) -> int:
    check_exposure(arguments.host, read_key(arguments.key_file) if arguments.key_file is not None else None)
    if arguments.standby_of is not None:
        if arguments.job is not None:
            raise JobError(f"--standby-of RUN goes without a job file: the run has one; found {arguments.job}")
        path = arguments.standby_of
        return stand_by(path, host=arguments.host, port=arguments.port, key_file=arguments.key_file)
    if arguments.job is None:
        raise JobError("expected a job file (or --standby-of RUN); see start-coordinator --help")
    written = settled(load(arguments.job, arguments.overrides))
    affinity = build_affinity_map(probe(), written.resource_profile)
    job, placement = resolve(written, affinity, here=())
    job_directory = arguments.job.resolve().parent
    check_trackers(job)
    check_job(job, job_directory)
    with RunDirectory.create(arguments.runs, job.name) as directory:
        directory.write_job(job)
        write_job_directory(directory, job_directory)
        write_as_written(directory, written)
        launch = Launch(
            job=job,
            placement=placement,
            affinity=affinity,
            job_directory=job_directory,
            local_roles=(),
            host=arguments.host,
            port=arguments.port,
            key_file=arguments.key_file,
            written=written,
        )
        return lead(launch, directory)


async def _take_role(arguments: argparse.Namespace) -> int:
    name = arguments.name or f"{arguments.role}-{os.getpid()}"
    key = read_key(arguments.key_file) if arguments.key_file is not None else None
    over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    _end_on_signals(over)
    with ExitStack() as ends:
        outcome = await _serve(arguments, name, key, over, ends)
    print(f"{name}: {outcome}", flush=True)
    return FAILED if outcome.startswith("lost") else DONE


async def _serve(
    arguments: argparse.Namespace, name: str, key: ClusterKey | None, over: asyncio.Future[str], ends: ExitStack
) -> str:
    """Have the role until the run is over, or this process is to end; returns which."""
    async with Node(name, host=arguments.host, key=key) as node:
        allegiance = Allegiance(lambda outcome: _end(over, outcome))
        await node.spawn(lambda: allegiance, MEMBER, restarts=0)
        starting = asyncio.create_task(_start(arguments, node, allegiance, ends))
        try:
            first: set[asyncio.Future[Any]] = {starting, over}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                ready = f"{arguments.role} is ready for run {starting.result()}"
                tell_ready(ready)
                node.background(keep_telling())
                print(f"{name}: {ready}", flush=True)
            return await over
        finally:
            tell_stopping("ending")
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)


async def _start(arguments: argparse.Namespace, node: Node, allegiance: Allegiance, ends: ExitStack) -> str:
    """Join and take the role; returns the run's name. Where that fails the run is told, which cannot go on without.
    ``ends``: what is to be done once the node is closed."""
    role: Role = arguments.role
    coordinator = Ref(NodeAddress(CONTROL, arguments.join, "", 0), "coordinator")
    hardware = probe()
    join = Join(node.address, [role], os.getpid(), encode(build_affinity_map(hardware)), VERSION)
    welcome = await _join(node, coordinator, join, arguments)
    directory = _local_directory(welcome)
    configure_logging(node.address.name, directory / "logs", job=welcome.run)
    try:
        job = msgspec.json.decode(welcome.job, type=Job)
        leader = allegiance.joined(
            join,
            welcome.coordinator or coordinator,
            silence_s=job.coordinator.silence_s,
            takeover_s=job.coordinator.takeover_s,
        )
        affinity = build_affinity_map(hardware, job.resource_profile)
        job, placement = resolve(job, affinity, here=arguments.beside)
        for note in placement.notes:
            _say(note)
        binder = Binder(job.binding, placement, affinity, directory=directory, say=_say)
        ends.callback(binder.close)
        binder.open()
        context = RoleContext(
            node,
            leader,
            job,
            placement,
            run=welcome.run,
            job_directory=Path(welcome.job_directory),
            policy_directory=policy_directory(job, directory),
            run_directory=directory,
            resume=Path(welcome.resume) if welcome.resume else None,
            version=welcome.version,
            host=arguments.host,
            key_file=arguments.key_file,
            allegiance=allegiance,
        )
        await START[role](context)
    except Exception as error:  # whatever keeps a role from starting ends the run, by name
        node.tell(allegiance.leader.ref, RoleFailed(role, node.address.name, str(error)))
        log.info("the role could not be taken", exc_info=error)
        raise RoleNotTaken(f"{role} did not start: {' '.join(str(error).split()) or repr(error)}") from error
    return welcome.run


async def _join(node: Node, coordinator: Ref, join: Join, arguments: argparse.Namespace) -> Welcome:
    """A coordinator's node listens before its actor is there: whoever comes that early comes again."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + arguments.join_timeout
    about = f"is a coordinator listening at {arguments.join}?"
    while True:
        left_s = deadline - loop.time()
        try:
            return await node.ask(coordinator, join, Welcome, timeout_s=left_s, retries=JOIN_RETRIES, about=about)
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


def _say(line: str) -> None:
    print(line, flush=True)


def _end_on_signals(over: asyncio.Future[str]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _end, over, "stopped")


def _end(over: asyncio.Future[str], outcome: str) -> None:
    if not over.done():
        over.set_result(outcome)


if __name__ == "__main__":
    sys.exit(main())
