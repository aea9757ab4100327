"""The maps that hosts have published, joined to the map of all of them, as their pools are for whoever places on them.

Invariant: the result is what ``build_affinity_map`` would have made of all hosts at once, as far as the maps tell: each
host is in it once, kinds are relative to the whole pool, and counts, memory and cores of a profile hold for the whole.
A device that its own host had left out stays out.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from hwprobe.affinity import AffinityMap, pools
from hwprobe.binding import HostShare
from hwprobe.devices import Device, with_cpu_roles, with_kind, within_counts
from hwprobe.hardware import Finding, coalesce
from hwprobe.profile import GpuProfile, ResourceProfile
from hwprobe.roofline import GIB, TERA, kind, reference_ridge


def merge(maps: Iterable[AffinityMap], profile: ResourceProfile | None = None) -> AffinityMap:
    """Of hosts that appear in several maps the last one counts: it was probed last."""
    profile = profile if profile is not None else ResourceProfile()
    declared = {name.upper(): figures for name, figures in profile.gpus.items()}
    shares: dict[str, HostShare] = {}
    by_host: dict[str, list[Device]] = {}
    findings: list[Finding] = []
    for affinity in maps:
        for share in affinity.hosts:
            shares[share.host] = share
            by_host[share.host] = [device for device in affinity.devices if device.host == share.host]
        findings += affinity.findings
    every = [device for devices in by_host.values() for device in devices]
    gpus = [_overridden(device, declared) for device in every if device.id != "cpu"]
    gpus = within_counts(gpus, declared, findings)
    reference = reference_ridge(device.ridge for device in gpus if device.ridge is not None and device.roles)
    gpus = [with_kind(device, reference) for device in gpus]
    alone = not any(device.roles for device in gpus)
    cpus = [
        with_cpu_roles(
            _beside_gpus(device), kind(device.ridge, reference) if alone and device.ridge is not None else None
        )
        for device in every
        if device.id == "cpu"
    ]
    return AffinityMap(
        hosts=tuple(_shared(list(shares.values()), profile.cpu.cores)),
        devices=(*gpus, *cpus),
        pools=pools([*gpus, *cpus], declared, reference),
        reference_ridge=reference,
        findings=coalesce(findings),
    )


def _beside_gpus(device: Device) -> Device:
    """A host's CPUs as they are in a pool with GPUs: their own map may know none."""
    return msgspec.structs.replace(device, kind=None, roles=("environment", "reward") if device.roles else ())


def _overridden(device: Device, declared: dict[str, GpuProfile]) -> Device:
    figures = declared.get(device.hardware_class.upper(), GpuProfile())
    memory = device.memory_bytes
    if figures.mem_per_gpu is not None:
        memory = min(memory, int(figures.mem_per_gpu * GIB))
    flops, bandwidth = device.peak_bf16_flops, device.bandwidth
    if figures.bf16_tflops is not None:
        flops = figures.bf16_tflops * TERA
    if figures.bandwidth_tb_s is not None:
        bandwidth = figures.bandwidth_tb_s * TERA
    return msgspec.structs.replace(device, memory_bytes=memory, peak_bf16_flops=flops, bandwidth=bandwidth)


def _shared(shares: list[HostShare], wanted: int | None) -> list[HostShare]:
    """Cores that a profile declares for the pool, dealt out evenly as far as each host has them."""
    if wanted is None:
        return shares
    grants = [0] * len(shares)
    for _ in range(min(wanted, sum(share.cores for share in shares))):
        roomy = (place for place, share in enumerate(shares) if grants[place] < share.cores)
        grants[min(roomy, key=lambda place: grants[place])] += 1
    return [msgspec.structs.replace(share, cores=grant) for share, grant in zip(shares, grants, strict=True)]
