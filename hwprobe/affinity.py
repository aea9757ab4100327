"""Which device is good for what, and what lies near it: a pure function of what was found and what the user declares.

Invariant: the same hardware and profile give the same map; every device that was found is in it (``hwprobe.devices``),
and one without roles has a finding that says why. A device's kind is relative to the GPUs of its pool, so a cluster's
map is built from all its hosts at once; ``AffinityMap.of_host`` cuts out what one host publishes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hwprobe.binding import HostShare, bind_host
from hwprobe.devices import Device, cpu_device, gpu_devices, with_cpu_roles, with_kind, within_counts
from hwprobe.hardware import Finding, Hardware, coalesce
from hwprobe.profile import GpuProfile, ResourceProfile
from hwprobe.roofline import Kind, kind, lookup_class, reference_ridge

MAX_ENCODED_BYTES = 64 * 1024  # what the metadata store takes as one value

CONDITIONS = ("throttled", "memory_pressure", "memory_full", "lost", "timed_out")
"""Findings that come and go while the hardware is in use."""


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

    @property
    def peer_groups(self) -> tuple[tuple[str, ...], ...]:
        """host/id of GPUs that NVLink joins, directly or by way of others; those by themselves are in none."""
        groups: list[list[str]] = []
        placed: set[str] = set()
        by_name = {f"{device.host}/{device.id}": device for device in self.devices}
        for name, first in by_name.items():
            if name in placed or not first.peers:
                continue
            group = [name]
            placed.add(name)
            for member in group:  # grows meanwhile
                device = by_name[member]
                reached = [f"{device.host}/{peer}" for peer in device.peers]
                new = [other for other in reached if other in by_name and other not in placed]
                placed.update(new)
                group += new
            groups.append([other for other in by_name if other in group])
        return tuple(tuple(group) for group in groups if len(group) > 1)

    def under(self, present: Sequence[Finding], *, gpus_seen: bool = True) -> AffinityMap:
        """This map of one host while these conditions hold (``hwprobe.watching``): they are its findings in place of
        earlier ones of their kinds, and a GPU that is lost has no roles. ``gpus_seen``: whether the GPUs have been
        looked at for it; until then what was found of them before stands."""
        lost = {subject for finding in present if finding.code == "lost" for subject in finding.subjects}
        devices = [
            msgspec.structs.replace(device, roles=()) if device.id.partition(".")[0] in lost else device
            for device in self.devices
        ]
        usable = {f"{device.host}/{device.id}": device for device in devices if device.roles}
        return msgspec.structs.replace(
            self,
            devices=tuple(devices),
            pools=tuple(
                _with_members(pool, [usable[name] for name in pool.devices if name in usable]) for pool in self.pools
            ),
            findings=coalesce([*(one for one in self.findings if not self._gone(one, gpus_seen)), *present]),
        )

    def _gone(self, finding: Finding, gpus_seen: bool) -> bool:
        """Whether it would be among the conditions if it held still: of a GPU that did not answer at the start nobody
        looks again."""
        looked_at = {device.id.partition(".")[0] for device in self.devices} if gpus_seen else set()
        return finding.code in CONDITIONS and looked_at.union(("memory",)).issuperset(finding.subjects)

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
        for gpu in host.gpus:
            devices += gpu_devices(gpu, share, declared, local)
        findings += local if len(hosts) == 1 else [_located(finding, host.host) for finding in local]
    devices = within_counts(devices, declared, findings)
    reference = reference_ridge(device.ridge for device in devices if device.ridge is not None and device.roles)
    devices = [with_kind(device, reference) for device in devices]
    alone = not any(device.roles for device in devices)
    for host, share in zip(hosts, shares, strict=True):
        cpu = cpu_device(host, share)
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
    table = lookup_class(name)
    return _with_members(
        Pool(
            hardware_class=name,
            kind=members[0].kind if members else (kind(table.ridge, reference) if table is not None else None),
            devices=(),
            declared=figures.count,
        ),
        members,
    )


def _with_members(pool: Pool, members: list[Device]) -> Pool:
    flops = [device.peak_bf16_flops for device in members if device.peak_bf16_flops is not None]
    bandwidth = [device.bandwidth for device in members if device.bandwidth is not None]
    return msgspec.structs.replace(
        pool,
        devices=tuple(f"{device.host}/{device.id}" for device in members),
        memory_bytes=sum(device.memory_bytes for device in members),
        peak_bf16_flops=sum(flops) if members and len(flops) == len(members) else None,
        bandwidth=sum(bandwidth) if members and len(bandwidth) == len(members) else None,
    )
