"""``bin/share CLUSTER.yaml``: let several runs share the env places of one cluster, for as long as it runs.

    places: 64
    jobs:
      maps:   {run: runs/maps, priority: 1, least: 8}     # higher priorities go first; it is sure of 8 places
      sums:   {run: runs/sums, weight: 2, most: 32}       # among equals: twice the share, but never more than 32
      guests: {connect: "tcp://10.0.0.7:4711"}

No trajectory is cut: a run gives up places as its trajectories end. Ended by Ctrl-C, it leaves every run with what it
may use then; it ends by itself when all runs are over. A run that begins later, or goes on elsewhere, is looked for
again in every round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import yaml

from actors.core import Node, Ref
from bus.message import NodeAddress
from bus.security import ClusterKey, SecurityError, read_key
from coordinator.commands.usage import examples
from coordinator.launch import CONTROL
from coordinator.scheduling.jobs import Quota
from coordinator.sharing import Sharing
from coordinator.shell.connection import ShellError, find, own_host

EVERY_S = 5.0


class JobShare(Quota, frozen=True, kw_only=True):
    """One run and what is agreed for it."""

    run: str | None = None  # its directory
    connect: str | None = None  # or its coordinator's address


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    places: int
    jobs: dict[str, JobShare]


class ClusterError(ValueError):
    """A file that cannot be carried out; one line."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="share",
        description="Share the env places of a cluster among several runs.",
        epilog=examples("share cluster.yaml", "share cluster.yaml --once"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("cluster", type=Path, help="places and jobs (YAML)")
    result.add_argument("--every", type=float, default=EVERY_S, metavar="S", help="seconds between two rounds")
    result.add_argument("--once", action="store_true", help="one round, then stop")
    result.add_argument("--key-file", type=Path, help="cluster key; needed beyond loopback")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        cluster = load(arguments.cluster)
        key = None if arguments.key_file is None else read_key(arguments.key_file)
        return asyncio.run(_share(cluster, key, every_s=arguments.every, once=arguments.once))
    except (ClusterError, SecurityError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def load(path: Path) -> Cluster:
    """Raises ``ClusterError``."""
    try:
        cluster = msgspec.convert(yaml.safe_load(path.read_text()), Cluster)
    except OSError as error:
        raise ClusterError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ClusterError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except msgspec.ValidationError as error:
        raise ClusterError(f"{path}: {error}") from None
    if cluster.places < 1:
        raise ClusterError(f"{path}: places: expected 1 or more, found {cluster.places}")
    for name, job in cluster.jobs.items():
        _check(f"{path}: jobs.{name}", job)
    return cluster


def _check(where: str, job: JobShare) -> None:
    if (job.run is None) == (job.connect is None):
        raise ClusterError(f"{where}: expected either run (its directory) or connect (its coordinator's address)")
    if not job.weight > 0:
        raise ClusterError(f"{where}.weight: expected a number above 0, found {job.weight}")
    if job.least < 0 or (job.most is not None and job.most < job.least):
        raise ClusterError(f"{where}: expected 0 <= least <= most, found least {job.least}, most {job.most}")


async def _share(cluster: Cluster, key: ClusterKey | None, *, every_s: float, once: bool) -> int:
    said: dict[str, int | None] = {}
    async with AsyncExitStack() as stack:
        sharing = Sharing(cluster.places)
        while True:
            for name, job in cluster.jobs.items():
                await _look_for(name, job, sharing, stack, key)
            bounds = await sharing.round()
            if bounds != said:
                said = bounds
                print(", ".join(f"{name} {_places(bound)}" for name, bound in bounds.items()) or "no run", flush=True)
            if once or not bounds:
                return 0
            await asyncio.sleep(every_s)


def _places(bound: int | None) -> str:
    return "not reached yet" if bound is None else f"may use {bound}"


async def _look_for(name: str, job: JobShare, sharing: Sharing, stack: AsyncExitStack, key: ClusterKey | None) -> None:
    """Where a run's coordinator is now. Each is asked by a node of its own, since all are called the same."""
    try:
        address = find(Path(job.run or ""), job.connect).address
    except ShellError:  # it has not begun, or is over
        return
    member = sharing.members.get(name)
    if member is not None and member.coordinator.node.control == address:
        return
    node = Node(f"share-{socket.gethostname()}-{os.getpid()}-{name}", host=own_host(address), key=key)
    await stack.enter_async_context(node)
    sharing.join(name, node, Ref(NodeAddress(CONTROL, address, "", 0), "coordinator"), job)


if __name__ == "__main__":
    sys.exit(main())
