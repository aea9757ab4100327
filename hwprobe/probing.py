"""Probe one host: everything that the affinity map needs, in one call, without root, without a GPU, without raising.

Invariant: reads only; the roots it reads from are arguments, so that a synthetic tree gives the same answer on every
machine. It takes less than ``PROMISED_S`` whatever call of NVML hangs, the first one included: what has not answered by
then is a finding. Only where the kernel counts GPUs that may be asleep is their driver given ``WAKING_S``.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hwprobe.cgroup import read_limits
from hwprobe.cpulist import parse_cpulist
from hwprobe.disks import read_disks
from hwprobe.gpu import Gpu, NicPath
from hwprobe.hardware import Finding, Hardware, Nic, NumaNode, coalesce
from hwprobe.host import HostFacts, read_host
from hwprobe.kernel import read_kernel
from hwprobe.network import read_nics
from hwprobe.nvml import QUERY_TIMEOUT_S, read_gpus
from hwprobe.pcie import ORDER, distance
from hwprobe.processor import read_cpu, read_memory, read_numa
from hwprobe.symptoms import gpu_findings
from hwprobe.sysfs import entries, read_numa_node, read_text
from hwprobe.visible import visible

PROMISED_S = 1.0
WAKING_S = 10.0
"""For a driver that starts, and wakes up GPUs, for the first asker."""
REST_S = 0.1
"""Of what is promised, for what is done after NVML, and for looking at its threads."""
LEAST_NVML_S = 0.3
"""On a machine that is so busy that everything else took what is promised."""

NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers


def probe(
    sysfs: Path = Path("/sys"),
    *,
    cgroup: Path | None = None,
    proc: Path = Path("/proc"),
    environ: Mapping[str, str] | None = None,
    host: HostFacts | None = None,
    name: str | None = None,
    run: Path = Path("/run"),
    nvml_timeout_s: float | None = None,
    query_timeout_s: float = QUERY_TIMEOUT_S,
) -> Hardware:
    """What this process finds on its host.

    ``cgroup`` is where control groups are mounted (default ``sysfs/fs/cgroup``), ``environ`` is asked for
    CUDA_VISIBLE_DEVICES, ``host`` replaces what psutil says, ``name`` the host's name. NVML as a whole is waited for
    ``nvml_timeout_s`` at most (None: see the module docstring), one query of a driver that has started for
    ``query_timeout_s``. Everything else takes milliseconds.
    """
    begun = time.monotonic()
    findings: list[Finding] = []
    host = host if host is not None else read_host()
    cgroup = cgroup if cgroup is not None else sysfs / "fs" / "cgroup"
    limits = read_limits(cgroup, proc)
    cpu = read_cpu(sysfs, proc, host, limits)
    numa = read_numa(sysfs, cpu, host, findings)
    nics = read_nics(sysfs, findings)
    memory, disks, kernel = read_memory(sysfs, host, limits), read_disks(sysfs, proc), read_kernel(sysfs, proc, cgroup)
    if nvml_timeout_s is None:
        left_s = begun + PROMISED_S - REST_S - time.monotonic()
        nvml_timeout_s = WAKING_S if _may_sleep(proc, run) else max(left_s, LEAST_NVML_S)
    driver, gpus, told = read_gpus(nvml_timeout_s, query_timeout_s)
    findings += _explain_no_driver(sysfs, told)
    environ = os.environ if environ is None else environ
    gpus = _visible(gpus, environ.get("CUDA_VISIBLE_DEVICES"), findings)
    gpus = tuple(
        msgspec.structs.replace(
            gpu, numa_node=_numa_of(gpu, sysfs, numa), nic_paths=_nics_by_distance(gpu, nics, sysfs)
        )
        for gpu in gpus
    )
    findings += gpu_findings(gpus, numa)
    return Hardware(
        host=name or socket.gethostname(),
        cpu=cpu,
        memory=memory,
        numa=numa,
        nics=nics,
        gpus=gpus,
        disks=disks,
        driver=driver,
        cgroup=limits.version,
        kernel=kernel,
        findings=coalesce(findings),
    )


def _may_sleep(proc: Path, run: Path) -> bool:
    """Whether the kernel's driver counts GPUs, and no persistence daemon keeps them awake."""
    return bool(entries(proc / "driver" / "nvidia" / "gpus")) and not (run / "nvidia-persistenced" / "socket").exists()


