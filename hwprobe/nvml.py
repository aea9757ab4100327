"""GPUs through NVML (the module ``pynvml`` of nvidia-ml-py).

    start --(the driver answers)--> one thread a GPU, at once --> one thread for the ways between them, and the end

Invariant: ``read_gpus`` returns within its time limit, and soon after the last answer where a query hangs; it never
raises for what driver or device do. NVML calls cannot be interrupted, so they run in daemon threads: a GPU whose call
hangs is left out with a finding that names the call, and holds up no other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from hwprobe.gpu import Gpu
from hwprobe.hardware import Finding
from hwprobe.nvml_device import Found, read_gpu
from hwprobe.nvml_session import Session
from hwprobe.nvml_topology import Ways, connect, read_ways

QUERY_TIMEOUT_S = 1.5
"""For one query of a driver that has started: they take microseconds, some of them milliseconds."""

LOOK_S = 0.1
"""How often a thread that is waited for is looked at: what it does may have changed, and with that its time limit."""

WAKING = ("start", "nvmlInit", "nvmlDeviceGetHandleByIndex")
"""Steps that may take seconds: without persistence mode the driver starts, and wakes up GPUs, for the first asker."""


class Task:
    """Calls to the driver in a thread of its own, which nobody can interrupt but everybody may stop waiting for."""

    def __init__(self, session: Session, work: Callable[[], None]) -> None:
        self.session = session
        session.begin("start")
        self._thread = threading.Thread(target=work, name=f"hwprobe-{session.subject}", daemon=True)
        self._thread.start()

    def wait(self, query_timeout_s: float, deadline: float) -> bool:
        """Whether it has ended; False, with a finding, once one query has taken too long, or at the deadline."""
        while self._thread.is_alive():
            call, now = self.session.call, time.monotonic()
            limit = deadline if call in WAKING else min(self.session.since + query_timeout_s, deadline)
            if now >= limit:
                self._hung(call, now - self.session.since)
                return False
            self._thread.join(min(limit - now, LOOK_S))
        return True

    def _hung(self, call: str, after_s: float) -> None:
        detail = f"NVML did not return from {call} within {after_s:.1f} s; what it would have told is missing"
        remedy = "look for Xid errors in dmesg; reset the GPU or reboot"
        if call in WAKING:
            remedy = f"let nvidia-persistenced keep the GPUs awake, if they are only slow; {remedy}"
        self.session.findings.append(Finding("timed_out", "error", (self.session.subject,), detail, remedy))


class _Started(msgspec.Struct):
    """What is known once NVML has started."""

    driver: str | None = None
    count: int = 0


def read_gpus(
    timeout_s: float, query_timeout_s: float = QUERY_TIMEOUT_S
) -> tuple[str | None, tuple[Gpu, ...], list[Finding]]:
    """Driver version, the GPUs that answer in NVML's order, and what was wrong.

    ``timeout_s`` is for all of it, of which the driver may take what it wants to start and to wake up its GPUs;
    ``query_timeout_s`` is for each query from then on.
    """
    try:
        import pynvml  # noqa: PLC0415  (before the time begins: it loads no library, and hangs on no driver)
    except ImportError:
        detail, remedy = "the Python bindings of NVML are not installed", "pip install nvidia-ml-py"
        return None, (), [Finding("no_bindings", "info", ("nvml",), detail, remedy)]
    deadline = time.monotonic() + timeout_s
    started, opening = _Started(), Session("nvml")
    if (
        not Task(opening, lambda: _start(pynvml, opening, started)).wait(query_timeout_s, deadline)
        or opening.nvml is None
    ):
        return started.driver, (), list(opening.findings)
    found, findings, complete = _read_all(opening.nvml, started.count, query_timeout_s, deadline)
    ways: Ways = {}
    if complete:  # where a call hangs, one more would, and the session ends with the process
        closing = Session("nvml", opening.nvml)
        Task(closing, lambda: _finish(closing, found, ways)).wait(query_timeout_s, deadline)
        findings += closing.findings
    return started.driver, tuple(connect(found, dict(ways))), [*opening.findings, *findings]


def _start(nvml: Any, session: Session, started: _Started) -> None:
    session.begin("nvmlInit")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        session.findings.append(_start_finding(nvml, error))
        return
    session.nvml = nvml
    started.driver = session.ask("nvmlSystemGetDriverVersion")
    started.count = session.ask("nvmlDeviceGetCount") or 0


def _read_all(
    nvml: Any, count: int, query_timeout_s: float, deadline: float
) -> tuple[list[Found], list[Finding], bool]:
    """Every GPU in a thread of its own; those that answer, what was wrong, and whether every thread has ended."""
    answers: dict[int, Found | None] = {}

    def read(session: Session, index: int) -> None:
        answers[index] = read_gpu(session, index)

    sessions = [Session(f"gpu{index}", nvml) for index in range(count)]
    tasks = [Task(session, partial(read, session, index)) for index, session in enumerate(sessions)]
    ended = [task.wait(query_timeout_s, deadline) for task in tasks]
    found = [answer for index in range(count) if ended[index] and (answer := answers.get(index)) is not None]
    return found, [finding for session in sessions for finding in list(session.findings)], all(ended)


def _finish(session: Session, found: list[Found], ways: Ways) -> None:
    read_ways(session, found, ways)
    session.subject = "nvml"
    session.ask("nvmlShutdown")


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
