"""Synthetic /sys, /proc and control group trees, and the psutil readings that go with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hwprobe.host import HostFacts

GIB = 1 << 30

CPUINFO = """\
processor	: 0
vendor_id	: GenuineIntel
model name	: {model}
flags		: fpu sse2 avx avx2 {flags}

processor	: 1
model name	: not read
"""


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Write files (path below root -> text), each with the newline that the kernel ends them with."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def cpu_files(places: Mapping[int, tuple[int, int]], khz: int | None = None) -> dict[str, str]:
    """``places`` is CPU -> (package, core)."""
    base = "devices/system/cpu"
    files = {f"{base}/online": ",".join(map(str, sorted(places)))}
    for cpu, (package, core) in places.items():
        files[f"{base}/cpu{cpu}/topology/physical_package_id"] = str(package)
        files[f"{base}/cpu{cpu}/topology/core_id"] = str(core)
        if khz is not None:
            files[f"{base}/cpu{cpu}/cpufreq/cpuinfo_max_freq"] = str(khz)
    return files


def node_files(node: int, cpus: str, gib: int, distance: str) -> dict[str, str]:
    base = f"devices/system/node/node{node}"
    return {
        f"{base}/cpulist": cpus,
        f"{base}/meminfo": f"Node {node} MemTotal:       {gib * 1024 * 1024} kB\nNode {node} MemFree:        1 kB",
        f"{base}/distance": distance,
    }


def nic_files(name: str, *, speed: str = "25000", numa: str | None = "0", up: str = "up") -> dict[str, str]:
    """A physical interface; ``numa`` None is a device whose bus says nothing about NUMA."""
    base = f"class/net/{name}"
    files = {
        f"{base}/type": "1",
        f"{base}/operstate": up,
        f"{base}/mtu": "9000",
        f"{base}/speed": speed,
        f"{base}/device/vendor": "0x15b3",
    }
    if numa is not None:
        files[f"{base}/device/numa_node"] = numa
    return files


def loopback_files() -> dict[str, str]:
    return {"class/net/lo/type": "772", "class/net/lo/operstate": "unknown", "class/net/lo/mtu": "65536"}


def two_sockets(root: Path) -> tuple[Path, Path, HostFacts]:
    """A GPU server: 2 sockets of 56 cores with 2 threads each, 1 TiB a node, 8 GPUs, one 400G NIC a node and a 25G one.

    Returns sysfs, proc and what psutil says.
    """
    places = {cpu: (cpu % 112 // 56, cpu % 56) for cpu in range(224)}
    gpus = {f"bus/pci/devices/0000:{8 * (i + 1):02x}:00.0/numa_node": str(i // 4) for i in range(8)}
    sysfs = write(
        root / "sys",
        cpu_files(places, khz=2_000_000)
        | node_files(0, "0-55,112-167", 1024, "10 21")
        | node_files(1, "56-111,168-223", 1024, "21 10")
        | nic_files("eth0", speed="25000", numa="0")
        | nic_files("ib0", speed="400000", numa="0")
        | nic_files("ib1", speed="400000", numa="1")
        | loopback_files()
        | gpus,
    )
    proc = write(
        root / "proc", {"cpuinfo": CPUINFO.format(model="Intel(R) Xeon(R) Platinum 8480+", flags="avx512f amx_bf16")}
    )
    facts = HostFacts(
        logical_cpus=224,
        physical_cores=112,
        memory_total=2048 * GIB,
        memory_available=2000 * GIB,
        affinity=tuple(range(224)),
    )
    return sysfs, proc, facts


def small_machine(root: Path, *, cpus: int = 2, gib: int = 16) -> tuple[Path, Path, HostFacts]:
    """One NUMA node, no hyperthreads, no GPU, one virtual-machine NIC without speed."""
    sysfs = write(
        root / "sys",
        cpu_files({cpu: (0, cpu) for cpu in range(cpus)})
        | node_files(0, f"0-{cpus - 1}", gib, "10")
        | nic_files("eth0", speed="-1", numa=None)
        | loopback_files(),
    )
    proc = write(root / "proc", {"cpuinfo": CPUINFO.format(model="AMD EPYC 7B13", flags="")})
    facts = HostFacts(
        logical_cpus=cpus,
        physical_cores=cpus,
        memory_total=gib * GIB,
        memory_available=gib * GIB // 2,
        affinity=tuple(range(cpus)),
    )
    return sysfs, proc, facts


def links(root: Path, targets: Mapping[str, str]) -> Path:
    """Symbolic links (path below root -> what it leads to, below root too), as sysfs is full of."""
    for name, target in targets.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(root / target)
    return root


def cache_files(cpu: int, level: int, kind: str, size: str, shared: str) -> dict[str, str]:
    base = f"devices/system/cpu/cpu{cpu}/cache/index{level}{kind}"
    return {
        f"{base}/level": str(level),
        f"{base}/type": kind,
        f"{base}/size": size,
        f"{base}/shared_cpu_list": shared,
    }
