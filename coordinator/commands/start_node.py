"""``bin/start-node JOB.yaml --coordinator HOST``: the roles of one host of a run, each in a process of its own.

For launchers that run the same command on every host (``srun``, ``pdsh``, ``mpirun``): which host this is, and of how
many, is taken from Slurm's environment unless it is told; which roles that means, from ``--roles`` (the map of
``coordinator.launching.hostlist.parse_map``). Signals and exit statuses: ``coordinator.launching.crew``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Mapping

from bus.security import is_loopback
from coordinator.commands.launch import JOIN_TIMEOUT_S, SPARE
from coordinator.launching.crew import Crew, Part
from coordinator.launching.exits import USAGE
from coordinator.launching.hostlist import LaunchError, check_roles, command_of, numeric, parse_map, waits_for
from coordinator.messages import Role


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="start-node", description="Take one host's roles of a run.")
    result.add_argument("job", help="job file (YAML); read where the coordinator is")
    result.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings to change")
    result.add_argument("--coordinator", required=True, metavar="HOST", help="the first host's name or address")
    result.add_argument("--port", type=int, default=5600, help="the coordinator's port (default: 5600)")
    result.add_argument("--index", type=int, help="this host's number, from 0 (default: $SLURM_NODEID)")
    result.add_argument("--hosts", type=int, help="how many there are (default: $SLURM_JOB_NUM_NODES)")
    result.add_argument("--roles", default="", metavar="MAP", help="such as '0=coordinator,trainer 1=proxy 2-=env,...'")
    result.add_argument("--spare", action="store_true", help="no roles until a host is lost (beyond --hosts)")
    result.add_argument("--address", help="of this host (default: what $SLURMD_NODENAME or its name resolves to)")
    result.add_argument("--key-file", help="cluster key; needed beyond loopback (make one with bin/keys)")
    result.add_argument("--runs", default="runs", help="where run directories go (default: runs)")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        parts = plan(arguments, os.environ)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    return asyncio.run(_run(parts))


async def _run(parts: list[Part]) -> int:
    return await Crew(parts, lambda line: print(line, flush=True)).run()


def plan(arguments: argparse.Namespace, environ: Mapping[str, str]) -> list[Part]:
    """A process for every role of this host. Raises ``LaunchError``."""
    index = _number(arguments.index, "--index", "SLURM_NODEID", environ)
    roles: list[tuple[Role, ...]] = []
    if not arguments.spare:
        count = _number(arguments.hosts, "--hosts", "SLURM_JOB_NUM_NODES", environ)
        roles = parse_map(arguments.roles, count)
        check_roles(roles, "--roles")
        if not 0 <= index < count:
            raise LaunchError(f"--index: expected 0 to {count - 1}, found {index}")
    address = numeric(arguments.address or environ.get("SLURMD_NODENAME") or socket.gethostname())
    if not is_loopback(address) and arguments.key_file is None:
        raise LaunchError(f"--key-file: {address} is beyond loopback, which takes a key (bin/keys make cluster.key)")
    key = [] if arguments.key_file is None else ["--key-file", arguments.key_file]
    own = ["--host", address, *key, "--stop-on-eof"]
    settings = [*waits_for(roles), *arguments.overrides]
    lead = [arguments.job, *settings, "--port", str(arguments.port), "--runs", arguments.runs]
    join = ["--join", f"tcp://{numeric(arguments.coordinator)}:{arguments.port}", "--join-timeout", str(JOIN_TIMEOUT_S)]
    start = environ.get("ROLLART_START", f"{sys.executable} -m coordinator.commands.start {{role}}")

    def part(role: Role) -> Part:
        if role == "coordinator":
            return Part(f"coordinator-{index}", [*command_of(start, role), *lead, *own], leads=True)
        name = f"{role}-{index}"
        return Part(name, [*command_of(start, role), *join, *own, "--name", name, "--beside", ",".join(roles[index])])

    if arguments.spare:
        return [Part(f"{SPARE}-{index}", [*command_of(start, SPARE), *join, *own, "--name", f"{SPARE}-{index}"])]
    return [part(role) for role in roles[index]]


def _number(told: int | None, option: str, variable: str, environ: Mapping[str, str]) -> int:
    if told is not None:
        return told
    try:
        return int(environ[variable])
    except (KeyError, ValueError):
        raise LaunchError(f"{option}: not given, and ${variable} is no number: not started by srun?") from None


if __name__ == "__main__":
    sys.exit(main())
