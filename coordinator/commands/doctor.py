"""``bin/doctor``: what makes this host, its network or a run ill, why, and what to do.

doctor                                              this host
doctor runs/latest                                  and that run: its store, disk, logs and evaluations
doctor --serve --host 10.0.0.2 --port 5610          on another host: answers, for an hour ...
doctor --peer tcp://10.0.0.2:5610                   ... what this one asks of it, and of the way there
doctor --fix                                        shows what it could change by itself; --yes does it

Exit status: 0 nothing to be done, 1 something is, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.core import Node
from bus.message import BusError
from bus.security import SecurityError, check_exposure, read_key
from coordinator.commands.usage import examples
from coordinator.doctor.checks import Wanted, checks
from coordinator.doctor.nurse import NODE, NURSE, Nurse
from coordinator.launching.exits import DONE, FAILED, INTERRUPTED, USAGE
from coordinator.launching.hostlist import LaunchError, load_hosts, numeric
from coordinator.metadata import parse_spec
from coordinator.metadata.credentials import CredentialsError, read_credentials
from coordinator.observe.rundir import RunDirectory, RunDirectoryError
from hwprobe.doctor import Check, Report, describe, examine
from hwprobe.doctor.fixing import Fixed, apply, fixes_of, shown
from hwprobe.doctor.peers import Peer, PeerError, parse_peer
from hwprobe.doctor.report import summary, told

SERVE_S = 3600.0


class UsageError(ValueError):
    """A command line that means nothing; one line."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="doctor",
        description="Look for what makes this host, its network or a run ill; say why, and what to do.",
        epilog=examples(
            "doctor",
            "doctor runs/latest",
            "doctor --peer 10.0.0.2                        (echoes alone: nothing has to run there)",
            "doctor --peer tcp://10.0.0.2:5610 --host 10.0.0.1 --key-file cluster.key",
            "doctor --serve --host 10.0.0.2 --port 5610 --key-file cluster.key",
            "doctor --store zk://10.0.0.1:2181,10.0.0.2:2181 --only zookeeper,store",
            "doctor --fix --yes",
        )
        + "\n\nexit status: 0 nothing to be done, 1 something is, 2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("run", nargs="?", type=Path, help="run directory, dead or alive")
    result.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are to be made (default: runs)")
    beside = result.add_argument_group("beside this host")
    beside.add_argument("--peer", action="append", default=[], metavar="ADDRESS", help="another host; tcp://HOST:PORT")
    beside.add_argument("--hosts", type=Path, metavar="FILE", help="a host list of bin/launch: all of them are peers")
    beside.add_argument("--store", metavar="zk://HOST:PORT", help="as in coordinator.store (default: the run's)")
    beside.add_argument("--credentials", type=Path, metavar="FILE", help="as in coordinator.store_credentials")
    beside.add_argument("--port", action="append", type=int, default=[], help="a port of this host that is to be free")
    beside.add_argument("--host", default="127.0.0.1", help="this host's address (default: loopback)")
    beside.add_argument("--key-file", type=Path, help="cluster key; needed for peers beyond loopback")
    beside.add_argument("--mooncake-log", action="append", type=Path, default=[], metavar="FILE", help="a log to read")
    result.add_argument("--only", metavar="CHECK,CHECK", help="these checks alone; --list names them")
    result.add_argument("--list", action="store_true", help="name the checks, in their order")
    result.add_argument("--json", action="store_true", help="print one JSON object")
    result.add_argument("--fix", action="store_true", help="show what it would change by itself; nothing is changed")
    result.add_argument("--yes", action="store_true", help="with --fix: change it, until the next reboot")
    result.add_argument("--serve", action="store_true", help="answer the doctor of another host instead")
    result.add_argument("--for", dest="serve_s", type=float, default=SERVE_S, metavar="S", help="--serve: so long")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        if arguments.serve:
            return _serve(arguments)
        chosen = _chosen(checks(wanted_of(arguments)), arguments.only)
    except (UsageError, PeerError, LaunchError, SecurityError, CredentialsError, RunDirectoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except BusError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return _listed(chosen) if arguments.list else _look(chosen, arguments)


def _listed(chosen: Sequence[Check]) -> int:
    print("\n".join(f"{check.name.ljust(12)} {check.about}" for check in chosen))
    return DONE


def wanted_of(arguments: argparse.Namespace) -> Wanted:
    """Raises what ``main`` turns into one line."""
    if arguments.yes and not arguments.fix:
        raise UsageError("--yes goes with --fix")
    _ports(arguments)
    for path in arguments.mooncake_log:
        if not path.is_file():
            raise UsageError(f"--mooncake-log: expected a file, found none at {path}")
    job: dict[str, Any] = {}
    run = None
    if arguments.run is not None:
        directory = RunDirectory.open(arguments.run)
        run, job = directory.path, directory.read_job().get("coordinator") or {}
    store = arguments.store or str(job.get("store", "embedded"))
    try:
        parse_spec(store)
    except ValueError as error:
        raise UsageError(str(error)) from None
    credentials = arguments.credentials or job.get("store_credentials")
    return Wanted(
        run=run,
        runs=arguments.runs,
        peers=_peers(arguments),
        key=None if arguments.key_file is None else read_key(arguments.key_file),
        store=store,
        credentials=None if credentials is None else read_credentials(Path(credentials)),
        ports=tuple(arguments.port),
        host=numeric(arguments.host),
        mooncake_logs=tuple(arguments.mooncake_log),
    )


def _ports(arguments: argparse.Namespace) -> None:
    """Raises ``UsageError``."""
    if wrong := [port for port in arguments.port if not 0 < port < 65_536]:
        raise UsageError(f"--port: expected 1 to 65535, found {wrong[0]}")


def _peers(arguments: argparse.Namespace) -> tuple[Peer, ...]:
    named = [parse_peer(text) for text in arguments.peer]
    if arguments.hosts is not None:
        listed = load_hosts(arguments.hosts).hosts
        named += [parse_peer(host.address or host.host) for host in listed]
    return tuple(dict.fromkeys(named))


def _chosen(every: Sequence[Check], only: str | None) -> list[Check]:
    """Raises ``UsageError``."""
    if only is None:
        return list(every)
    names = [name.strip() for name in only.split(",")]
    known = [check.name for check in every]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"--only: expected checks out of {', '.join(known)}; found {', '.join(unknown)}")
    return [check for check in every if check.name in names]