def _explain_no_driver(sysfs: Path, findings: list[Finding]) -> list[Finding]:
    """No driver is worth a warning where NVIDIA GPUs sit on the PCI bus."""
    if not any(finding.code == "no_driver" for finding in findings):
        return findings
    cards = tuple(
        device.name
        for device in entries(sysfs / "bus" / "pci" / "devices")
        if read_text(device / "vendor") == NVIDIA_VENDOR
        and (read_text(device / "class") or "").startswith(DISPLAY_CLASSES)
    )
    if not cards:
        return findings
    detail = "NVIDIA GPUs are on the PCI bus, but there is no driver library (libnvidia-ml.so.1)"
    remedy = "install the NVIDIA driver; in a container, start it with the NVIDIA runtime (--gpus all)"
    return [
        Finding("no_driver", "warning", cards, detail, remedy) if finding.code == "no_driver" else finding
        for finding in findings
    ]


def _visible(gpus: tuple[Gpu, ...], wanted: str | None, findings: list[Finding]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA programs of this environment see, in NVML's order; the others are a finding. One that is split
    is seen as a whole, or by those of its slices that are named."""
    if wanted is None or not gpus:
        return gpus
    uuids: dict[int | str, str | None] = {gpu.index: gpu.uuid for gpu in gpus}
    for gpu in gpus:
        uuids |= {name: one.uuid for name, one in zip(gpu.devices, gpu.slices, strict=False)}
    seen = set(visible(wanted, uuids))
    kept = []
    for gpu in gpus:
        slices = tuple(one for name, one in zip(gpu.devices, gpu.slices, strict=False) if name in seen)
        if gpu.index in seen:
            kept.append(gpu)
        elif slices:
            kept.append(msgspec.structs.replace(gpu, slices=slices))
    indices = {gpu.index for gpu in kept}
    hidden = tuple(f"gpu{gpu.index}" for gpu in gpus if gpu.index not in indices)
    if hidden:
        findings.append(Finding("hidden", "info", hidden, f"excluded by CUDA_VISIBLE_DEVICES={wanted[:200]}"))
    return tuple(
        msgspec.structs.replace(
            gpu,
            nvlink_peers=tuple(peer for peer in gpu.nvlink_peers if peer in indices),
            paths=tuple(path for path in gpu.paths if path.peer in indices),
        )
        for gpu in kept
    )


def _nics_by_distance(gpu: Gpu, nics: tuple[Nic, ...], sysfs: Path) -> tuple[NicPath, ...]:
    """Nearest first, as far as the PCI tree tells."""
    bus_id = gpu.pci_bus_id
    if bus_id is None:
        return ()
    found = [
        NicPath(nic.name, level)
        for nic in nics
        if nic.pci_bus_id is not None and (level := distance(sysfs, bus_id, nic.pci_bus_id)) is not None
    ]
    return tuple(sorted(found, key=lambda path: ORDER.index(path.level)))


def _numa_of(gpu: Gpu, sysfs: Path, numa: tuple[NumaNode, ...]) -> int | None:
    """The PCI function's node; else the node whose CPUs hold those that NVML calls near; else the only node."""
    if gpu.pci_bus_id is not None:
        node = read_numa_node(sysfs / "bus" / "pci" / "devices" / gpu.pci_bus_id)
        if node is not None:
            return node
    if len(numa) == 1:
        return numa[0].node
    if gpu.cpus is None:
        return None
    near = set(parse_cpulist(gpu.cpus))
    holding = [node.node for node in numa if near & set(parse_cpulist(node.cpus))]
    return holding[0] if len(holding) == 1 else None
