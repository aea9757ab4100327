"""How long a write into the metadata store takes with the traffic of 512, 1,024 and 3,072 GPUs, beside etcd.

    python -m benchmarks.coordinator            1, 2, 4 and 8 shards and etcd, 3 rounds
    python -m benchmarks.coordinator --quick    1 and 4 shards, one short round
    python -m benchmarks.coordinator --json     one JSON object

The traffic is a real job's (``trace``: what the quick start writes), scaled, offered open loop. Each shard is one
ZooKeeper server, etcd one server; all of them sync every write to the same disk and share this machine's cores with
their client, a single process with one connection a server. So more shards are no faster here: what is shown is that
the rate is carried, and how far it is from what goes at all. Sides take turns within a round, every other round in the
opposite order. Figures: ``write_p99_ms_N`` with one shard for 512 GPUs, two for 1,024, four for 3,072, medians of the
rounds; ``vs_etcd`` the median of the rounds' ratios of p99, one shard to etcd, at the rate of 512 GPUs;
``prefixes_moved_vs_bound`` the worst share of 1.2/N of the prefixes that a ring of 2 to 9 gives up for a new ensemble,
and one such change is made on real servers under writes; ``decisions_per_s`` as ``decisions`` has it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from actors.core.ring import Ring
from benchmarks.coordinator import decisions, etcd_side, trace
from benchmarks.coordinator.load import Latencies, as_many_as_go, at_their_times
from coordinator.metadata import open_sharded
from coordinator.metadata.moving import Mover
from coordinator.metadata.protocol import Create
from coordinator.metadata.sharded import ShardedStore, placement_key
from tests.support.zookeeper import Server, running_servers

GPUS = (512, 1024, 3072)
SHARDS_FOR = {512: 1, 1024: 2, 3072: 4}
TIMEOUT_S = 60.0
AT_ONCE = 64
CHANGE_S = 1.0  # of a piece of the traffic that goes on during a change of the ring
TARGETS = {
    **{f"write_p99_ms_{gpus}": "<= 50" for gpus in GPUS},
    "vs_etcd": "",
    "prefixes_moved_vs_bound": "<= 1",
    "decisions_per_s": ">= 10,000",
}

Key = tuple[str, int]
"""Side ("1 shard", "etcd") and GPUs."""


class Measured(msgspec.Struct):
    """One round."""

    latencies: dict[Key, Latencies] = {}
    most_per_s: dict[str, float] = {}


class Change(msgspec.Struct, frozen=True):
    """An ensemble was added under writes."""

    prefixes: int
    of: int
    seconds: float
    p50_ms: float  # of the writes meanwhile
    worst_ms: float


class Settings(msgspec.Struct, frozen=True):
    shards: tuple[int, ...]
    rounds: int
    seconds: float  # of each open loop
    most_s: float  # of each closed one


FULL = Settings((1, 2, 4, 8), 3, 8.0, 3.0)
QUICK = Settings((1, 4), 1, 2.0, 1.0)


# ---- sides -----------------------------------------------------------------------------------------------------------


async def prepared(store: ShardedStore, paths: Sequence[str]) -> None:
    """Every path is there: what is measured are writes."""
    together: dict[str | None, list[Create]] = {}
    for path in paths:
        together.setdefault(placement_key(path), []).append(Create(path, b""))
    some = list(together.values())
    for start in range(0, len(some), AT_ONCE):
        await asyncio.gather(*(store.multi(creates) for creates in some[start : start + AT_ONCE]))


async def measure_shards(spec: str, name: str, settings: Settings, found: Measured, seed: int) -> None:
    recorded = trace.load()
    store = await open_sharded(spec, timeout_s=TIMEOUT_S)
    try:
        await prepared(store, trace.paths(recorded, max(GPUS)))
        for gpus in GPUS:
            due = trace.arrivals(recorded, gpus, settings.seconds, seed)
            found.latencies[name, gpus] = await at_their_times(due, settings.seconds, store.write)
        paths = trace.paths(recorded, 512)
        found.most_per_s[name] = await as_many_as_go(paths, _size(recorded), settings.most_s, AT_ONCE, store.write)
    finally:
        await store.close()


async def measure_etcd(address: str, settings: Settings, found: Measured, seed: int) -> None:
    recorded = trace.load()
    async with etcd_side.client(address) as client:
        for path in trace.paths(recorded, max(GPUS)):
            await client.write(path, b"")
        for gpus in GPUS:
            due = trace.arrivals(recorded, gpus, settings.seconds, seed)
            found.latencies["etcd", gpus] = await at_their_times(due, settings.seconds, client.write)
        paths = trace.paths(recorded, 512)
        found.most_per_s["etcd"] = await as_many_as_go(paths, _size(recorded), settings.most_s, AT_ONCE, client.write)


def _size(recorded: trace.Trace) -> int:
    return int(statistics.median(written.size for written in recorded.writes))


async def measure_change(addresses: Sequence[str], seconds: float) -> Change:
    """The last ensemble joins the others while the traffic of 512 GPUs goes on."""
    recorded = trace.load()
    store = await open_sharded("zk://" + ";".join(addresses[:-1]), timeout_s=TIMEOUT_S)
    loop = asyncio.get_running_loop()
    took = 0.0
    try:
        await prepared(store, trace.paths(recorded, 512))
        start = loop.time()
        moving = asyncio.create_task(Mover(store.ring).add(addresses[-1]))
        some: list[Latencies] = []
        while not moving.done():
            due = trace.arrivals(recorded, 512, seconds, seed=len(some))
            some.append(await at_their_times(due, seconds, store.write))
            took = loop.time() - start
        moved = await moving
        middle = statistics.median(one.p50_ms for one in some)
        return Change(moved.prefixes, moved.of, took, middle, max(one.worst_ms for one in some))
    finally:
        await store.close()


def worst_share() -> float:
    """Of what a ring gives up for one more, versus 1.2/N of 20,000 prefixes."""
    keys = [f"job-{number // 50}/node-{number % 50}" for number in range(20_000)]
    shares = []
    for count in range(2, 10):
        names = [str(number) for number in range(count)]
        before, after = Ring(names[:-1]), Ring(names)
        moved = sum(before.owner(key) != after.owner(key) for key in keys)
        shares.append(moved / (1.2 / count * len(keys)))
    return max(shares)


# ---- rounds ----------------------------------------------------------------------------------------------------------


def run(settings: Settings) -> tuple[list[Measured], Change]:
    with ExitStack() as stack:
        servers: dict[str, list[Server]] = {}
        for count in settings.shards:
            name = f"{count} shard{'s' * (count > 1)}"
            servers[name] = []
        etcd: str | None = None
        try:
            etcd = stack.enter_context(etcd_side.server())
        except etcd_side.EtcdMissing as error:
            print(f"etcd is not measured: {error}", file=sys.stderr)
        names = [*servers, *(["etcd"] if etcd else [])]
        rounds = []
        for number in range(settings.rounds):
            found = Measured()
            for name in names if number % 2 == 0 else names[::-1]:
                if name == "etcd" and etcd is not None:
                    asyncio.run(measure_etcd(etcd, settings, found, seed=number))
                else:
                    with running_servers(int(name.split()[0]), sync=True) as running:
                        spec = "zk://" + ";".join(server.address for server in running)
                        asyncio.run(measure_shards(spec, name, settings, found, seed=number))
                print(f"round {number + 1} of {settings.rounds}: {name}", file=sys.stderr, flush=True)
            rounds.append(found)
    with running_servers(3, sync=True) as running:
        change = asyncio.run(measure_change([server.address for server in running], CHANGE_S))
    return rounds, change


def figures(rounds: Sequence[Measured], per_s: float) -> dict[str, float]:
    found = {}
    for gpus in GPUS:
        shards = SHARDS_FOR[gpus]
        name = f"{shards} shard{'s' * (shards > 1)}"
        values = [one.latencies[name, gpus].p99_ms for one in rounds if (name, gpus) in one.latencies]
        if values:
            found[f"write_p99_ms_{gpus}"] = statistics.median(values)
    pairs = [(one.latencies["1 shard", 512], one.latencies.get(("etcd", 512))) for one in rounds]
    ratios = [ours.p99_ms / theirs.p99_ms for ours, theirs in pairs if theirs is not None]
    if ratios:
        found["vs_etcd"] = statistics.median(ratios)
    found["prefixes_moved_vs_bound"] = worst_share()
    found["decisions_per_s"] = per_s
    return found


def table(rounds: Sequence[Measured], change: Change) -> str:
    recorded = trace.load()
    lines = [f"{'':10}{'GPUs':>6}{'offered/s':>11}{'done/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'worst ms':>10}{'most/s':>9}"]
    for name, gpus in rounds[0].latencies:
        some = [one.latencies[name, gpus] for one in rounds]
        middle = {
            field: statistics.median(getattr(one, field) for one in some) for field in Latencies.__struct_fields__
        }
        most = statistics.median(one.most_per_s[name] for one in rounds)
        lines.append(
            f"{name:10}{gpus:6}{middle['offered_per_s']:11.0f}{middle['done_per_s']:9.0f}{middle['p50_ms']:9.2f}"
            f"{middle['p99_ms']:9.2f}{middle['worst_ms']:10.1f}{most:9.0f}"
        )
    lines.append(
        f"an ensemble added to two under the traffic of 512 GPUs: {change.prefixes} of {change.of} placement prefixes "
        f"moved within {change.seconds:.1f} s; writes meanwhile p50 {change.p50_ms:.1f} ms, worst "
        f"{change.worst_ms:.0f} ms"
    )
    lines.append(
        f"trace: {len(recorded.writes)} writes in {recorded.seconds:.0f} s, so {trace.rate(recorded, 512):.0f}, "
        f"{trace.rate(recorded, 1024):.0f} and {trace.rate(recorded, 3072):.0f} writes/s"
    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.coordinator", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, help=f"default: {FULL.rounds}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    settings = QUICK if arguments.quick else FULL
    if arguments.rounds:
        settings = msgspec.structs.replace(settings, rounds=arguments.rounds)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before"
    rounds, change = run(settings)
    taken = decisions.measure(*((10_000, 20_000) if arguments.quick else ()))
    found = figures(rounds, taken.per_s)
    if arguments.json:
        print(json.dumps({"figures": found, "command": "python -m benchmarks.coordinator", "machine": machine}))
        return 0
    print(table(rounds, change))
    for name, value in found.items():
        print(f"{name:28}{value:12,.2f}   {TARGETS[name]}")
    print(machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
