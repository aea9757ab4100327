"""Caches, huge pages, disks, interfaces' devices and the kernel's features, from synthetic trees."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from hwprobe import Cache, Disk, HugePages, Kernel
from hwprobe.disks import read_disks
from hwprobe.kernel import read_kernel
from hwprobe.memories import read_caches, read_huge_pages, read_transparent
from hwprobe.network import read_nics
from hwprobe.pcie import distance
from tests.hwprobe.conftest import ProbeWithFake
from tests.hwprobe.trees import cache_files, links, small_machine, write

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def test_caches_are_counted_once_however_many_cpus_share_them(tmp_path: Path) -> None:
    """Two sockets of two cores with two threads each: 0-1 and 4-5, 2-3 and 6-7."""
    files: dict[str, str] = {}
    for cpu in range(8):
        threads = f"{cpu % 4},{cpu % 4 + 4}"
        socket = "0-1,4-5" if cpu % 4 < 2 else "2-3,6-7"
        files |= cache_files(cpu, 1, "Data", "48K", threads)
        files |= cache_files(cpu, 1, "Instruction", "32K", threads)
        files |= cache_files(cpu, 2, "Unified", "2048K", threads)
        files |= cache_files(cpu, 3, "Unified", "105M", socket)
    sysfs = write(tmp_path, files)
    assert read_caches(sysfs, range(8)) == (
        Cache(level=1, kind="data", size_bytes=48 * KIB, shared_by=2, count=4),
        Cache(level=1, kind="instruction", size_bytes=32 * KIB, shared_by=2, count=4),
        Cache(level=2, kind="unified", size_bytes=2 * MIB, shared_by=2, count=4),
        Cache(level=3, kind="unified", size_bytes=105 * MIB, shared_by=4, count=2),
    )
    assert [cache.count for cache in read_caches(sysfs, [0, 4])] == [1, 1, 1, 1]  # a container with one core
    assert read_caches(tmp_path / "absent", [0]) == ()


def test_huge_pages_are_told_by_size(tmp_path: Path) -> None:
    base = "kernel/mm/hugepages"
    sysfs = write(
        tmp_path,
        {
            f"{base}/hugepages-1048576kB/nr_hugepages": "4",
            f"{base}/hugepages-1048576kB/free_hugepages": "1",
            f"{base}/hugepages-2048kB/nr_hugepages": "0",
            f"{base}/hugepages-2048kB/free_hugepages": "0",
            "kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        },
    )
    assert read_huge_pages(sysfs) == (
        HugePages(size_bytes=2 * MIB, total=0, free=0),
        HugePages(size_bytes=GIB, total=4, free=1),
    )
    assert read_transparent(sysfs) == "madvise"
    assert read_transparent(tmp_path / "absent") is None


MOUNTINFO = """\
22 1 259:2 / / rw,relatime - ext4 /dev/nvme0n1p2 rw
23 22 259:2 /srv/bound /mnt/bound rw - ext4 /dev/nvme0n1p2 rw
24 22 259:1 / /boot rw - vfat /dev/nvme0n1p1 rw
25 22 8:0 / /data rw - xfs /dev/sda rw
26 22 0:5 / /proc rw - proc proc rw"""


def test_disks_have_their_partitions_mounts_and_volumes_without_a_device_are_left_out(tmp_path: Path) -> None:
    sysfs = write(
        tmp_path / "sys",
        {
            "block/nvme0n1/size": "3750748848",
            "block/nvme0n1/dev": "259:0",
            "block/nvme0n1/queue/rotational": "0",
            "block/nvme0n1/device/model": "SAMSUNG MZQL21T9HCJR",
            "block/nvme0n1/device/numa_node": "1",
            "block/nvme0n1/nvme0n1p1/dev": "259:1",
            "block/nvme0n1/nvme0n1p2/dev": "259:2",
            "block/sda/size": "1000",
            "block/sda/dev": "8:0",
            "block/sda/queue/rotational": "1",
            "block/sda/device/type": "0",
            "block/loop0/size": "8",
            "block/sr0/size": "0",
            "block/sr0/device/type": "5",
        },
    )
    proc = write(tmp_path / "proc", {"self/mountinfo": MOUNTINFO})
    assert read_disks(sysfs, proc) == (
        Disk(
            name="nvme0n1",
            size_bytes=3750748848 * 512,
            rotational=False,
            model="SAMSUNG MZQL21T9HCJR",
            numa_node=1,
            mounts=("/", "/boot"),
        ),
        Disk(name="sda", size_bytes=512000, rotational=True, mounts=("/data",)),
    )


def test_an_interface_tells_its_driver_queues_and_rdma_devices(tmp_path: Path) -> None:
    function = "devices/pci0000:15/0000:15:01.0/0000:18:00.0"
    queues = {f"class/net/ib0/queues/{queue}/tx_timeout": "0" for queue in ("rx-0", "rx-1", "rx-2", "tx-0")}
    sysfs = write(
        tmp_path,
        {
            "class/net/ib0/operstate": "up",
            "class/net/ib0/speed": "400000",
            f"{function}/numa_node": "0",
            f"{function}/infiniband/mlx5_0/node_type": "1",
            "bus/pci/drivers/mlx5_core/bind": "",
        }
        | queues,
    )
    links(sysfs, {"class/net/ib0/device": function, f"{function}/driver": "bus/pci/drivers/mlx5_core"})
    (nic,) = read_nics(sysfs, [])
    assert (nic.driver, nic.pci_bus_id, nic.rdma) == ("mlx5_core", "0000:18:00.0", ("mlx5_0",))
    assert (nic.rx_queues, nic.tx_queues, nic.numa_node) == (3, 1, 0)


def status(capabilities: int) -> str:
    return f"Name:\tprobe\nCapEff:\t{capabilities:016x}\nSeccomp:\t0"


@pytest.mark.parametrize(
    ("capabilities", "unprivileged", "paranoid", "expected"),
    [
        (1 << 21, "2", "2", (True, True)),  # CAP_SYS_ADMIN
        (1 << 39, "2", "2", (True, False)),  # CAP_BPF
        (1 << 38, "2", "2", (False, True)),  # CAP_PERFMON
        (0, "2", "4", (False, False)),
        (0, "0", "-1", (True, True)),
    ],
)
def test_what_may_be_traced_follows_from_capabilities_and_settings(
    tmp_path: Path, capabilities: int, unprivileged: str, paranoid: str, expected: tuple[bool, bool]
) -> None:
    proc = write(
        tmp_path,
        {
            "self/status": status(capabilities),
            "sys/kernel/unprivileged_bpf_disabled": unprivileged,
            "sys/kernel/perf_event_paranoid": paranoid,
        },
    )
    kernel = read_kernel(tmp_path / "absent", proc, tmp_path / "absent")
    assert (kernel.bpf, kernel.perf) == expected


def test_the_kernels_features_are_looked_up_where_they_are(tmp_path: Path) -> None:
    sysfs = write(tmp_path / "sys", {"kernel/btf/vmlinux": "", "kernel/tracing/events/header_page": ""})
    proc = write(
        tmp_path / "proc",
        {
            "sys/kernel/osrelease": "6.8.0-45-generic",
            "sys/user/max_user_namespaces": "96365",
            "cgroups": "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpuset\t3\t1\t1\npids\t0\t9\t1\nmemory\t4\t9\t0",
            "self/ns/net": "",
            "self/ns/mnt": "",
            "self/ns/pid_for_children": "",
        },
    )
    cgroup = write(tmp_path / "cgroup", {"unified/cgroup.controllers": "cpu io"})
    assert read_kernel(sysfs, proc, cgroup) == Kernel(
        release="6.8.0-45-generic",
        controllers=("cpu", "io", "cpuset(v1)"),
        bpf=False,
        btf=True,
        tracefs=True,
        perf=False,
        namespaces=("mnt", "net"),
        user_namespaces=96365,
    )


@pytest.mark.parametrize(
    ("other", "level"),
    [
        ("0000:09:00.0", "PIX"),  # on the same switch
        ("0000:0a:00.0", "PXB"),  # on a switch below that one
        ("0000:0b:00.0", "PHB"),  # at another root port
        ("0000:80:00.0", "NODE"),  # at another host bridge of the same node
        ("0000:90:00.0", "SYS"),
        ("0000:ff:00.0", None),
    ],
)
def test_distances_on_the_pci_bus_are_named_as_nvidia_smi_does(tmp_path: Path, other: str, level: str | None) -> None:
    upstream = "devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    places = {
        "0000:08:00.0": f"{upstream}/0000:02:00.0/0000:08:00.0",
        "0000:09:00.0": f"{upstream}/0000:02:01.0/0000:09:00.0",
        "0000:0a:00.0": f"{upstream}/0000:02:02.0/0000:03:00.0/0000:04:00.0/0000:0a:00.0",
        "0000:0b:00.0": "devices/pci0000:00/0000:00:02.0/0000:0b:00.0",
        "0000:80:00.0": "devices/pci0000:80/0000:80:00.0",
        "0000:90:00.0": "devices/pci0000:90/0000:90:00.0",
    }
    nodes = {"0000:90:00.0": "1"}
    sysfs = write(tmp_path, {f"{place}/numa_node": nodes.get(name, "0") for name, place in places.items()})
    links(sysfs, {f"bus/pci/devices/{name}": place for name, place in places.items()})
    assert distance(sysfs, "0000:08:00.0", other) == level


def test_a_container_of_two_cores_gives_the_hardware_written_by_hand(
    probe_with_fake: ProbeWithFake, tmp_path: Path
) -> None:
    """A share of a host with eight CPUs: a cpuset of two, a quota of one and a half, 4 GiB; a NIC without speed."""
    sysfs, proc, facts = small_machine(tmp_path, cpus=8, gib=32)
    files: dict[str, str] = {}
    for cpu in range(8):
        files |= cache_files(cpu, 1, "Data", "32K", str(cpu))
        files |= cache_files(cpu, 3, "Unified", "16384K", "0-7")
    write(sysfs, files | {"block/vda/size": "2097152", "block/vda/dev": "254:0", "block/vda/device/vendor": "0x1af4"})
    write(
        sysfs / "fs/cgroup",
        {
            "cgroup.controllers": "cpuset cpu memory pids",
            "cpu.max": "150000 100000",
            "memory.max": str(4 * GIB),
            "cpuset.cpus.effective": "2-3",
        },
    )
    write(proc, {"self/cgroup": "0::/", "self/mountinfo": "1 0 254:0 / / rw - ext4 /dev/vda rw"})
    answer = probe_with_fake((sysfs, proc, facts), faults="-:nvmlInitWithFlags:12")
    expected = yaml.safe_load((Path(__file__).parent / "golden" / "container_hardware.yaml").read_text())
    assert msgspec.json.decode(msgspec.json.encode(answer.hardware)) == expected
