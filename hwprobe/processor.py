"""CPU, memory and NUMA nodes, from sysfs and /proc over what psutil says.

Invariant: a container sees its share. What this process may use is never more than affinity mask, cpuset, CPU quota
and memory limit allow, and never less than one CPU.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from hwprobe.cgroup import Limits
from hwprobe.cpulist import format_cpulist, parse_cpulist
from hwprobe.hardware import Cpu, Finding, Memory, NumaNode
from hwprobe.host import HostFacts
from hwprobe.memories import read_caches, read_huge_pages, read_transparent
from hwprobe.sysfs import entries, read_int, read_text

Isa = Literal["amx_bf16", "avx512", "avx2", "other"]


def read_cpu(sysfs: Path, proc: Path, host: HostFacts, limits: Limits) -> Cpu:
    """The processor and this process's share of it."""
    directory = sysfs / "devices" / "system" / "cpu"
    online = _cpus(directory / "online") or tuple(range(host.logical_cpus))
    allowed = _within(_within(online, host.affinity), limits.cpuset)
    places = [_place(directory / f"cpu{number}") for number in allowed]
    known = {place for place in places if place is not None}
    unknown = places.count(None)
    counted = len(known) + unknown if known else host.physical_cores
    model, isa = _model(proc / "cpuinfo")
    khz = read_int(directory / f"cpu{allowed[0]}" / "cpufreq" / "cpuinfo_max_freq")
    return Cpu(
        model=model,
        online=format_cpulist(online),
        allowed=format_cpulist(allowed),
        physical_cores=min(counted or len(allowed), len(allowed)),
        sockets=len({package for package, _ in known}) or 1,
        quota=limits.cpus,
        usable=len(allowed) if limits.cpus is None else max(1, min(len(allowed), int(limits.cpus))),
        max_hz=khz * 1e3 if khz else None,
        isa=isa,
        caches=read_caches(sysfs, allowed),
    )


def read_memory(sysfs: Path, host: HostFacts, limits: Limits) -> Memory:
    """Main memory; a limit at or above what the host has is no limit."""
    limit = limits.memory_bytes
    if limit is not None and limit >= host.memory_total:
        limit = None
    return Memory(
        total_bytes=host.memory_total,
        limit_bytes=limit,
        usable_bytes=host.memory_total if limit is None else limit,
        host_available_bytes=host.memory_available,
        huge_pages=read_huge_pages(sysfs),
        transparent_huge_pages=read_transparent(sysfs),
    )


def read_numa(sysfs: Path, cpu: Cpu, host: HostFacts, findings: list[Finding]) -> tuple[NumaNode, ...]:
    """NUMA nodes in rising order; one node that holds everything where the kernel tells of none."""
    nodes = []
    for directory in entries(sysfs / "devices" / "system" / "node"):
        match = re.fullmatch(r"node(\d+)", directory.name)
        if match is None:
            continue
        distances = (read_text(directory / "distance") or "").split()
        nodes.append(
            NumaNode(
                node=int(match[1]),
                cpus=format_cpulist(_cpus(directory / "cpulist")),
                memory_bytes=_node_memory(directory / "meminfo"),
                distances=tuple(int(distance) for distance in distances if distance.isdecimal()),
            )
        )
    if nodes:
        return tuple(sorted(nodes, key=lambda node: node.node))
    findings.append(
        Finding("numa_unknown", "info", ("cpu",), "the kernel shows no NUMA nodes; the host is treated as one node")
    )
    return (NumaNode(0, cpu.online, host.memory_total),)


def _cpus(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpulist(read_text(path) or "")
    except ValueError:
        return ()


def _within(cpus: tuple[int, ...], mask: tuple[int, ...] | None) -> tuple[int, ...]:
    """``cpus`` that are in ``mask``; a mask that would leave nothing is stale (CPUs went offline) and is ignored."""
    if mask is None:
        return cpus
    return tuple(sorted(set(cpus) & set(mask))) or cpus


def _place(cpu: Path) -> tuple[int, int] | None:
    """(package, core) of a CPU: threads of one core share it."""
    package = read_int(cpu / "topology" / "physical_package_id")
    core = read_int(cpu / "topology" / "core_id")
    return None if package is None or core is None else (package, core)


def _node_memory(path: Path) -> int | None:
    match = re.search(r"MemTotal:\s+(\d+) kB", read_text(path) or "")
    return int(match[1]) * 1024 if match else None


def _model(cpuinfo: Path) -> tuple[str, Isa]:
    """Model name and widest instructions, from the first processor's block (they are alike on one host)."""
    block = (read_text(cpuinfo) or "").split("\n\n", 1)[0]
    fields = {
        key.strip(): value.strip()
        for key, separator, value in (line.partition(":") for line in block.splitlines())
        if separator
    }
    flags = set(fields.get("flags", "").split())
    isa: Isa = "other"
    if "amx_bf16" in flags:
        isa = "amx_bf16"
    elif "avx512f" in flags:
        isa = "avx512"
    elif "avx2" in flags:
        isa = "avx2"
    return fields.get("model name", "unknown"), isa
