"""Devices of the affinity map: what one GPU, one slice of it, or a host's CPUs are to a job.

Invariant: a figure of the profile goes before the built-in table, and that before a measurement; a device whose figures
nobody knows has none and a finding, and is used all the same. A GPU that is split by MIG is its slices: each has the
whole's compute by its share of the multiprocessors, and the whole's bandwidth by its share of the memory.

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

from typing import Literal

import msgspec

from hwprobe.binding import HostShare
from hwprobe.cpulist import format_cpulist, parse_cpulist
from hwprobe.gpu import Gpu, GpuSlice
from hwprobe.hardware import Finding, Hardware
from hwprobe.pcie import ORDER
from hwprobe.profile import GpuProfile
from hwprobe.roofline import GIB, TERA, Kind, Roofline, estimate_cpu, hardware_class, kind, lookup

Role = Literal["train", "prefill", "decode", "environment", "reward"]
TaskKind = Literal["prefill-heavy", "decode-heavy"]

_GPU_ROLES: dict[Kind | None, tuple[Role, ...]] = {
    "compute": ("train", "prefill", "decode"),
    "bandwidth": ("decode", "prefill", "train"),
    None: ("decode", "prefill", "train"),  # figures unknown: nothing to prefer it for
}
_CPU_ROLES: tuple[Role, ...] = ("environment", "reward")
_CPU_ALONE_ROLES: tuple[Role, ...] = ("environment", "reward", "decode", "prefill", "train")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Something that computes: a GPU, a slice of one, or all CPUs of a host that this process may use."""

    host: str
    id: str  # gpu3, gpu3.0 (a slice), cpu; unique within its host
    name: str
    hardware_class: str  # H800, H20, H100-3g.40gb, ..., CPU
    kind: Kind | None  # None where the figures are unknown, and for CPUs beside GPUs
    roles: tuple[Role, ...]  # best first; none where the profile leaves it out, or where nothing can run on it
    peak_bf16_flops: float | None  # FLOP/s, dense
    bandwidth: float | None  # bytes/s
    memory_bytes: int  # what a job may use
    numa_node: int | None = None
    cpus: str  # CPUs near it that this process may use
    nics: tuple[str, ...] = ()  # up: by their way on the PCI bus where it is known, then fastest first
    peers: tuple[str, ...] = ()  # ids of GPUs on the same host that NVLink reaches
    uuid: str | None = None

    @property
    def ridge(self) -> float | None:
        """FLOP per byte at which compute and bandwidth limit alike."""
        if self.peak_bf16_flops is None or self.bandwidth is None:
            return None
        return self.peak_bf16_flops / self.bandwidth

    @property
    def best_tasks(self) -> TaskKind | None:
        """Which tasks' turns it suits best; None where nothing is generated on it, or its figures are unknown."""
        if self.kind is None or "decode" not in self.roles:
            return None
        return "prefill-heavy" if self.kind == "compute" else "decode-heavy"

    @property
    def cuda_name(self) -> str:
        """What CUDA_VISIBLE_DEVICES calls it: the index of a GPU, the UUID of a slice. Empty for CPUs."""
        if self.id == "cpu":
            return ""
        number = self.id.removeprefix("gpu")
        return number if number.isdecimal() else self.uuid or ""


def gpu_devices(gpu: Gpu, share: HostShare, declared: dict[str, GpuProfile], findings: list[Finding]) -> list[Device]:
    """One device, or one a slice. ``declared``: the profile's, by class in capitals."""
    whole = _whole(gpu, share, declared, findings)
    if gpu.slices:
        return [_slice(whole, name, gpu, one, declared) for name, one in zip(gpu.devices, gpu.slices, strict=True)]
    return [msgspec.structs.replace(whole, roles=()) if gpu.mig else whole]