def _look(chosen: Sequence[Check], arguments: argparse.Namespace) -> int:
    colour = sys.stdout.isatty() and not arguments.json
    width = shutil.get_terminal_size((100, 24)).columns

    def tell(lines: list[str]) -> None:
        if not arguments.json:
            print("\n".join(lines), flush=True)

    try:
        report = examine(chosen, lambda checked: tell(told(checked, colour=colour, width=width)))
    except KeyboardInterrupt:
        return INTERRUPTED
    tell(["", describe(report, colour=colour, width=width, checks=False)])
    fixed: list[Fixed] = []
    if arguments.fix:
        fixed = [(apply if arguments.yes else shown)(fix) for fix in fixes_of(report.findings)]
        tell(["", *(_fixed(one) for one in fixed)] if fixed else ["", "nothing that could be changed without harm"])
    elif fixes_of(report.findings):
        tell(["", "--fix shows what can be changed by itself"])
    if any(one.done for one in fixed):
        report = _again(chosen, report)
        tell(["", summary(report)])
    if arguments.json:
        print(_json(report, fixed))
    return FAILED if report.findings else DONE


def _again(chosen: Sequence[Check], before: Report) -> Report:
    """The checks whose findings could be fixed, made again; the others as they were."""
    names = {finding.check for finding in before.findings if finding.fix is not None}
    after = {checked.name: checked for checked in examine([c for c in chosen if c.name in names]).checks}
    return Report(before.host, [after.get(checked.name, checked) for checked in before.checks])


def _fixed(one: Fixed) -> str:
    name = one.setting.replace("/", ".")
    if one.done:
        return f"changed {name} from {one.before} to {one.after}"
    if one.why_not:
        return f"left {name} at {one.before}: {one.why_not}"
    return f"would change {name} from {one.before} to {one.after} (--yes does it)"


def _json(report: Report, fixed: Sequence[Fixed]) -> str:
    document = {
        "host": report.host,
        "healthy": not report.findings,
        "findings": report.findings,
        "checks": report.checks,
        "fixes": list(fixed),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _serve(arguments: argparse.Namespace) -> int:
    host, key = numeric(arguments.host), None if arguments.key_file is None else read_key(arguments.key_file)
    check_exposure(host, key)
    _ports(arguments)
    if len(arguments.port) > 1:
        raise UsageError("--serve: expected one --port")

    async def serve() -> None:
        async with Node(NODE, host=host, port=arguments.port[0] if arguments.port else 0, key=key) as node:
            await node.spawn(Nurse, NURSE)
            print(f"--peer {node.address.control}", flush=True)
            await asyncio.sleep(arguments.serve_s)

    asyncio.run(serve())
    return DONE


if __name__ == "__main__":
    sys.exit(main())
