"""``bin/admin``: look at a run and change it while it goes on; one command, or a prompt for several.

admin status            admin actors control        admin help
admin pause             admin set alpha 2           admin --json trajectories
admin shards show --store zk://HOME                 (add, remove, resume: ``coordinator.commands.shards``)
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from pathlib import Path

from bus.message import BusError
from bus.security import SecurityError, read_key
from coordinator.commands import shards
from coordinator.commands.usage import examples
from coordinator.shell.connection import ANSWER_S, Connection, ShellError, find, open_node
from coordinator.shell.shell import Shell

EXIT_FAILED = 1
EXIT_USAGE = 2


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="admin",
        description="Look at a running job and change it; without a command, at a prompt.",
        epilog=examples("admin help", "admin status", "admin --json trajectories", "admin --run runs/latest follow"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("command", nargs="*", help="one command ('help' lists them)")
    result.add_argument("--run", type=Path, default=Path("runs/latest"), help="run directory (default: runs/latest)")
    result.add_argument("--connect", metavar="tcp://HOST:PORT", help="the coordinator's address, instead of --run")
    result.add_argument("--key-file", type=Path, help="cluster key; needed beyond loopback")
    result.add_argument("--json", action="store_true", help="print answers as JSON, one a line")
    result.add_argument("--yes", action="store_true", help="carry out what would be asked about first")
    result.add_argument(
        "--timeout", type=float, default=ANSWER_S, metavar="S", help=f"wait so long for answers (default: {ANSWER_S:g})"
    )
    return result


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["shards"] and words[1:2] and words[1] in shards.VERBS:  # of a store, which outlives any run
        return shards.main(words[1:])
    arguments = parser().parse_intermixed_args(argv)
    try:
        return asyncio.run(_main(arguments))
    except (ShellError, SecurityError, BusError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, SecurityError) else EXIT_FAILED
    except KeyboardInterrupt:
        return 130


async def _main(arguments: argparse.Namespace) -> int:
    target = find(arguments.run, arguments.connect)
    key = read_key(arguments.key_file) if arguments.key_file is not None else None
    at_terminal = sys.stdin.isatty()
    async with open_node(target.address, key) as node:
        shell = Shell(
            Connection(node, target, timeout_s=arguments.timeout),
            as_json=arguments.json,
            say=lambda text: print(text, flush=True),
            confirm=_confirm if at_terminal else None,
            yes=arguments.yes,
        )
        if arguments.command:
            await shell.carry_out(arguments.command)
            return 0
        return await _prompt(shell) if at_terminal else await _script(shell)


# The line editor is loaded where it is needed: that takes as long as all the rest.


async def _confirm(question: str) -> bool:
    from coordinator.shell.prompt import confirm  # noqa: PLC0415

    return await confirm(question)


async def _prompt(shell: Shell) -> int:
    from coordinator.shell.prompt import prompt  # noqa: PLC0415

    return await prompt(shell)


async def _script(shell: Shell) -> int:
    """Lines from elsewhere than a terminal; the first one that fails ends it."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        words = shlex.split(line, comments=True)
        if words[:1] in (["quit"], ["exit"]):
            break
        if words:
            await shell.carry_out(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
