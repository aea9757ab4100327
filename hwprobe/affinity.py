"""Which device is good for what, and what lies near it: a pure function of what was found and what the user declares.

Invariant: the same hardware and profile give the same map; every device that was found is in it, and one without
roles has a finding that says why. A device's kind is relative to the GPUs of its pool, so a cluster's map is built from
all its hosts at once; ``AffinityMap.of_host`` cuts out what one host publishes.

========== =========================== ======================================
kind       ridge point                 roles, best first
========== =========================== ======================================
compute    at or above the pool's      train, prefill, decode
bandwidth  below it                    decode, prefill, train
CPU        beside GPUs                 environment, reward
CPU        in a pool without GPUs      environment, reward, decode, prefill, train
========== =========================== ======================================

No role is withheld from a GPU: a job must fall back to what there is rather than wait (RollArt, resource plane).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from hwprobe.binding import HostShare, bind_host
from hwprobe.cpulist import format_cpulist, parse_cpulist
from hwprobe.hardware import Finding, Gpu, Hardware, coalesce
from hwprobe.profile import GpuProfile, ResourceProfile
from hwprobe.roofline import (
    GIB,
    TERA,
    Kind,
    Roofline,
    estimate_cpu,
    hardware_class,
    kind,
    lookup,
    lookup_class,
    reference_ridge,
)

Role = Literal["train", "prefill", "decode", "environment", "reward"]
MAX_ENCODED_BYTES = 64 * 1024  # what the metadata store takes as one value

_GPU_ROLES: dict[Kind | None, tuple[Role, ...]] = {
    "compute": ("train", "prefill", "decode"),
    "bandwidth": ("decode", "prefill", "train"),
    None: ("decode", "prefill", "train"),  # figures unknown: nothing to prefer it for
}
_CPU_ROLES: tuple[Role, ...] = ("environment", "reward")
_CPU_ALONE_ROLES: tuple[Role, ...] = ("environment", "reward", "decode", "prefill", "train")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Something that computes: a GPU, or all CPUs of a host that this process may use."""

    host: str
    id: str  # gpu3, cpu; unique within its host
    name: str
    hardware_class: str  # H800, H20, ..., CPU
    kind: Kind | None  # None where the figures are unknown, and for CPUs beside GPUs
    roles: tuple[Role, ...]  # best first; none where the profile leaves it out
    peak_bf16_flops: float | None  # FLOP/s, dense
    bandwidth: float | None  # bytes/s
    memory_bytes: int  # what a job may use
    numa_node: int | None = None
    cpus: str  # CPUs near it that this process may use
    nics: tuple[str, ...] = ()  # near and up, fastest first
    peers: tuple[str, ...] = ()  # ids of GPUs on the same host that NVLink reaches
    uuid: str | None = None

    @property
    def ridge(self) -> float | None:
        """FLOP per byte at which compute and bandwidth limit alike."""
        if self.peak_bf16_flops is None or self.bandwidth is None:
            return None
        return self.peak_bf16_flops / self.bandwidth


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """All usable devices of one hardware class."""

    hardware_class: str
    kind: Kind | None
    devices: tuple[str, ...]  # host/id
    declared: int | None = None  # how many the profile says there are
    memory_bytes: int = 0  # of all of them
    peak_bf16_flops: float | None = None
    bandwidth: float | None = None


