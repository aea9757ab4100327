"""All checks of the doctor, in the order in which a person would look: links first, then what uses them, then a run.

Invariant: the order is fixed, every check has a deadline of its own, and what a check needs is given to it here, so
that one that has nothing to look at says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bus.security import ClusterKey
from coordinator.doctor import between, store, training
from coordinator.metadata import parse_spec
from coordinator.metadata.credentials import Credentials
from hwprobe.doctor import (
    Check,
    Examined,
    disks,
    ensembles,
    gpus,
    interfaces,
    limits,
    mooncake,
    nccl,
    packages,
    paths,
    ports,
    traffic,
    windows,
)
from hwprobe.doctor.peers import Peer, way_to
from hwprobe.nvml import read_gpus

NVML_S = 20.0


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to look at beside this host."""

    run: Path | None = None
    runs: Path = Path("runs")  # where runs will be made
    peers: tuple[Peer, ...] = ()
    key: ClusterKey | None = None
    store: str = "embedded"
    credentials: Credentials | None = None
    ports: tuple[int, ...] = ()  # that something is to listen at, here
    host: str = "127.0.0.1"
    mooncake_logs: tuple[Path, ...] = ()


def checks(wanted: Wanted) -> list[Check]:
    """See the module docstring."""
    peers, many = wanted.peers, max(1, len(wanted.peers))
    away = [peer for peer in peers if (way := way_to(peer)) is not None and not way.own]
    spec = parse_spec(wanted.store)
    servers = sum(len(ensemble.split(",")) for ensemble in spec)
    tls = wanted.credentials is not None and wanted.credentials.tls is not None
    key = wanted.key
    net, there = "the network", "the other host"
    return [
        Check("interfaces", "network interfaces", interfaces.look, 10.0),
        Check("traffic", "this host's traffic at this moment", traffic.look, 10.0),
        Check("mtu", "packet sizes on the way to other hosts", lambda: paths.look_mtu(peers), 60.0 * many, net),
        Check("loss", "packets on the way to other hosts", lambda: paths.look_loss(peers), 20.0 * many, net),
        Check("reach", "what listens at other hosts", lambda: paths.look_ports(peers), 10.0 * many, net),
        Check(
            "latency", "messages between hosts", lambda: between.look(peers, key, between.latency), 60.0 * many, there
        ),
        Check(
            "bandwidth", "data between hosts", lambda: between.look(peers, key, between.bandwidth), 60.0 * many, there
        ),
        Check("nccl", "data between GPUs", _nccl, NVML_S + nccl.LIMIT_S + 10.0, "the driver"),
        Check("mooncake", "Mooncake's logs", lambda: mooncake.look(_logs(wanted)), 60.0, "the logs' disk"),
        Check("windows", "TCP windows", lambda: windows.look(_sends_far(away)), 10.0),
        Check("clock", "clocks of other hosts", lambda: between.look(peers, key, between.clock), 60.0 * many, there),
        Check("memory", "shared and locked memory", _memory, NVML_S + 10.0, "the driver"),
        Check("files", "open files", limits.look_files, 10.0),
        Check("ports", "ports of this host", lambda: ports.look(wanted.ports, wanted.host), 20.0),
        Check("packages", "installed packages", packages.look, 30.0, "the disk"),
        Check(
            "software",
            "packages of other hosts",
            lambda: between.look(peers, key, between.software),
            60.0 * many,
            there,
        ),
        Check("disks", "disks", lambda: disks.look(_places(wanted)), 60.0, "a disk"),
        Check(
            "zookeeper",
            "ZooKeeper servers",
            lambda: ensembles.look(spec, tls=tls),
            10.0 + 20.0 * max(1, servers),
            "a ZooKeeper server",
        ),
        Check("store", "the metadata store", lambda: store.look(wanted.store, wanted.credentials), 60.0, "ZooKeeper"),
        Check("gpus", "GPUs", gpus.look, 2 * NVML_S + 10.0, "the driver"),
        Check("training", "the run's evaluations", lambda: training.look(wanted.run), 60.0, "the run's disk"),
    ]


def _sends_far(away: Sequence[Peer]) -> bool:
    return bool(away) or bool(interfaces.fast(interfaces.read_interfaces()))


def _nccl() -> Examined:
    _, found, _ = read_gpus(NVML_S)
    return nccl.look(len(found), any(gpu.nvlinks for gpu in found))


def _memory() -> Examined:
    _, found, _ = read_gpus(NVML_S)
    return limits.look_memory(gpus=len(found) > 1)


def _logs(wanted: Wanted) -> list[Path]:
    own = [] if wanted.run is None else sorted(path for path in (wanted.run / "logs").glob("*") if path.is_file())
    return [*wanted.mooncake_logs, *own]


def _places(wanted: Wanted) -> dict[Path, int]:
    """Where what is written, and how much room it should have: a run that goes on, for two more checkpoints."""
    scratch = {Path(tempfile.gettempdir()): disks.SCRATCH}
    if wanted.run is None:
        return {wanted.runs: disks.ROOM, **scratch}
    sizes = [
        sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        for checkpoint in (wanted.run / "checkpoints").glob("v*")
    ]
    return {wanted.run: max(disks.ROOM, 2 * max(sizes, default=0)), **scratch}
