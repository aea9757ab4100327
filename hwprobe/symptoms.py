"""What is wrong with GPUs that answer: read from their facts, by rules that are each one function.

Invariant: a healthy GPU, idle or at work, has no finding here: a lower PCIe generation and a power cap are normal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hwprobe.gpu import Gpu, ThrottleReason
from hwprobe.hardware import Finding, NumaNode

_SLOWED: tuple[ThrottleReason, ...] = ("hardware_slowdown", "thermal", "hardware_thermal", "power_brake")


def gpu_findings(gpus: Sequence[Gpu], numa: Sequence[NumaNode]) -> list[Finding]:
    """Of the GPUs of one host, one by one."""
    most_links: dict[str, int] = {}
    for gpu in gpus:
        most_links[gpu.name] = max(most_links.get(gpu.name, 0), gpu.nvlinks)
    findings: list[Finding] = []
    for gpu in gpus:
        findings += [*_split(gpu), *slowed(gpu), *_memory_errors(gpu), *_narrow_link(gpu)]
        if gpu.nvlinks < most_links[gpu.name]:
            detail = f"{gpu.nvlinks} active NVLinks, {most_links[gpu.name]} on others of its kind"
            remedy = "nvidia-smi nvlink --status; look for Xid 74 in dmesg"
            findings.append(Finding("links_missing", "warning", (f"gpu{gpu.index}",), detail, remedy))
        if gpu.numa_node is None and len(numa) > 1:
            detail = "neither the PCI bus nor NVML says which NUMA node is near it"
            findings.append(Finding("numa_unknown", "info", (f"gpu{gpu.index}",), detail))
    return findings


def _split(gpu: Gpu) -> Iterator[Finding]:
    subjects = (f"gpu{gpu.index}",)
    if gpu.slices:
        detail = f"MIG is on: it is mapped as its {len(gpu.slices)} slices, not as a whole"
        yield Finding("mig_enabled", "info", subjects, detail, "nvidia-smi -mig 0 for the whole")
    elif gpu.mig:
        detail = "MIG is on and it has no slice: nothing can run on it"
        yield Finding("mig_enabled", "warning", subjects, detail, "nvidia-smi mig -cgi ... -C, or nvidia-smi -mig 0")


def slowed(gpu: Gpu) -> Iterator[Finding]:
    """Its clocks are held down by something that nobody has ordered."""
    reasons = [reason for reason in gpu.throttled_by or () if reason in _SLOWED]
    if not reasons:
        return
    clocks = gpu.clocks
    at = ""
    if clocks.sm_hz is not None:
        most = f" of {clocks.sm_max_hz / 1e6:.0f}" if clocks.sm_max_hz is not None else ""
        at = f", at {clocks.sm_hz / 1e6:.0f}{most} MHz"
    warm = f", {gpu.temperature_c} degrees Celsius" if gpu.temperature_c is not None else ""
    detail = f"its clocks are held down: {', '.join(reasons)}{at}{warm}"
    yield Finding("throttled", "warning", (f"gpu{gpu.index}",), detail, "see to cooling and power supply")


def _memory_errors(gpu: Gpu) -> Iterator[Finding]:
    ecc = gpu.ecc
    if ecc is None or not ecc.enabled:
        return
    wrong = []
    if ecc.uncorrected:
        wrong.append(f"{ecc.uncorrected} uncorrected errors")
    if ecc.remap_pending:
        wrong.append("a row waits for a reset to be replaced")
    if ecc.remap_failed:
        wrong.append("a row could not be replaced")
    if wrong:
        remedy = "replace the GPU" if ecc.remap_failed else "nvidia-smi --gpu-reset when nothing runs on it"
        yield Finding("memory_errors", "error", (f"gpu{gpu.index}",), f"memory: {', '.join(wrong)}", remedy)


def _narrow_link(gpu: Gpu) -> Iterator[Finding]:
    link = gpu.pcie
    if link.width is not None and link.max_width is not None and link.width < link.max_width:
        detail = f"PCIe link of {link.width} lanes, {link.max_width} are there"
        yield Finding("narrow_link", "warning", (f"gpu{gpu.index}",), detail, "reseat the card; check the riser")
