"""GPUs through NVML (the module ``pynvml`` of nvidia-ml-py), the only module that imports it.

Invariant: ``read_gpus`` returns within its time limit and never raises for what driver or device do: a GPU that does
not answer is left out with a finding, a query without an answer leaves its field ``None`` with a finding. NVML calls
cannot be interrupted, so they run in one daemon thread; when the limit passes, what was read until then is returned
and the finding names the call that hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from hwprobe.cpulist import format_cpulist
from hwprobe.hardware import Finding, FindingCode, Gpu, Severity

T = TypeVar("T")

MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS
LINK_TO_GPU, LINK_TO_SWITCH = 0, 2  # nvmlIntNvLinkDeviceType_t
AFFINITY_WORDS = 64  # of 64 CPUs each


class Reading(msgspec.Struct):
    """What NVML has said so far; written by the reading thread only."""

    driver: str | None = None
    gpus: list[Gpu] = []
    links: dict[int, list[str | None]] = {}  # GPU -> for each active link the PCI id at its end, None is a switch
    findings: list[Finding] = []
    call: str = "import pynvml"  # in progress


class _Lost(Exception):
    """The GPU stopped answering; the rest of its queries would fail too."""


def read_gpus(timeout_s: float) -> tuple[str | None, tuple[Gpu, ...], list[Finding]]:
    """Driver version, the GPUs that answer in NVML's order, and what was wrong. Waits at most ``timeout_s`` seconds."""
    reading = Reading()
    thread = threading.Thread(target=_read, args=(reading,), name="hwprobe-nvml", daemon=True)
    thread.start()
    thread.join(timeout_s)
    gpus, findings = list(reading.gpus), list(reading.findings)
    if thread.is_alive():
        detail = f"NVML did not return from {reading.call} within {timeout_s:g} s; GPUs not read until then are missing"
        findings.append(
            Finding("timed_out", "error", ("nvml",), detail, "look for Xid errors in dmesg; reset the GPU or reboot")
        )
    return reading.driver, tuple(_with_peers(gpus, dict(reading.links))), findings


def _read(reading: Reading) -> None:
    try:
        import pynvml  # noqa: PLC0415
    except ImportError:
        detail, remedy = "the Python bindings of NVML are not installed", "pip install nvidia-ml-py"
        reading.findings.append(Finding("no_bindings", "info", ("nvml",), detail, remedy))
        return
    reading.call = "nvmlInit"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        reading.findings.append(_start_finding(pynvml, error))
        return
    session = _Session(pynvml, reading)
    try:
        session.read_all()
    finally:
        session.ask("nvml", "nvmlShutdown", pynvml.nvmlShutdown)


def _start_finding(nvml: Any, error: Any) -> Finding:
    """Why NVML would not start."""
    subjects = ("nvml",)
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return Finding("no_driver", "info", subjects, "no NVIDIA driver library (libnvidia-ml.so.1) on this machine")
    if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        detail = "the NVIDIA driver library is installed, its kernel module is not loaded"
        return Finding("driver_not_loaded", "warning", subjects, detail, "modprobe nvidia, or reinstall the driver")
    if error.value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        detail = "the NVIDIA driver library and the loaded kernel module are of different versions"
        return Finding("driver_mismatch", "error", subjects, detail, "reboot, or reload the nvidia kernel modules")
    return Finding("driver_failed", "error", subjects, f"nvmlInit failed: {error}", "see what nvidia-smi says")


