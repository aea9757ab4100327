"""CPU, memory, NUMA and NICs from synthetic trees: a container sees its share."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hwprobe.cgroup import read_limits
from hwprobe.cpulist import format_cpulist, parse_cpulist
from hwprobe.hardware import Finding, Nic
from hwprobe.network import MAX_NICS, read_nics
from hwprobe.processor import read_cpu, read_memory, read_numa
from tests.hwprobe.trees import GIB, loopback_files, nic_files, small_machine, two_sockets, write


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8", (0, 1, 2, 3, 8)), ("", ()), ("5\n", (5,)), ("8,0-1,1", (0, 1, 8))],
)
def test_cpu_lists_are_read(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_cpulist(text) == numbers


def test_cpu_lists_are_written_in_their_shortest_form() -> None:
    assert format_cpulist([8, 0, 1, 2, 3, 10, 11]) == "0-3,8,10-11"
    assert format_cpulist([]) == ""


@pytest.mark.parametrize("text", ["a", "3-1", "1-2-3"])
def test_what_is_no_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a CPU list"):
        parse_cpulist(text)


def v2(root: Path, group: str, files: dict[str, str]) -> tuple[Path, Path]:
    write(root, {"cgroup/cgroup.controllers": "cpuset cpu io memory pids", "proc/self/cgroup": f"0::{group}"})
    write(root / "cgroup", files)
    return root / "cgroup", root / "proc"


def test_v2_limits_are_the_tightest_on_the_way_to_the_root(tmp_path: Path) -> None:
    limits = read_limits(
        *v2(
            tmp_path,
            "/kubepods/pod1/main",
            {
                "kubepods/cpu.max": "800000 100000",
                "kubepods/memory.max": str(64 * GIB),
                "kubepods/pod1/cpu.max": "250000 100000",
                "kubepods/pod1/memory.max": "max",
                "kubepods/pod1/main/cpu.max": "max 100000",
                "kubepods/pod1/main/memory.max": str(8 * GIB),
                "kubepods/pod1/main/cpuset.cpus.effective": "4-7",
                "cpuset.cpus.effective": "0-63",
            },
        )
    )
    assert (limits.version, limits.cpus, limits.memory_bytes, limits.cpuset) == ("v2", 2.5, 8 * GIB, (4, 5, 6, 7))


def test_v2_in_a_container_reads_its_own_root(tmp_path: Path) -> None:
    limits = read_limits(*v2(tmp_path, "/", {"cpu.max": "150000 100000", "memory.max": str(4 * GIB)}))
    assert (limits.version, limits.cpus, limits.memory_bytes) == ("v2", 1.5, 4 * GIB)


def test_v2_without_limits_limits_nothing(tmp_path: Path) -> None:
    limits = read_limits(
        *v2(tmp_path, "/user.slice", {"user.slice/cpu.max": "max 100000", "user.slice/memory.max": "max"})
    )
    assert (limits.version, limits.cpus, limits.memory_bytes, limits.cpuset) == ("v2", None, None, None)


def test_v1_limits_come_from_the_hierarchy_of_each_controller(tmp_path: Path) -> None:
    root = write(
        tmp_path / "cgroup",
        {
            "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "400000",
            "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
            "memory/docker/abc/memory.limit_in_bytes": str(2 * GIB),
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "cpuset/docker/abc/cpuset.cpus": "0-3",
            "cpuset/docker/abc/cpuset.effective_cpus": "0-1",
        },
    )
    lines = ["9:name=systemd:/", "4:memory:/docker/abc", "3:cpuset:/docker/abc", "2:cpu,cpuacct:/docker/abc"]
    proc = write(tmp_path / "proc", {"self/cgroup": "\n".join(lines)})
    limits = read_limits(root, proc)
    assert (limits.version, limits.cpus, limits.memory_bytes, limits.cpuset) == ("v1", 4.0, 2 * GIB, (0, 1))


def test_v1_whose_path_on_the_host_is_not_visible_reads_the_mounts_root(tmp_path: Path) -> None:
    root = write(
        tmp_path / "cgroup",
        {
            "cpu/cpu.cfs_quota_us": "50000",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": str(GIB),
        },
    )
    proc = write(tmp_path / "proc", {"self/cgroup": "4:memory:/docker/abc\n2:cpu:/docker/abc"})
    limits = read_limits(root, proc)
    assert (limits.version, limits.cpus, limits.memory_bytes) == ("v1", 0.5, GIB)


def test_a_hybrid_tree_is_limited_by_both_hierarchies(tmp_path: Path) -> None:
    root = write(
        tmp_path / "cgroup",
        {
            "unified/cgroup.controllers": "cpu",
            "unified/app/cpu.max": "300000 100000",
            "memory/app/memory.limit_in_bytes": str(3 * GIB),
        },
    )
    proc = write(tmp_path / "proc", {"self/cgroup": "4:memory:/app\n0::/app"})
    limits = read_limits(root, proc)
    assert (limits.version, limits.cpus, limits.memory_bytes) == ("hybrid", 3.0, 3 * GIB)


def test_no_control_groups_limit_nothing(tmp_path: Path) -> None:
    limits = read_limits(tmp_path / "absent", tmp_path / "absent")
    assert (limits.version, limits.cpus, limits.memory_bytes, limits.cpuset) == ("none", None, None, None)


def test_usable_cpus_are_within_mask_cpuset_and_quota(tmp_path: Path) -> None:
    sysfs, proc, facts = two_sockets(tmp_path)
    facts = msgspec.structs.replace(facts, affinity=tuple(range(56)) + tuple(range(112, 168)))  # the first socket
    limits = read_limits(
        *v2(tmp_path / "limits", "/", {"cpu.max": "650000 100000", "cpuset.cpus.effective": "0-7,112-119"})
    )
    cpu = read_cpu(sysfs, proc, facts, limits)
    assert cpu.online == "0-223"
    assert cpu.allowed == "0-7,112-119"
    assert cpu.physical_cores == 8  # two threads each
    assert cpu.sockets == 1
    assert cpu.quota == 6.5
    assert cpu.usable == 6
    assert (cpu.model, cpu.isa, cpu.max_hz) == ("Intel(R) Xeon(R) Platinum 8480+", "amx_bf16", 2e9)


def test_a_quota_below_one_cpu_leaves_one(tmp_path: Path) -> None:
    sysfs, proc, facts = small_machine(tmp_path)
    limits = read_limits(*v2(tmp_path / "limits", "/", {"cpu.max": "50000 100000"}))
    assert read_cpu(sysfs, proc, facts, limits).usable == 1


def test_a_host_without_sysfs_falls_back_to_what_psutil_says(tmp_path: Path) -> None:
    _, _, facts = small_machine(tmp_path, cpus=8)
    limits = read_limits(tmp_path / "absent", tmp_path / "absent")
    findings: list[Finding] = []
    cpu = read_cpu(tmp_path / "absent", tmp_path / "absent", msgspec.structs.replace(facts, physical_cores=4), limits)
    numa = read_numa(tmp_path / "absent", cpu, facts, findings)
    assert (cpu.online, cpu.usable, cpu.physical_cores, cpu.model) == ("0-7", 8, 4, "unknown")
    assert [(node.node, node.cpus, node.memory_bytes) for node in numa] == [(0, "0-7", 16 * GIB)]
    assert [finding.code for finding in findings] == ["numa_unknown"]


@pytest.mark.parametrize(("limit", "usable"), [(str(4 * GIB), 4 * GIB), (str(64 * GIB), 16 * GIB), ("max", 16 * GIB)])
def test_usable_memory_is_the_smaller_of_limit_and_host(tmp_path: Path, limit: str, usable: int) -> None:
    _, _, facts = small_machine(tmp_path)
    memory = read_memory(tmp_path / "absent", facts, read_limits(*v2(tmp_path / "limits", "/", {"memory.max": limit})))
    assert memory.usable_bytes == usable
    assert memory.total_bytes == 16 * GIB
    assert (memory.limit_bytes is None) == (usable == 16 * GIB)


def test_two_numa_nodes_are_read_with_their_distances(tmp_path: Path) -> None:
    sysfs, proc, facts = two_sockets(tmp_path)
    cpu = read_cpu(sysfs, proc, facts, read_limits(tmp_path / "absent", tmp_path / "absent"))
    findings: list[Finding] = []
    assert [msgspec.to_builtins(node) for node in read_numa(sysfs, cpu, facts, findings)] == [
        {"node": 0, "cpus": "0-55,112-167", "memory_bytes": 1024 * GIB, "distances": (10, 21)},
        {"node": 1, "cpus": "56-111,168-223", "memory_bytes": 1024 * GIB, "distances": (21, 10)},
    ]
    assert findings == []


def test_nics_without_speed_have_none_and_loopback_is_left_out(tmp_path: Path) -> None:
    sysfs = write(
        tmp_path,
        nic_files("eth1", speed="100000", numa="1", up="down")
        | nic_files("eth0", speed="-1", numa="-1")
        | loopback_files()
        | {"class/net/veth0/operstate": "up", "class/net/veth0/mtu": "1450"}
        | {"class/net/veth1/operstate": "down"},
    )
    assert read_nics(sysfs, []) == (
        Nic(name="eth0", up=True, virtual=False, mtu=9000, speed_mbps=None, numa_node=None),
        Nic(name="eth1", up=False, virtual=False, mtu=9000, speed_mbps=100000, numa_node=1),
        Nic(name="veth0", up=True, virtual=True, mtu=1450, speed_mbps=None, numa_node=None),
    )


def test_a_virtio_nic_has_the_node_of_the_pci_function_above_it(tmp_path: Path) -> None:
    sysfs = write(tmp_path, {"class/net/eth0/operstate": "up", "devices/pci0/0000:00:03.0/numa_node": "1"})
    (sysfs / "devices/pci0/0000:00:03.0/virtio2").mkdir()
    (sysfs / "class/net/eth0/device").symlink_to(sysfs / "devices/pci0/0000:00:03.0/virtio2")
    assert [nic.numa_node for nic in read_nics(sysfs, [])] == [1]


def test_hundreds_of_virtual_interfaces_are_cut_and_the_device_kept(tmp_path: Path) -> None:
    virtual = {f"class/net/cali{number}/operstate": "up" for number in range(300)}
    findings: list[Finding] = []
    nics = read_nics(write(tmp_path, virtual | nic_files("zeth")), findings)
    assert len(nics) == MAX_NICS
    assert nics[0].name == "zeth"
    assert [finding.code for finding in findings] == ["nics_omitted"]
