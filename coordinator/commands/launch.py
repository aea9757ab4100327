"""``bin/launch HOSTS.yaml JOB.yaml``: a run over a bare list of hosts, from one terminal.

Every role is started on its host through a shell (ssh by default; ``shell`` of the list names another), joins the
coordinator on the first host, and says here what it says there. Ctrl-C ends the run with a checkpoint. The exit status
is the coordinator's (``coordinator.launching.exits``).
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from pathlib import Path
from typing import Literal

from bus.security import is_loopback
from coordinator.commands.usage import examples
from coordinator.launching.crew import Crew, Part
from coordinator.launching.exits import DONE, USAGE
from coordinator.launching.hostlist import (
    Host,
    HostList,
    LaunchError,
    command_of,
    load_hosts,
    numeric,
    over_shell,
    waits_for,
)
from coordinator.messages import Role

SPARE: Literal["spare"] = "spare"
JOIN_TIMEOUT_S = 300
"""How long roles look for a coordinator that is started at the same time."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="launch",
        description="Run a job over a list of hosts.",
        epilog=examples("launch hosts.yaml examples/frozenlake.yaml", "launch hosts.yaml my.yaml --dry-run"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("hosts", type=Path, help="host list (YAML)")
    result.add_argument("job", help="job file (YAML), as the first host sees it")
    result.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings to change")
    result.add_argument("--runs", default="runs", help="where run directories go (default: runs)")
    result.add_argument("--dry-run", action="store_true", help="print what would be started, and where")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        hosts = load_hosts(arguments.hosts)
        parts = plan(hosts, arguments.job, arguments.overrides, arguments.runs)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    if arguments.dry_run:
        for part in parts:
            print(f"{part.name}: {shlex.join(part.words)}")
        return DONE
    return asyncio.run(_run(parts))


async def _run(parts: list[Part]) -> int:
    return await Crew(parts, lambda line: print(line, flush=True)).run()


def plan(hosts: HostList, job: str, overrides: list[str], runs: str) -> list[Part]:
    """A process for every role, the coordinator's first. Raises ``LaunchError``."""
    addresses = {host.host: numeric(host.address or host.host) for host in hosts.hosts}
    beyond = [address for address in addresses.values() if not is_loopback(address)]
    if beyond and hosts.key_file is None:
        raise LaunchError(f"key_file: {beyond[0]} is beyond loopback, which takes a key (bin/keys make cluster.key)")
    key = [] if hosts.key_file is None else ["--key-file", hosts.key_file]
    join = f"tcp://{addresses[hosts.hosts[0].host]}:{hosts.port}"
    settings = [*waits_for([host.roles for host in hosts.hosts]), *overrides]
    lead = [job, *settings, "--port", str(hosts.port), "--runs", runs]

    def part(host: Host, role: Role | Literal["spare"]) -> Part:
        own = lead if role == "coordinator" else ["--join", join, "--join-timeout", str(JOIN_TIMEOUT_S)]
        words = [*command_of(hosts.start, role), *own, "--host", addresses[host.host], *key, "--stop-on-eof"]
        if role != "coordinator":
            words += ["--name", f"{role}-{number[host.host]}"]
            words += ["--beside", ",".join(host.roles)] if host.roles else []
        return Part(
            f"{role}@{host.host}", over_shell(hosts, host, words), leads=role == "coordinator", spare=host.spare
        )

    number = {host.host: index for index, host in enumerate(hosts.hosts)}
    parts = [part(host, role) for host in hosts.hosts for role in host.roles or (SPARE,)]
    return sorted(parts, key=lambda part: not part.leads)


if __name__ == "__main__":
    sys.exit(main())