class _Session:
    """An NVML that has started."""

    def __init__(self, nvml: Any, reading: Reading) -> None:
        self._nvml = nvml
        self._reading = reading

    def read_all(self) -> None:
        nvml = self._nvml
        self._reading.driver = self.ask("nvml", "nvmlSystemGetDriverVersion", nvml.nvmlSystemGetDriverVersion)
        count = self.ask("nvml", "nvmlDeviceGetCount", nvml.nvmlDeviceGetCount) or 0
        for index in range(count):
            try:
                found = self._read_gpu(index)
            except _Lost as lost:
                remedy = "look for Xid errors in dmesg; nvidia-smi --gpu-reset, or reboot"
                self._reading.findings.append(Finding("lost", "error", (f"gpu{index}",), str(lost), remedy))
                continue
            if found is not None:
                gpu, self._reading.links[index] = found
                self._reading.gpus.append(gpu)

    def ask(self, subject: str, query: str, call: Callable[[], T]) -> T | None:
        """The answer, or None and a finding. Raises ``_Lost`` where the device is gone."""
        self._reading.call = query
        try:
            return call()
        except self._nvml.NVMLError as error:
            self._record(subject, query, error)
        except ValueError as error:  # text that is not UTF-8, a PCI id that is not one
            self._reading.findings.append(Finding("failed", "warning", (subject,), f"bad answer to {query}: {error}"))
        return None

    def _record(self, subject: str, query: str, error: Any) -> None:
        nvml = self._nvml
        if subject != "nvml" and error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
            raise _Lost(f"NVML says: {error}") from None
        code, severity = self._kind(error.value)
        self._reading.findings.append(Finding(code, severity, (subject,), f"no answer to {query}: {error}"))

    def _kind(self, value: int) -> tuple[FindingCode, Severity]:
        nvml = self._nvml
        if value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            return "unsupported", "info"
        if value == nvml.NVML_ERROR_NO_PERMISSION:
            return "denied", "warning"
        return "failed", "warning"

    def _read_gpu(self, index: int) -> tuple[Gpu, list[str | None]] | None:
        nvml, subject = self._nvml, f"gpu{index}"
        handle = self.ask(subject, "nvmlDeviceGetHandleByIndex", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        if handle is None:
            return None
        name = self.ask(subject, "nvmlDeviceGetName", lambda: nvml.nvmlDeviceGetName(handle))
        uuid = self.ask(subject, "nvmlDeviceGetUUID", lambda: nvml.nvmlDeviceGetUUID(handle))
        memory = self.ask(subject, "nvmlDeviceGetMemoryInfo", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
        pci = self.ask(subject, "nvmlDeviceGetPciInfo", lambda: _sysfs_pci(nvml.nvmlDeviceGetPciInfo(handle).busId))
        cpus = self.ask(
            subject, "nvmlDeviceGetCpuAffinity", lambda: list(nvml.nvmlDeviceGetCpuAffinity(handle, AFFINITY_WORDS))
        )
        mig = self.ask(subject, "nvmlDeviceGetMigMode", lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]))
        links = self._links(subject, handle)
        gpu = Gpu(
            index=index,
            name=name or "unknown GPU",
            uuid=uuid,
            memory_bytes=memory,
            pci_bus_id=pci,
            cpus=format_cpulist(_bits(cpus)) if cpus and any(cpus) else None,
            nvlinks=len(links),
            mig=mig,
        )
        return gpu, links

    def _links(self, subject: str, handle: Any) -> list[str | None]:
        """Where each active NVLink ends: a PCI id, or None for a switch. A device without NVLink has none."""
        nvml = self._nvml
        ends: list[str | None] = []
        for link in range(MAX_LINKS):
            try:
                self._reading.call = "nvmlDeviceGetNvLinkState"
                if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                    continue
            except nvml.NVMLError as error:
                if error.value in (nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_SUPPORTED):
                    break  # past the last link, or a card without any: both are plain answers
                self._record(subject, "nvmlDeviceGetNvLinkState", error)
                break
            ends.append(self._link_end(subject, handle, link))
        return ends

    def _link_end(self, subject: str, handle: Any, link: int) -> str | None:
        nvml = self._nvml
        kind = self.ask(
            subject,
            "nvmlDeviceGetNvLinkRemoteDeviceType",
            lambda: nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link),
        )
        if kind == LINK_TO_SWITCH:
            return None
        pci = self.ask(
            subject,
            "nvmlDeviceGetNvLinkRemotePciInfo",
            lambda: _sysfs_pci(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId),
        )
        return pci or "unknown"


def _with_peers(gpus: list[Gpu], links: dict[int, list[str | None]]) -> list[Gpu]:
    """Resolve link ends to GPUs: all that hang on switches reach each other (one NVSwitch fabric a host)."""
    by_pci = {gpu.pci_bus_id: gpu.index for gpu in gpus if gpu.pci_bus_id is not None}
    switched = {gpu.index for gpu in gpus if None in links.get(gpu.index, [])}
    result = []
    for gpu in gpus:
        peers = {by_pci[end] for end in links.get(gpu.index, []) if end in by_pci}
        if gpu.index in switched:
            peers |= switched
        result.append(msgspec.structs.replace(gpu, nvlink_peers=tuple(sorted(peers - {gpu.index}))))
    return result


def _sysfs_pci(bus_id: Any) -> str:
    """NVML writes 00000000:1A:00.0 (and may give bytes), sysfs 0000:1a:00.0."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _bits(words: list[int]) -> list[int]:
    return [64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1]