class AffinityMap(msgspec.Struct, frozen=True, kw_only=True):
    """See the module docstring."""

    hosts: tuple[HostShare, ...]
    devices: tuple[Device, ...]
    pools: tuple[Pool, ...]  # by class, in the order of the devices
    reference_ridge: float  # FLOP/byte: compute-optimised from here on
    findings: tuple[Finding, ...] = ()

    @property
    def gpus(self) -> tuple[Device, ...]:
        """GPUs that a job may use."""
        return tuple(device for device in self.devices if device.hardware_class != "CPU" and device.roles)

    @property
    def cores(self) -> int:
        """CPUs that can be kept busy, over all hosts."""
        return sum(host.cores for host in self.hosts)

    def of_host(self, host: str) -> AffinityMap:
        """One host's devices with kinds and pools as in the whole; small enough to publish (``encode``)."""
        return msgspec.structs.replace(
            self,
            hosts=tuple(share for share in self.hosts if share.host == host),
            devices=tuple(device for device in self.devices if device.host == host),
            pools=tuple(
                msgspec.structs.replace(
                    pool, devices=tuple(name for name in pool.devices if name.startswith(host + "/"))
                )
                for pool in self.pools
            ),
            findings=tuple(kept for finding in self.findings if (kept := _only(finding, host)) is not None),
        )


class MapTooLarge(ValueError):
    """A map that does not fit one value of the metadata store."""


def encode(affinity: AffinityMap) -> bytes:
    """JSON of at most 64 KiB (readable in any client of the store). Raises ``MapTooLarge``."""
    encoded = msgspec.json.encode(affinity)
    if len(encoded) > MAX_ENCODED_BYTES:
        raise MapTooLarge(
            f"affinity map of {len(affinity.hosts)} hosts: expected at most {MAX_ENCODED_BYTES} bytes, found"
            f" {len(encoded)}; publish AffinityMap.of_host(name) of each host instead"
        )
    return encoded


def decode(encoded: bytes) -> AffinityMap:
    """The inverse of ``encode``. Raises ``msgspec.DecodeError``."""
    return msgspec.json.decode(encoded, type=AffinityMap)


def build_affinity_map(hardware: Hardware | Sequence[Hardware], profile: ResourceProfile | None = None) -> AffinityMap:
    """The map of one host, or of all hosts of a pool. Figures of the profile override the built-in table."""
    hosts = [hardware] if isinstance(hardware, Hardware) else list(hardware)
    names = [host.host for host in hosts]
    if len(set(names)) < len(names):
        raise ValueError(f"expected hosts of different names in one pool, found {', '.join(sorted(names))}")
    profile = profile if profile is not None else ResourceProfile()
    declared = {name.upper(): figures for name, figures in profile.gpus.items()}
    findings: list[Finding] = []
    devices: list[Device] = []
    shares = _share_cores(hosts, profile, findings)
    for host, share in zip(hosts, shares, strict=True):
        local = list(host.findings)
        devices += [_gpu_device(gpu, share, declared, local) for gpu in host.gpus]
        findings += local if len(hosts) == 1 else [_located(finding, host.host) for finding in local]
    devices = within_counts(devices, declared, findings)
    reference = reference_ridge(device.ridge for device in devices if device.ridge is not None and device.roles)
    devices = [with_kind(device, reference) for device in devices]
    alone = not any(device.roles for device in devices)
    for host, share in zip(hosts, shares, strict=True):
        cpu = _cpu_device(host, share)
        devices.append(with_cpu_roles(cpu, kind(cpu.ridge, reference) if alone and cpu.ridge is not None else None))
    return AffinityMap(
        hosts=tuple(shares),
        devices=tuple(devices),
        pools=pools(devices, declared, reference),
        reference_ridge=reference,
        findings=coalesce(findings),
    )


def _located(finding: Finding, host: str) -> Finding:
    """In a map of several hosts each subject says where it is."""
    return msgspec.structs.replace(finding, subjects=tuple(f"{host}/{subject}" for subject in finding.subjects))


def _only(finding: Finding, host: str) -> Finding | None:
    """The finding as far as it concerns one host, or the whole pool."""
    kept = tuple(subject for subject in finding.subjects if "/" not in subject or subject.startswith(host + "/"))
    return msgspec.structs.replace(finding, subjects=kept) if kept or not finding.subjects else None


