"""``bin/start-ROLE``: one role of a run as a process of its own, on this or another host.

    start-coordinator JOB.yaml [--host ADDRESS --port PORT --key-file FILE]     prints the address to join
    start-coordinator --standby-of RUN [--host ADDRESS --port PORT --key-file FILE]
    start-proxy --join tcp://HOST:PORT [--host ADDRESS --key-file FILE]
    (likewise env, reward, trainer, weightsync)
    start-spare --join tcp://HOST:PORT [--host ADDRESS --key-file FILE]     takes the roles of a host that is lost

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
import sys
from pathlib import Path

from bus.message import BusError
from bus.security import SecurityError, check_exposure, read_key
from coordinator.commands.launch import SPARE
from coordinator.commands.lead import lead, stand_by
from coordinator.commands.train import settled, write_as_written, write_job_directory
from coordinator.facts import FactsUnreadable
from coordinator.job import JobError, load
from coordinator.launch import Launch
from coordinator.launching.exits import DONE, FAILED, INTERRUPTED, NOT_TAKEN, USAGE
from coordinator.launching.hostlist import LaunchError, numeric
from coordinator.launching.leash import end_with_input
from coordinator.leadership import Deposed
from coordinator.membership import Membership, RoleNotTaken, Terms
from coordinator.messages import ROLES, Role
from coordinator.metadata.protocol import StoreError
from coordinator.observe.rundir import RunDirectory, RunDirectoryError
from coordinator.preflight import check_job, check_trackers
from coordinator.resources.resolve import check_trainable, resolve
from hwprobe import build_affinity_map, probe

JOIN_TIMEOUT_S = 60.0


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
        if role == SPARE:
            result.description = "Take the roles of a run's host that is lost, on this host."
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
        print(f"usage: start ROLE [options]; ROLE is coordinator, {', '.join(ROLES)} or spare; see start ROLE --help")
        return DONE
    if role not in ("coordinator", *ROLES, SPARE):
        print(f"error: expected a role first: coordinator, {', '.join(ROLES)}, spare; found {role!r}", file=sys.stderr)
        return USAGE
    arguments = parser(role).parse_intermixed_args(words[1:])
    arguments.role = role
    try:
        arguments.host = numeric(arguments.host)
        if arguments.stop_on_eof:
            end_with_input()
        return _coordinate(arguments) if role == "coordinator" else asyncio.run(_take_part(arguments))
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
    check_trainable(job)
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


async def _take_part(arguments: argparse.Namespace) -> int:
    roles: list[Role] = [] if arguments.role == SPARE else [arguments.role]
    terms = Terms(
        name=arguments.name or f"{arguments.role}-{os.getpid()}",
        roles=roles,
        join=arguments.join,
        join_timeout_s=arguments.join_timeout,
        beside=arguments.beside if roles else (),
        host=arguments.host,
        key_file=arguments.key_file,
    )
    logging.getLogger().addHandler(logging.NullHandler())  # who cannot join says so in one line; else there is a log
    outcome = await Membership(terms, _say).run()
    print(f"{terms.name}: {outcome}", flush=True)
    return FAILED if outcome.startswith("lost") else DONE


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
