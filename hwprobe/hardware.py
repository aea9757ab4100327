"""What was found on one host, as plain facts: no judgement, no preference, nothing that a reader must probe again.

Invariant: a part that is missing or would not answer is ``None`` (or absent) *and* has a ``Finding`` that says why;
probing never raises for what the hardware does. Sizes are bytes, CPU sets are kernel lists (``0-3,8``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from hwprobe.gpu import Gpu, Rates

CgroupVersion = Literal["v1", "v2", "hybrid", "none"]
Severity = Literal["info", "warning", "error"]
FindingCode = Literal[
    "no_bindings",  # the Python bindings of NVML are not installed
    "no_driver",  # no NVML library on this machine
    "driver_not_loaded",  # the library is here, the kernel module is not
    "driver_mismatch",  # library and kernel module are of different versions
    "driver_failed",  # NVML would not start, for another reason
    "timed_out",  # NVML did not answer within the time limit
    "lost",  # a GPU fell off the bus or wants a reset
    "unsupported",  # this GPU or driver has no answer to a query
    "denied",  # a query needs rights that this process has not
    "failed",  # a query failed for another reason
    "hidden",  # present, but excluded by CUDA_VISIBLE_DEVICES
    "mig_enabled",  # split into slices: figures of the whole device do not hold for one slice
    "throttled",  # its clocks are held down by heat or by the power supply
    "memory_errors",  # errors that ECC could not correct, or rows that wait to be replaced
    "narrow_link",  # a PCIe link of fewer lanes than there are
    "links_missing",  # fewer NVLinks than others of its kind
    "slower_than_claimed",  # measured far below its figures
    "not_measured",  # a measurement that was asked for could not be made
    "memory_pressure",  # processes wait for memory
    "memory_full",  # the control group is near its limit
    "numa_unknown",  # no NUMA information
    "unreadable",  # a file that should be readable was not
    "nics_omitted",  # more interfaces than are reported
    "unknown_device",  # not in the roofline table and not in the profile
    "far_cores",  # none of the CPUs near a device may be used by this process
    "fewer_than_profile",  # the profile declares more than was found
    "beyond_profile",  # more was found than the profile lets a job use
    "smaller_than_profile",  # the profile declares more memory than a device has
    "findings_omitted",  # more findings than are reported
]


class Finding(msgspec.Struct, frozen=True):
    """Something worth telling about the hardware; the same finding on several parts is one with several subjects."""

    code: FindingCode
    severity: Severity
    subjects: tuple[str, ...]  # what it is about: gpu3, eth0, nvml, H800, ...
    detail: str  # what was expected and found
    remedy: str = ""  # what to do, where there is something to do


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """The processor, and this process's share of it."""

    model: str
    online: str  # the host's CPUs
    allowed: str  # those that affinity mask and cpuset leave to this process
    physical_cores: int  # distinct cores among the allowed CPUs
    sockets: int  # distinct packages among the allowed CPUs
    quota: float | None = None  # CPU time per time that the cgroup grants, in CPUs; None is no limit
    usable: int  # CPUs that this process can keep busy: allowed and within the quota, at least 1
    max_hz: float | None = None
    isa: Literal["amx_bf16", "avx512", "avx2", "other"] = "other"  # widest instructions that matter for matrices
    caches: tuple[Cache, ...] = ()  # of the allowed CPUs
    measured: Rates | None = None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Main memory, and this process's share of it."""

    total_bytes: int  # the host's
    limit_bytes: int | None = None  # the cgroup's; None is no limit below the total
    usable_bytes: int  # the smaller of the two
    host_available_bytes: int  # not in use on the host when it was probed
    huge_pages: tuple[HugePages, ...] = ()
    transparent_huge_pages: str | None = None  # always, madvise, never


class NumaNode(msgspec.Struct, frozen=True):
    node: int
    cpus: str  # the host's, before what this process may use
    memory_bytes: int | None
    distances: tuple[int, ...] = ()  # to each node in rising order, 10 is local


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface other than loopback."""

    name: str
    up: bool
    virtual: bool  # no device behind it: bridge, veth, bond, tunnel
    mtu: int | None = None
    speed_mbps: int | None = None
    numa_node: int | None = None
    driver: str | None = None
    pci_bus_id: str | None = None  # of its device, or of what is above that
    rdma: tuple[str, ...] = ()  # devices for remote direct memory access: mlx5_0
    rx_queues: int = 0
    tx_queues: int = 0


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """All caches of one level, kind and size."""

    level: int
    kind: str  # data, instruction, unified
    size_bytes: int  # of one
    shared_by: int  # CPUs that share one
    count: int


class HugePages(msgspec.Struct, frozen=True, kw_only=True):
    """Of one size, as reserved on the host."""

    size_bytes: int
    total: int
    free: int


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """A disk with a device behind it."""

    name: str
    size_bytes: int
    rotational: bool | None = None  # as the kernel takes it: virtual ones are often called so
    model: str | None = None
    numa_node: int | None = None
    mounts: tuple[str, ...] = ()


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel lets this process do."""

    release: str | None = None
    controllers: tuple[str, ...] = ()  # of control groups: cpu, memory, or memory(v1) where a v1 hierarchy has it
    bpf: bool = False  # programs may be loaded
    btf: bool = False  # the kernel describes its types, which portable programs need
    tracefs: bool = False  # mounted
    perf: bool = False  # the whole host's performance counters may be read
    namespaces: tuple[str, ...] = ()
    user_namespaces: int | None = None  # that may be made


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """One host, as seen from this process."""

    host: str
    cpu: Cpu
    memory: Memory
    numa: tuple[NumaNode, ...]  # never empty
    nics: tuple[Nic, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    disks: tuple[Disk, ...] = ()
    driver: str | None = None  # version of the NVIDIA driver
    cgroup: CgroupVersion = "none"
    kernel: Kernel = Kernel()
    findings: tuple[Finding, ...] = ()


def coalesce(findings: Iterable[Finding], limit: int = 64) -> tuple[Finding, ...]:
    """Merge findings that differ only in their subjects, and keep at most ``limit`` (the last says how many went)."""
    merged: dict[tuple[FindingCode, Severity, str, str], list[str]] = {}
    for finding in findings:
        subjects = merged.setdefault((finding.code, finding.severity, finding.detail, finding.remedy), [])
        subjects.extend(subject for subject in finding.subjects if subject not in subjects)
    result = [
        Finding(code, severity, tuple(subjects), detail, remedy)
        for (code, severity, detail, remedy), subjects in merged.items()
    ]
    if len(result) > limit:
        rest = len(result) - limit + 1
        result[limit - 1 :] = [Finding("findings_omitted", "warning", (), f"{rest} more findings were left out")]
    return tuple(result)