def _share_cores(hosts: list[Hardware], profile: ResourceProfile, findings: list[Finding]) -> list[HostShare]:
    """Bind each host; cores that the profile declares for the pool are dealt out evenly, as far as each host has."""
    wanted = profile.cpu.cores
    if wanted is None:
        return [bind_host(host, host.cpu.usable, profile.cpu.numa) for host in hosts]
    found = sum(host.cpu.usable for host in hosts)
    if wanted > found:
        detail = f"the profile declares {wanted} cores, {found} may be used here"
        findings.append(Finding("fewer_than_profile", "warning", ("CPU",), detail))
    grants = [0] * len(hosts)
    for _ in range(min(wanted, found)):
        roomy = (place for place, host in enumerate(hosts) if grants[place] < host.cpu.usable)
        grants[min(roomy, key=lambda place: grants[place])] += 1
    return [bind_host(host, grant, profile.cpu.numa, narrow=True) for host, grant in zip(hosts, grants, strict=True)]


def _gpu_device(gpu: Gpu, share: HostShare, declared: dict[str, GpuProfile], findings: list[Finding]) -> Device:
    subject = f"gpu{gpu.index}"
    name = hardware_class(gpu.name)
    figures = declared.get(name.upper(), GpuProfile())
    table = lookup(gpu.name)
    flops = table.peak_bf16_flops if table is not None else None
    bandwidth = table.bandwidth if table is not None else None
    if figures.bf16_tflops is not None:
        flops = figures.bf16_tflops * TERA
    if figures.bandwidth_tb_s is not None:
        bandwidth = figures.bandwidth_tb_s * TERA
    if flops is None or bandwidth is None:
        detail = f"{gpu.name}: no peak and bandwidth in the built-in table, nor in the profile"
        remedy = f"give bf16_tflops and bandwidth_tb_s under resource_profile.gpus.{name}"
        findings.append(Finding("unknown_device", "warning", (subject,), detail, remedy))
    return Device(
        host=share.host,
        id=subject,
        name=gpu.name,
        hardware_class=name,
        kind=None,
        roles=_GPU_ROLES[None],
        peak_bf16_flops=flops,
        bandwidth=bandwidth,
        memory_bytes=_gpu_memory(subject, gpu, figures, table, findings),
        numa_node=gpu.numa_node,
        cpus=_near_cpus(subject, gpu, share, findings),
        nics=share.nics_near(gpu.numa_node),
        peers=tuple(f"gpu{peer}" for peer in gpu.nvlink_peers),
        uuid=gpu.uuid,
    )


def _near_cpus(subject: str, gpu: Gpu, share: HostShare, findings: list[Finding]) -> str:
    """CPUs of the share that are near the GPU by NVML, else by NUMA node; all of them where there is only one node,
    where nothing is known, or (with a finding) where none of the near ones may be used."""
    if len(share.numa) == 1 or (gpu.cpus is None and gpu.numa_node is None):
        return share.cpus
    usable = set(parse_cpulist(share.cpus))
    by_node = next((binding.cpus for binding in share.numa if binding.node == gpu.numa_node), "")
    near = usable & set(parse_cpulist(gpu.cpus or "")) or set(parse_cpulist(by_node))
    if not near:
        detail = "none of the CPUs near it may be used by this process; its engine will run on far ones"
        findings.append(Finding("far_cores", "warning", (subject,), detail, "widen the cpuset or the affinity mask"))
    return format_cpulist(near or usable)


def _gpu_memory(subject: str, gpu: Gpu, figures: GpuProfile, table: Roofline | None, findings: list[Finding]) -> int:
    """What a job may use: what the profile says, but never more than there is."""
    nominal = table.memory_bytes if table is not None else 0
    found = gpu.memory_bytes if gpu.memory_bytes is not None else nominal
    if figures.mem_per_gpu is None:
        return found
    wanted = int(figures.mem_per_gpu * GIB)
    if found and wanted > max(found, nominal):  # 80 for an H800 is its nominal size, of which the driver shows 79.6
        detail = f"the profile declares {figures.mem_per_gpu:g} GiB a GPU, found {found / GIB:.1f}"
        findings.append(Finding("smaller_than_profile", "warning", (subject,), detail, "lower mem_per_gpu"))
    return min(found, wanted) if found else wanted


