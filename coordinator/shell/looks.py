"""The commands that look: each asks, and makes the part that was asked for out of what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import msgspec

from actors.env.messages import Followed
from coordinator.desk.messages import (
    Backlog,
    Engines,
    Follow,
    GetBacklog,
    GetEngines,
    GetHardware,
    GetMetrics,
    GetShards,
    GetSurvey,
    GetVersions,
    Hardware,
    MetricsText,
    SeenNode,
    Shards,
    Survey,
    Versions,
)
from coordinator.launch import ADDRESS_FILE
from coordinator.messages import (
    GetHosts,
    GetPools,
    GetStatus,
    GetTrajectories,
    HostList,
    Pools,
    Status,
    Trajectories,
)
from coordinator.observe.lines import read_lines
from coordinator.observe.records import StepRecord, decode_metric
from coordinator.orders import GetTrajectory, TrajectoryLife
from coordinator.shell.answers import ActorRow, Actors, JobRow, Jobs
from coordinator.shell.connection import Connection, ShellError, gone_owner

FOLLOW_ITEM_S = 30.0


async def status(run: Connection) -> Status:
    return await run.ask_coordinator(GetStatus(), Status)


async def jobs(run: Connection) -> Jobs:
    """The run directories beside the one that the shell looks at, newest first."""
    directory = run.target.directory
    if directory is None:
        raise ShellError("jobs: a run that is named by its address has no directory here; name one with --run")
    runs = [path for path in directory.parent.iterdir() if (path / "job.yaml").is_file() and not path.is_symlink()]
    return Jobs([_job(path) for path in sorted(runs, reverse=True)])


def _job(path: Path) -> JobRow:
    steps = [
        record for record in read_lines(path / "metrics.jsonl", decode_metric).records if isinstance(record, StepRecord)
    ]
    last = steps[-1] if steps else None
    try:
        address = (path / ADDRESS_FILE).read_text().strip()
    except OSError:
        address = ""
    state = "ended" if not address else "running" if gone_owner(path) is None else "killed"
    step, success = (None, None) if last is None else (last.step, last.success_rate)
    return JobRow(path.name, state, step, success, address if state == "running" else "")


async def nodes(run: Connection) -> Survey:
    return await run.ask(GetSurvey())


async def actors(run: Connection, node: str = "") -> Actors:
    """Of one node, or of all."""
    survey = await run.ask(GetSurvey())
    meant = [_known(survey, node)] if node else survey.nodes
    answered = [(one.name, one.description) for one in meant if one.description is not None]
    return Actors(
        [ActorRow(name, actor, facts) for name, found in answered for actor, facts in found.actors.items()],
        {one.name: one.silence for one in meant if one.description is None},
        {name: found.counters for name, found in answered},
        {name: found.dead_letters for name, found in answered if found.dead_letters},
    )


def _known(survey: Survey, name: str) -> SeenNode:
    for node in survey.nodes:
        if node.name == name:
            return node
    raise ShellError(f"there is no node {name!r}; there are {', '.join(node.name for node in survey.nodes)}")


async def pools(run: Connection) -> Pools:
    return await run.ask_coordinator(GetPools(), Pools)


async def hosts(run: Connection) -> HostList:
    return await run.ask_coordinator(GetHosts(), HostList)


async def engines(run: Connection) -> Engines:
    return await run.ask(GetEngines())


async def trajectories(run: Connection) -> Trajectories:
    return await run.ask_coordinator(GetTrajectories(), Trajectories)


async def explain(run: Connection, ticket: str) -> TrajectoryLife:
    return await run.ask_coordinator(GetTrajectory(ticket), TrajectoryLife)


async def follow(run: Connection, ticket: str = "") -> AsyncIterator[Followed]:
    async with aclosing(run.stream(Follow(ticket), item_s=FOLLOW_ITEM_S)) as steps:
        async for step in steps:
            yield step


async def queues(run: Connection) -> Backlog:
    return await run.ask(GetBacklog())


async def versions(run: Connection) -> Versions:
    return await run.ask(GetVersions())


async def shards(run: Connection) -> Shards:
    return await run.ask(GetShards())


async def hardware(run: Connection, node: str = "") -> Hardware:
    answer = await run.ask(GetHardware())
    if not node:
        return answer
    found = [one for one in answer.nodes if one.node == node]
    if not found:
        raise ShellError(f"no node {node!r} has joined; there are {', '.join(one.node for one in answer.nodes)}")
    return msgspec.structs.replace(answer, nodes=found)


async def metrics(run: Connection, prefix: str = "") -> MetricsText:
    """All, or those whose name begins so (with or without the "rollart_" in front)."""
    answer = await run.ask(GetMetrics())
    if not prefix:
        return answer
    wanted = (prefix, f"rollart_{prefix}")
    kept = [line for line in answer.text.splitlines() if line.startswith(wanted)]
    if not kept:
        raise ShellError(f"no metric begins with {prefix!r}; 'metrics' without it shows all")
    return MetricsText("\n".join(kept))
