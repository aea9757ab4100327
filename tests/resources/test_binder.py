"""Where children are bound to, on synthetic cgroup trees and with real processes; what is not offered is said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.job import JobError, convert
from coordinator.resources.binder import Binder, near_cpus
from coordinator.resources.resolve import Place, Placement
from coordinator.resources.settings import BindingSettings, ShareSettings
from hwprobe import AffinityMap, Device, HostShare, NumaBinding
from hwprobe.delegation import Groups, Share, disk_of, standing
from hwprobe.offers import cross_numa_s, gpu_share, offers, pcie_bytes_s

GIB = 1 << 30


def cgroup(folder: Path, controllers: str = "cpuset cpu io memory pids", group: str = "/job") -> tuple[Path, Path]:
    """A unified hierarchy with this process in ``group``, and its /proc."""
    root, proc = folder / "cgroup", folder / "proc"
    own = root / group.lstrip("/")
    own.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"0::{group}\n")
    for directory in (root, own):
        (directory / "cgroup.controllers").write_text(f"{controllers}\n")
        (directory / "cgroup.subtree_control").write_text("")
        (directory / "cgroup.procs").write_text("")
    return root, proc


def place(name: str, device: str = "cpu", threads: int = 1) -> Place:
    role = name.rpartition("-")[0]
    return Place(name, role, device, "CPU", threads)  # type: ignore[arg-type]


def two_nodes(first: str, second: str) -> AffinityMap:
    numa = tuple(
        NumaBinding(node=node, cpus=cpus, memory_bytes=GIB, devices=(), nics=())
        for node, cpus in enumerate((first, second))
    )
    host = HostShare(host="h", cores=2, cpus=f"{first},{second}", memory_bytes=GIB, numa=numa, nics=())
    cpu = Device(
        host="h",
        id="cpu",
        name="",
        hardware_class="CPU",
        kind=None,
        roles=("environment",),
        peak_bf16_flops=None,
        bandwidth=None,
        memory_bytes=GIB,
        cpus=host.cpus,
    )
    return AffinityMap(hosts=(host,), devices=(cpu,), pools=(), reference_ridge=100.0)


def binder(
    folder: Path,
    said: list[str],
    places: list[Place],
    limits: ShareSettings | None = None,
    groups: Groups | None = None,
) -> Binder:
    settings = BindingSettings(limits={"env-worker": limits} if limits is not None else {})
    affinity = two_nodes("0", "1")
    return Binder(settings, Placement(places), affinity, directory=folder, say=said.append, groups=groups or Groups())


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as child:
        try:
            yield child
        finally:
            child.kill()


# ---- control groups -------------------------------------------------------------------------------------------------


def test_limits_are_written_as_the_kernel_wants_them(tmp_path: Path) -> None:
    root, proc = cgroup(tmp_path)
    groups = Groups(root, proc, pid=7)
    share = Share(cpus=1.5, memory_bytes=4 * GIB + 1, pids=256)
    assert groups.confine("env-worker-0", 4242, share) == {}
    group = root / "job" / "rollart-7" / "env-worker-0"
    written = {name: (group / name).read_text() for name in ("cpu.max", "memory.max", "pids.max", "cgroup.procs")}
    assert written == {
        "cpu.max": "150000 100000",
        "memory.max": str(4 * GIB),  # whole pages
        "pids.max": "256",
        "cgroup.procs": "4242",
    }


def test_what_is_not_passed_on_or_not_delegated_is_refused_with_the_reason(tmp_path: Path) -> None:
    root, proc = cgroup(tmp_path, controllers="cpu")
    refused = Groups(root, proc, pid=7).confine("x", 1, Share(cpus=1.0, pids=5))
    assert refused == {"pids": "the parent group does not pass this controller on (cgroup.subtree_control)"}
    assert standing(tmp_path / "none", proc).missing["cpu"] == f"no cgroup v2 is mounted at {tmp_path}/none"


def test_a_hybrid_hierarchy_names_the_version_that_holds_the_controller(tmp_path: Path) -> None:
    cgroup(tmp_path / "v2", controllers="")
    root = tmp_path / "cgroup"
    (root / "blkio").mkdir(parents=True)
    (tmp_path / "v2" / "cgroup").rename(root / "unified")
    missing = standing(root, tmp_path / "v2" / "proc").missing
    assert missing["io"] == f"the controller is bound to cgroup v1 ({root}/blkio), which is not used"


def test_traffic_is_limited_on_the_whole_disk(tmp_path: Path) -> None:
    disk = tmp_path / "devices" / "sda"
    (disk / "sda1").mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    (disk / "sda1" / "partition").write_text("1\n")
    blocks = tmp_path / "dev" / "block"
    blocks.mkdir(parents=True)
    (blocks / "8:1").symlink_to(disk / "sda1")
    assert disk_of(tmp_path, tmp_path, os.makedev(8, 1)) == "8:0"
    with pytest.raises(ValueError, match=r"is on no block device \(0:5\), whose traffic could be limited"):
        disk_of(tmp_path, tmp_path, os.makedev(0, 5))


# ---- children -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(len(os.sched_getaffinity(0) & {0, 1}) < 2, reason="CPUs 0 and 1 are needed")
def test_workers_are_dealt_out_to_the_numa_nodes_and_stay_there(tmp_path: Path) -> None:
    bound = binder(tmp_path, [], [place("env-worker-0"), place("env-worker-1")])
    with sleeper() as first, sleeper() as second:
        bound.bind("node.env-worker-0", first.pid)
        bound.bind("node.env-worker-1", second.pid)
        assert [os.sched_getaffinity(child.pid) for child in (first, second)] == [{0}, {1}]
    assert bound.bound["node.env-worker-1"].cpus == "1"


def test_a_process_with_more_threads_than_a_node_has_cpus_keeps_them_all() -> None:
    affinity = two_nodes("0-3", "4-7")
    (cpu,), (host,) = affinity.devices, affinity.hosts
    assert near_cpus(place("engine-1", threads=4), cpu, host) == "4-7"
    assert near_cpus(place("engine-1", threads=5), cpu, host) == "0-3,4-7"


def test_a_limit_that_is_not_to_be_had_is_said_once_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    groups = Groups(tmp_path / "none", tmp_path)
    places = [place("env-worker-0"), place("env-worker-1"), place("engine-0")]
    bound = binder(tmp_path, said, places, ShareSettings(memory_gib=4), groups)
    with sleeper() as child:
        for name in ("env-worker-0", "env-worker-1", "engine-0", "tracker"):
            bound.bind(name, child.pid)
    assert said == [f"memory of env-worker is not limited: no cgroup v2 is mounted at {tmp_path}/none"]
    assert bound.refusals["memory"] == 2
    assert set(bound.bound) == {"env-worker-0", "env-worker-1", "engine-0"}
    assert bound.bound["engine-0"].refused == {}


def test_a_child_that_is_gone_already_does_not_stop_anything(tmp_path: Path) -> None:
    with sleeper() as child:
        pass
    bound = binder(tmp_path, [], [place("env-worker-0")])
    bound.bind("env-worker-0", child.pid)
    assert "No such process" in bound.bound["env-worker-0"].refused["pinning"]


def test_a_job_says_what_each_kind_may_use() -> None:
    job = convert({"binding": {"limits": {"env-worker": {"memory_gib": 4, "pids": 64, "io_mb_s": 50}}}}, "job", [])
    share = job.binding.limits["env-worker"].share("/runs")
    assert share == Share(memory_bytes=4 * GIB, pids=64, io_bytes_s=50_000_000, io_path="/runs")
    assert share.wanted() == ("memory", "pids", "io")
    with pytest.raises(JobError, match=r"memory_gib"):
        convert({"binding": {"limits": {"engine": {"memory_gib": 0}}}}, "job", [])
    with pytest.raises(JobError, match=r"env_worker"):
        convert({"binding": {"limits": {"env_worker": {}}}}, "job", [])


# ---- what can be enforced here --------------------------------------------------------------------------------------


def test_every_limit_has_a_line_that_says_by_whom_or_why_not(tmp_path: Path) -> None:
    root, proc = cgroup(tmp_path, controllers="cpu memory pids")
    device = tmp_path / "bus" / "pci" / "devices" / "0000:18:00.0"
    device.mkdir(parents=True)
    (device / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    (device / "max_link_width").write_text("16\n")
    found = offers(cpus="0-7", numa_nodes=2, gpus=["0000:18:00.0"], cgroup=root, proc=proc, sysfs=tmp_path)
    assert [(offer.limit, offer.enforced) for offer in found] == [
        ("cpu", True),
        ("memory", True),
        ("pids", True),
        ("io", False),
        ("pinning", True),
        ("numa_memory", False),
        ("gpu_memory", True),
        ("pcie", False),
    ]
    lines = [offer.line() for offer in found]
    assert lines[0] == f"cpu (CPU time per time): enforced by cgroup v2, {root}/job/*/cpu.max"
    # 32 GT/s on 16 lanes, 128 of 130 bits: 63.0 GB/s, of which half
    assert lines[-1].endswith("not enforced: the kernel has no such limit; budget 31.5 GB/s a GPU, each way")


def test_a_link_carries_what_its_generation_and_width_say(tmp_path: Path) -> None:
    device = tmp_path / "bus" / "pci" / "devices" / "a"
    device.mkdir(parents=True)
    (device / "max_link_speed").write_text("5.0 GT/s PCIe\n")
    (device / "max_link_width").write_text("8\n")
    assert pcie_bytes_s("a", tmp_path) == pytest.approx(4e9)  # generation 2: 500 MB/s a lane
    assert pcie_bytes_s("b", tmp_path) is None
    assert cross_numa_s(16e9, 32e9) == pytest.approx(1.0)


def test_engines_of_one_gpu_share_what_the_reserve_leaves() -> None:
    assert gpu_share(1) == pytest.approx(0.85)
    assert gpu_share(2) == pytest.approx(0.425)
