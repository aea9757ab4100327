"""GPUs: do all answer, is their memory sound, are their clocks up, and what the kernel's log says of them.

Invariant: what is judged is what the probe found (``hwprobe.probing``), so that the two never disagree. A host without
GPUs is healthy; one whose driver does not start is not.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hwprobe.doctor import kernel_log
from hwprobe.doctor.findings import Examined, Unable
from hwprobe.hardware import Finding as ProbeFinding
from hwprobe.probing import probe

NVML_S = 20.0

CAUSES: dict[str, str] = {
    "lost": "the GPU has fallen off the bus, or wants a reset",
    "timed_out": "a GPU or its driver hangs",
    "no_driver": "the driver is not installed, or not passed on to this container",
    "driver_mismatch": "the driver was updated under a running kernel",
    "driver_not_loaded": "the driver's kernel module is not loaded",
    "driver_failed": "the driver does not start",
    "denied": "this process may not ask the driver that",
    "failed": "the driver refused a query that it should answer",
    "throttled": "it is too hot, or its power is not what it needs",
    "memory_errors": "its memory is failing: what was computed with it may be wrong",
    "narrow_link": "the card does not sit well in its slot, or the riser is damaged",
    "links_missing": "NVLinks of it are down",
    "mig_enabled": "it is split into slices",
}
"""By the code of the probe's finding; others are not about GPUs, or are no illness."""

REMEDIES = {
    "lost": "nvidia-smi --gpu-reset while nothing runs on it, or a reboot; look for Xid in dmesg",
    "denied": "run it as root, or pass the device on to the container",
}
OTHERWISE = "look at dmesg for NVRM lines, and at nvidia-smi -q"


def look(log: Path = kernel_log.LOG, nvml_timeout_s: float = NVML_S) -> Examined:
    """Raises ``Unable`` where there is no GPU to look at."""
    hardware = probe(nvml_timeout_s=nvml_timeout_s)
    examined = Examined()
    for finding in hardware.findings:
        if finding.severity != "info" and finding.code in CAUSES:
            _found(finding, examined)
    if not hardware.gpus and not examined.findings:
        raise Unable("no GPU (NVML finds none)")
    _xids(log, examined)
    kinds = Counter(gpu.name for gpu in hardware.gpus)
    examined.note(", ".join(f"{count} x {name}" for name, count in kinds.items()) or "no GPU answers")
    return examined


def _found(finding: ProbeFinding, examined: Examined) -> None:
    say = examined.error if finding.severity == "error" else examined.warning
    remedy = finding.remedy or REMEDIES.get(finding.code, OTHERWISE)
    say(", ".join(finding.subjects), finding.detail, CAUSES[finding.code], remedy)


def _xids(log: Path, examined: Examined) -> None:
    try:
        xids = kernel_log.read_xids(log)
    except Unable as unable:
        examined.note(str(unable))
        return
    counts = Counter((xid.pci, xid.number) for xid in xids)
    last = {(xid.pci, xid.number): xid.text for xid in xids}
    for (pci, number), count in sorted(counts.items()):
        times = "once" if count == 1 else f"{count} times"
        if number in kernel_log.MEANINGS:
            examined.error(
                f"GPU at {pci}",
                f"Xid {number}, {times} since the host's start, last: {last[pci, number][:160]}",
                kernel_log.MEANINGS[number],
                f"nvidia-smi --gpu-reset -i {pci} while nothing runs on it, or a reboot; if it comes again, look at "
                "cable, riser and power, or have it replaced",
            )
        else:
            examined.note(f"GPU at {pci}: Xid {number}, {times}; a program's doing, as a rule")