def within_counts(devices: list[Device], declared: dict[str, GpuProfile], findings: list[Finding]) -> list[Device]:
    """Take the roles from devices beyond the profile's count; say where there are fewer."""
    seen: dict[str, int] = {}
    result = []
    for device in devices:
        key = device.hardware_class.upper()
        seen[key] = seen.get(key, 0) + 1
        count = declared[key].count if key in declared else None
        if count is not None and seen[key] > count:
            detail = f"the profile lets a job use {count} {device.hardware_class}; this one is left out"
            findings.append(Finding("beyond_profile", "info", (f"{device.host}/{device.id}",), detail))
            result.append(msgspec.structs.replace(device, roles=()))
        else:
            result.append(device)
    for key, figures in declared.items():
        if figures.count is not None and seen.get(key, 0) < figures.count:
            detail = f"the profile declares {figures.count}, found {seen.get(key, 0)}"
            findings.append(Finding("fewer_than_profile", "warning", (key,), detail))
    return result


def with_kind(device: Device, reference: float) -> Device:
    if device.ridge is None:
        return device
    own = kind(device.ridge, reference)
    return msgspec.structs.replace(device, kind=own, roles=_GPU_ROLES[own] if device.roles else ())


def _cpu_device(host: Hardware, share: HostShare) -> Device:
    usable = msgspec.structs.replace(host.cpu, usable=share.cores)
    roofline = estimate_cpu(usable, share.memory_bytes)
    return Device(
        host=host.host,
        id="cpu",
        name=host.cpu.model,
        hardware_class="CPU",
        kind=None,
        roles=_CPU_ROLES if share.cores else (),
        peak_bf16_flops=roofline.peak_bf16_flops,
        bandwidth=roofline.bandwidth,
        memory_bytes=roofline.memory_bytes,
        numa_node=share.numa[0].node if len(share.numa) == 1 else None,
        cpus=share.cpus,
        nics=share.nics_near(None),
    )


def with_cpu_roles(device: Device, kind_alone: Kind | None) -> Device:
    """Beside GPUs the CPUs keep their two roles and no kind; alone they do everything."""
    if kind_alone is None:
        return device
    return msgspec.structs.replace(device, kind=kind_alone, roles=_CPU_ALONE_ROLES if device.roles else ())


def pools(devices: list[Device], declared: dict[str, GpuProfile], reference: float) -> tuple[Pool, ...]:
    """One pool a class; a class that is only declared has an empty one, so that a planner can name it."""
    by_class: dict[str, list[Device]] = {}
    for device in devices:
        members = by_class.setdefault(device.hardware_class, [])
        if device.roles:
            members.append(device)
    for key in declared:
        if key not in {name.upper() for name in by_class}:
            by_class[key] = []
    return tuple(
        _pool(name, members, declared.get(name.upper(), GpuProfile()), reference) for name, members in by_class.items()
    )


def _pool(name: str, members: list[Device], figures: GpuProfile, reference: float) -> Pool:
    flops = [device.peak_bf16_flops for device in members if device.peak_bf16_flops is not None]
    bandwidth = [device.bandwidth for device in members if device.bandwidth is not None]
    table = lookup_class(name)
    return Pool(
        hardware_class=name,
        kind=members[0].kind if members else (kind(table.ridge, reference) if table is not None else None),
        devices=tuple(f"{device.host}/{device.id}" for device in members),
        declared=figures.count,
        memory_bytes=sum(device.memory_bytes for device in members),
        peak_bf16_flops=sum(flops) if members and len(flops) == len(members) else None,
        bandwidth=sum(bandwidth) if members and len(bandwidth) == len(members) else None,
    )
