"""``bin/support-bundle``: what somebody needs who is to find out, from elsewhere, what is wrong with a run.

support-bundle runs/latest                     support-bundle --join tcp://10.0.0.1:4711 --key-file cluster.key

From a run directory, dead or alive: logs, configuration, metrics, the ledger's summary; from a run that answers also
what every node says of itself. Keys, tokens and passwords are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from bus.message import BusError
from bus.security import ClusterKey, SecurityError, read_key
from coordinator.bundle.archive import Archive
from coordinator.bundle.files import Collected, run_files
from coordinator.bundle.host import host_files
from coordinator.bundle.live import fetched_files, live_files
from coordinator.bundle.redaction import Redactor, secrets_of
from coordinator.commands.usage import examples
from coordinator.observe.rundir import RunDirectory, RunDirectoryError
from coordinator.shell.connection import ANSWER_S, Connection, ShellError, Target, find, open_node


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="support-bundle",
        description="Collect what somebody needs who is to find out what is wrong with a run, without its secrets.",
        epilog=examples("support-bundle runs/latest", "support-bundle --join tcp://10.0.0.1:4711 --key-file my.key"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("run", nargs="?", type=Path, help="run directory, dead or alive (default: runs/latest)")
    result.add_argument("--join", metavar="tcp://HOST:PORT", help="a coordinator elsewhere, instead of a run directory")
    result.add_argument("--key-file", type=Path, help="cluster key; needed beyond loopback")
    result.add_argument("--output", type=Path, metavar="FILE", help="where to write it (default: here)")
    result.add_argument(
        "--timeout", type=float, default=ANSWER_S, metavar="S", help=f"wait so long for answers (default: {ANSWER_S:g})"
    )
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.run is not None and arguments.join is not None:
        print("error: expected a run directory or --join, found both", file=sys.stderr)
        return 2
    try:
        return asyncio.run(_main(arguments))
    except (ShellError, SecurityError, RunDirectoryError, BusError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or arguments.output}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def _main(arguments: argparse.Namespace) -> int:
    key = read_key(arguments.key_file) if arguments.key_file is not None else None
    redactor = Redactor([*secrets_of(os.environ), *_secrets_in(key)])
    directory = None if arguments.join else RunDirectory.open(arguments.run or Path("runs/latest")).path
    name = directory.name if directory is not None else "run"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = arguments.output or Path(f"support-{name}-{stamp}.tar.gz")
    with Archive(path, f"support bundle of {directory or arguments.join}") as archive:
        for file in host_files(redactor, directory):
            archive.add(file)
        if directory is not None:
            for file in run_files(directory, redactor):
                archive.add(file)
        await _add_live(archive, arguments, directory, key, redactor)
    print(f"{path}: {path.stat().st_size} bytes; INDEX.txt in it says what is there, and what is not")
    return 0


def _secrets_in(key: ClusterKey | None) -> list[str]:
    return [] if key is None else [pair.secret for pair in key.content.pairs]


async def _add_live(
    archive: Archive, arguments: argparse.Namespace, directory: Path | None, key: ClusterKey | None, redactor: Redactor
) -> None:
    """What the run says, where it answers; a run directory alone is worth a bundle, too. Raises ``ShellError`` where
    the run was named by its address and does not answer."""
    try:
        target: Target = find(directory or Path(), arguments.join)
    except ShellError as error:
        archive.add(Collected("live/silent.txt", f"{error}\n".encode(), "no run answers"))
        return
    async with open_node(target.address, key) as node:
        run = Connection(node, target, timeout_s=arguments.timeout)
        if directory is None:
            async for file in fetched_files(run, redactor):
                archive.add(file)
        async for file in live_files(run, redactor):
            archive.add(file)


if __name__ == "__main__":
    sys.exit(main())
