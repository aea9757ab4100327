"""``bin/admin``: look at a run and change it while it goes on; one command, or a prompt for several.

admin status            admin nodes            admin trajectories
admin pools             admin pause            admin resume           admin set alpha 2
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from actors.core import Node, Ref
from bus.message import BusError, NodeAddress
from bus.security import SecurityError, read_key
from coordinator.messages import (
    Changed,
    GetNodes,
    GetPools,
    GetStatus,
    GetTrajectories,
    Nodes,
    Pause,
    Pools,
    SetAlpha,
    Status,
    Trajectories,
    Unpause,
)
from coordinator.run import ADDRESS_FILE, CONTROL

ANSWER_TIMEOUT_S = 10.0
COMMANDS = "status, nodes, pools, trajectories, pause, resume, set alpha N, help, quit"


T = TypeVar("T")


class AdminError(ValueError):
    """A command that cannot be carried out; one line."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="admin", description="Look at a running job and change it.", epilog=f"commands: {COMMANDS}"
    )
    result.add_argument("command", nargs="*", help="one command; without it a prompt reads several")
    result.add_argument("--run", type=Path, default=Path("runs/latest"), help="run directory (default: runs/latest)")
    result.add_argument("--connect", metavar="tcp://HOST:PORT", help="the coordinator's address, instead of --run")
    result.add_argument("--key-file", type=Path, help="cluster key; needed beyond loopback")
    result.add_argument("--json", action="store_true", help="print answers as JSON")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return asyncio.run(_main(arguments))
    except (AdminError, SecurityError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def _main(arguments: argparse.Namespace) -> int:
    address = arguments.connect or _address_of(arguments.run)
    key = read_key(arguments.key_file) if arguments.key_file is not None else None
    async with Node(f"admin-{os.getpid()}", key=key) as node:
        shell = Shell(node, Ref(NodeAddress(CONTROL, address, "", 0), "coordinator"), as_json=arguments.json)
        if arguments.command:
            print(await shell.carry_out(arguments.command))
            return 0
        return await _prompt(shell)


def _address_of(run: Path) -> str:
    try:
        return (run / ADDRESS_FILE).read_text().strip()
    except OSError:
        raise AdminError(f"{run}: no run is going on there (no {ADDRESS_FILE}); name another with --run") from None


async def _prompt(shell: Shell) -> int:
    print(f"commands: {COMMANDS}")
    while True:
        try:
            words = shlex.split(await asyncio.to_thread(input, "admin> "))
        except EOFError:
            return 0
        except ValueError as error:
            print(f"error: {error}")
            continue
        if words[:1] in (["quit"], ["exit"]):
            return 0
        if words:
            try:
                print(await shell.carry_out(words))
            except (AdminError, BusError) as error:
                print(f"error: {error}")


class Shell:
    """Carries out commands; answers are text for people, or JSON."""

    def __init__(self, node: Node, coordinator: Ref, *, as_json: bool) -> None:
        self._node = node
        self._coordinator = coordinator
        self._as_json = as_json

    async def carry_out(self, words: list[str]) -> str:
        """Raises ``AdminError`` for an unknown command and ``BusError`` where the run does not answer."""
        match words:
            case ["status"]:
                return await self._show(GetStatus(), Status, describe_status)
            case ["nodes" | "pools" as what]:
                nodes, pools = (GetNodes(), Nodes, describe_nodes), (GetPools(), Pools, describe_pools)
                return await (self._show(*nodes) if what == "nodes" else self._show(*pools))
            case ["trajectories"]:
                return await self._show(GetTrajectories(), Trajectories, describe_trajectories)
            case ["pause" | "resume" as verb]:
                return await self._show(Pause() if verb == "pause" else Unpause(), Changed, describe_change)
            case ["set", "alpha", number] if number.isdigit():
                return await self._show(SetAlpha(int(number)), Changed, describe_change)
            case ["help"]:
                return COMMANDS
        raise AdminError(f"unknown command {' '.join(words)!r}; expected one of: {COMMANDS}")

    async def _show(self, message: msgspec.Struct, reply: type[T], describe: Callable[[T], str]) -> str:
        answer = await self._node.ask(
            self._coordinator, message, reply, timeout_s=ANSWER_TIMEOUT_S, retries=2, about="is the run still going?"
        )
        return msgspec.json.encode(answer).decode() if self._as_json else describe(answer)


def describe_change(changed: Changed) -> str:
    return changed.message


def describe_status(status: Status) -> str:
    """A few lines for people."""
    percent = "-" if status.success is None else f"{status.success:.0%}"
    evaluation = "-" if status.evaluation is None else f"{status.evaluation:.0%}"
    reward = "-" if status.reward is None else f"{status.reward:.3f}"
    lines = [
        f"run {status.run}: {status.state}, step {status.step}/{status.steps}, {status.elapsed_s:.0f} s",
        f"version {status.version}, alpha {status.alpha}, reward {reward}, success {percent}, evaluation {evaluation}",
        f"in flight {status.in_flight}, buffered {status.buffered}, "
        f"groups complete {status.groups_complete} of {status.groups_needed} needed",
        f"trajectories: {status.balance}",
    ]
    lines += [
        f"engine {e.name}: {e.state}, {e.hardware_class}, version {e.version}, in flight {e.in_flight}, "
        f"restarts {e.restarts}"
        for e in status.engines
    ]
    return "\n".join(lines)


def describe_pools(pools: Pools) -> str:
    """One line for each hardware class."""
    lines = []
    for pool in pools.pools:
        declared = "" if pool.declared is None else f" of {pool.declared} declared"
        kind = f" ({pool.kind}-optimised)" if pool.kind else ""
        lines.append(
            f"{pool.hardware_class}{kind}  {pool.devices} devices{declared}  on {', '.join(pool.hosts) or '-'}"
        )
    return "\n".join([*lines, *(f"warning: {warning}" for warning in pools.warnings)])


def describe_nodes(nodes: Nodes) -> str:
    return "\n".join(
        f"{node.name}  pid {node.pid}  {', '.join(node.roles)}  {node.control}  {node.hardware}" for node in nodes.nodes
    )


def describe_trajectories(trajectories: Trajectories) -> str:
    if not trajectories.running:
        return "nothing is running"
    lines = []
    for t in trajectories.running:
        version = "-" if t.initiating_version is None else str(t.initiating_version)
        where = f"turn {t.turns}  version {version}  waits for {t.state}  {t.seconds:.1f} s"
        lines.append(f"{t.ticket}  {t.purpose}  task {t.task}  {where}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