def _whole(gpu: Gpu, share: HostShare, declared: dict[str, GpuProfile], findings: list[Finding]) -> Device:
    subject = f"gpu{gpu.index}"
    name = hardware_class(gpu.name)
    figures = declared.get(name.upper(), GpuProfile())
    table = lookup(gpu.name)
    flops, bandwidth = _figures(gpu, table, figures)
    if flops is None or bandwidth is None:
        detail = f"{gpu.name}: no peak and bandwidth in the built-in table, nor in the profile"
        remedy = f"bin/probe --measure, or bf16_tflops and bandwidth_tb_s under resource_profile.gpus.{name}"
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
        nics=_near_nics(gpu, share),
        peers=tuple(f"gpu{peer}" for peer in gpu.nvlink_peers),
        uuid=gpu.uuid,
    )


def _figures(gpu: Gpu, table: Roofline | None, figures: GpuProfile) -> tuple[float | None, float | None]:
    flops = table.peak_bf16_flops if table is not None else None
    bandwidth = table.bandwidth if table is not None else None
    if gpu.measured is not None:
        flops = gpu.measured.flops if flops is None else flops
        bandwidth = gpu.measured.bandwidth if bandwidth is None else bandwidth
    if figures.bf16_tflops is not None:
        flops = figures.bf16_tflops * TERA
    if figures.bandwidth_tb_s is not None:
        bandwidth = figures.bandwidth_tb_s * TERA
    return flops, bandwidth


def _slice(whole: Device, name: str, gpu: Gpu, one: GpuSlice, declared: dict[str, GpuProfile]) -> Device:
    of_memory = one.memory_bytes / gpu.memory_bytes if one.memory_bytes and gpu.memory_bytes else None
    of_compute = one.sms / gpu.sms if one.sms and gpu.sms else of_memory
    own_class = f"{whole.hardware_class}-{one.profile}"
    figures = declared.get(own_class.upper(), GpuProfile())
    memory = one.memory_bytes or 0
    if figures.mem_per_gpu is not None:
        wanted = int(figures.mem_per_gpu * GIB)
        memory = min(memory, wanted) if memory else wanted
    flops = _scaled(whole.peak_bf16_flops, of_compute)
    bandwidth = _scaled(whole.bandwidth, of_memory)
    return msgspec.structs.replace(
        whole,
        id=name,
        name=one.name,
        hardware_class=own_class,
        peak_bf16_flops=figures.bf16_tflops * TERA if figures.bf16_tflops is not None else flops,
        bandwidth=figures.bandwidth_tb_s * TERA if figures.bandwidth_tb_s is not None else bandwidth,
        memory_bytes=memory,
        peers=(),  # slices cannot reach each other, nor other GPUs (MIG user guide, "Application considerations")
        uuid=one.uuid,
    )


def _scaled(figure: float | None, share: float | None) -> float | None:
    return None if figure is None or share is None else figure * share


def _near_nics(gpu: Gpu, share: HostShare) -> tuple[str, ...]:
    """Of its NUMA node, those with the shortest way on the PCI bus first."""
    ways = {path.nic: ORDER.index(path.level) for path in gpu.nic_paths}
    return tuple(sorted(share.nics_near(gpu.numa_node), key=lambda nic: ways.get(nic, len(ORDER))))


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


def cpu_device(host: Hardware, share: HostShare) -> Device:
    usable = msgspec.structs.replace(host.cpu, usable=share.cores)
    roofline = estimate_cpu(usable, share.memory_bytes)
    flops, bandwidth = roofline.peak_bf16_flops, roofline.bandwidth
    if host.cpu.measured is not None:  # with all that this process may use, of which a profile may leave it a part
        part = share.cores / host.cpu.usable
        flops, bandwidth = host.cpu.measured.flops * part, host.cpu.measured.bandwidth * part
    return Device(
        host=host.host,
        id="cpu",
        name=host.cpu.model,
        hardware_class="CPU",
        kind=None,
        roles=_CPU_ROLES if share.cores else (),
        peak_bf16_flops=flops,
        bandwidth=bandwidth,
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
