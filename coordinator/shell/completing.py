"""What could come next on a line: commands from the catalogue, live names from the run.

Invariant: completion never holds up the line. Names that the run does not give within ``NAMES_S`` are not offered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from coordinator.desk.messages import GetEngines, GetSurvey
from coordinator.messages import GetTrajectories, Trajectories
from coordinator.orders import GetQueues, Queues
from coordinator.shell.catalogue import COMMANDS, Kind
from coordinator.shell.connection import Connection, ShellError

NAMES_S = 2.0

Candidate = tuple[str, int, str]
"""A word, how many characters before the cursor it replaces, and what it means."""


class Names:
    """The live names of a run, by kind of argument."""

    def __init__(self, run: Connection) -> None:
        self._run = run
        self._sources: dict[Kind, Callable[[], Awaitable[dict[str, str]]]] = {
            "node": self._nodes,
            "host": self._hosts,
            "stream": self._streams,
            "engine": self._engines,
            "ticket": self._tickets,
            "command": self._commands,
        }

    async def of(self, kind: Kind) -> dict[str, str]:
        """Names and what each is; none where the run does not say in time."""
        source = self._sources.get(kind)
        if source is None:
            return {}
        try:
            async with asyncio.timeout(NAMES_S):
                return await source()
        except (ShellError, TimeoutError):
            return {}

    async def _nodes(self) -> dict[str, str]:
        survey = await self._run.ask(GetSurvey())
        return {node.name: ", ".join(node.roles) or f"of {node.parent}" for node in survey.nodes}

    async def _hosts(self) -> dict[str, str]:
        queues = await self._run.ask_coordinator(GetQueues(), Queues)
        return {host.node: "drained" if host.draining else f"{host.used} trajectories" for host in queues.hosts}

    async def _streams(self) -> dict[str, str]:
        queues = await self._run.ask_coordinator(GetQueues(), Queues)
        return {stream.name: f"{stream.share:.1%} of the groups" for stream in queues.streams if stream.name}

    async def _engines(self) -> dict[str, str]:
        answer = await self._run.ask(GetEngines())
        return {engine.name: engine.state for engine in answer.engines}

    async def _tickets(self) -> dict[str, str]:
        answer = await self._run.ask_coordinator(GetTrajectories(), Trajectories)
        return {one.ticket: f"turn {one.turns}, waits for {one.state}" for one in answer.running}

    async def _commands(self) -> dict[str, str]:
        return {command.name: command.purpose for command in COMMANDS}


async def candidates(line: str, names: Names) -> list[Candidate]:
    """What may follow a line, the last word of which is not finished unless a space ends it."""
    begun = "" if line.endswith(" ") or not line else line.rsplit(maxsplit=1)[-1]
    before = line.split()[: -1 if begun else None]
    found: dict[str, str] = {}
    for command in COMMANDS:
        name = command.name.split()
        if len(before) < len(name) and name[: len(before)] == before:
            found[name[len(before)]] = command.purpose
        elif before[: len(name)] == name and len(before) - len(name) < len(command.arguments):
            found |= await names.of(command.arguments[len(before) - len(name)].kind)
    if not before:
        found |= {"quit": "end the shell"}
    return [(word, len(begun), meaning) for word, meaning in sorted(found.items()) if word.startswith(begun)]
