"""One GPU's facts by NVML.

Invariant: every query is one question with its own finding, so one that a board or a driver does not know costs its own
field and nothing else; a GPU that is lost while it is asked is left out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hwprobe.cpulist import format_cpulist
from hwprobe.gpu import Clocks, Ecc, Gpu, GpuProcess, GpuSlice, PcieLink, Power, ThrottleReason
from hwprobe.nvml_session import Lost, Session

MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS
LINK_TO_SWITCH = 2  # nvmlIntNvLinkDeviceType_t
AFFINITY_WORDS = 64  # of 64 CPUs each
CLOCK_SM, CLOCK_MEMORY = 1, 2  # nvmlClockType_t
CORRECTED, UNCORRECTED, VOLATILE = 0, 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t
CORE_SENSOR = 0  # NVML_TEMPERATURE_GPU

# CUDA cores of one multiprocessor, by compute capability (CUDA C++ Programming Guide, "Compute Capabilities"). Later
# ones have as many as the newest here.
_CORES = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_USUAL_CORES = 128

# nvmlClocksThrottleReasons; the first bit is "idle", which is no throttling.
_REASONS: tuple[tuple[int, ThrottleReason], ...] = (
    (0x02, "applications_clocks"),
    (0x04, "power_cap"),
    (0x08, "hardware_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "thermal"),
    (0x40, "hardware_thermal"),
    (0x80, "power_brake"),
    (0x100, "display_clocks"),
)


class Found(msgspec.Struct):
    """A GPU, its handle, and for each active NVLink the PCI id at its end (None is a switch)."""

    gpu: Gpu
    handle: Any
    ends: list[str | None]


def read_gpu(session: Session, index: int) -> Found | None:
    """None where it cannot be had, with a finding that says why."""
    try:
        handle = session.ask("nvmlDeviceGetHandleByIndex", index)
        return None if handle is None else _read(session, index, handle)
    except Lost as lost:
        session.lost(lost)
        return None


def _read(session: Session, index: int, handle: Any) -> Found:
    ask = session.ask
    name = ask("nvmlDeviceGetName", handle)
    uuid = ask("nvmlDeviceGetUUID", handle)
    memory = ask("nvmlDeviceGetMemoryInfo", handle, then=lambda memory: int(memory.total))
    pci = ask("nvmlDeviceGetPciInfo", handle, then=lambda pci: sysfs_pci(pci.busId))
    cpus = ask("nvmlDeviceGetCpuAffinity", handle, AFFINITY_WORDS, then=list)
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle, then=tuple)
    cores = ask("nvmlDeviceGetNumGpuCores", handle)
    mig = ask("nvmlDeviceGetMigMode", handle, then=lambda modes: bool(modes[0]))
    ends = _link_ends(session, handle)
    gpu = Gpu(
        index=index,
        name=name or "unknown GPU",
        uuid=uuid,
        memory_bytes=memory,
        pci_bus_id=pci,
        cpus=format_cpulist(_bits(cpus)) if cpus and any(cpus) else None,
        sms=cores // _CORES.get(capability, _USUAL_CORES) if cores and capability else None,
        compute_capability=".".join(map(str, capability)) if capability else None,
        clocks=_clocks(session, handle),
        power=_power(session, handle),
        temperature_c=ask("nvmlDeviceGetTemperature", handle, CORE_SENSOR),
        throttled_by=ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle, then=reasons),
        ecc=_ecc(session, handle),
        pcie=PcieLink(
            generation=ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            width=ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            max_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            max_width=ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        ),
        nvlinks=len(ends),
        mig=mig,
        slices=_slices(session, handle) if mig else (),
        processes=ask("nvmlDeviceGetComputeRunningProcesses", handle, then=_processes),
    )
    return Found(gpu, handle, ends)


def reasons(mask: int) -> tuple[ThrottleReason, ...]:
    """What is behind the bits of ``nvmlDeviceGetCurrentClocksThrottleReasons``."""
    return tuple(reason for bit, reason in _REASONS if mask & bit)


def _clocks(session: Session, handle: Any) -> Clocks:
    def hertz(query: str, clock: int) -> float | None:
        mhz = session.ask(query, handle, clock)
        return None if mhz is None else mhz * 1e6

    return Clocks(
        sm_hz=hertz("nvmlDeviceGetClockInfo", CLOCK_SM),
        sm_max_hz=hertz("nvmlDeviceGetMaxClockInfo", CLOCK_SM),
        memory_hz=hertz("nvmlDeviceGetClockInfo", CLOCK_MEMORY),
        memory_max_hz=hertz("nvmlDeviceGetMaxClockInfo", CLOCK_MEMORY),
    )


def _power(session: Session, handle: Any) -> Power:
    def watts(query: str) -> float | None:
        milliwatts = session.ask(query, handle)
        return None if milliwatts is None else milliwatts / 1e3

    return Power(
        draw_w=watts("nvmlDeviceGetPowerUsage"),
        limit_w=watts("nvmlDeviceGetEnforcedPowerLimit"),
        default_w=watts("nvmlDeviceGetPowerManagementDefaultLimit"),
    )


def _ecc(session: Session, handle: Any) -> Ecc | None:
    """Counters are asked for only where it is on: without it a driver has none, which is no news."""
    enabled = session.ask("nvmlDeviceGetEccMode", handle, then=lambda modes: bool(modes[0]))
    if not enabled:
        return None if enabled is None else Ecc(enabled=False)
    remapped = session.ask("nvmlDeviceGetRemappedRows", handle)
    return Ecc(
        enabled=True,
        corrected=session.ask("nvmlDeviceGetTotalEccErrors", handle, CORRECTED, VOLATILE),
        uncorrected=session.ask("nvmlDeviceGetTotalEccErrors", handle, UNCORRECTED, VOLATILE),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
    )


def _slices(session: Session, handle: Any) -> tuple[GpuSlice, ...]:
    nvml = session.nvml
    empty = (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT)  # no slice in this place
    found = []
    for place in range(session.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        one = session.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place, plain=empty)
        if one is None:
            continue
        attributes = session.ask("nvmlDeviceGetAttributes", one)
        found.append(
            GpuSlice(
                index=place,
                name=session.ask("nvmlDeviceGetName", one) or "unknown MIG device",
                uuid=session.ask("nvmlDeviceGetUUID", one),
                memory_bytes=None if attributes is None else int(attributes.memorySizeMB) << 20,
                sms=None if attributes is None else int(attributes.multiprocessorCount),
            )
        )
    return tuple(found)


def _processes(running: list[Any]) -> tuple[GpuProcess, ...]:
    return tuple(GpuProcess(int(one.pid), one.usedGpuMemory) for one in running)


def _link_ends(session: Session, handle: Any) -> list[str | None]:
    """Where each active NVLink ends: a PCI id, or None for a switch. A device without NVLink has none."""
    nvml = session.nvml
    over = (nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_SUPPORTED)  # past the last link, or no NVLink at all
    ends: list[str | None] = []
    for link in range(MAX_LINKS):
        active = session.ask("nvmlDeviceGetNvLinkState", handle, link, plain=over)
        if active is None:
            break
        if active:
            ends.append(_link_end(session, handle, link))
    return ends


def _link_end(session: Session, handle: Any, link: int) -> str | None:
    kind = session.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
    if kind == LINK_TO_SWITCH:
        return None
    pci = session.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link, then=lambda pci: sysfs_pci(pci.busId))
    return pci or "unknown"


def sysfs_pci(bus_id: Any) -> str:
    """NVML writes 00000000:1A:00.0 (and may give bytes), sysfs 0000:1a:00.0. Raises ``ValueError``."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _bits(words: list[int]) -> list[int]:
    return [64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1]
