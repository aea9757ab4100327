"""GPUs that are lost or slowed down at this moment, by one session with the driver, for one thread.

Invariant: every GPU that the driver counts is looked at for ever: one that is lost stays so until it answers again.
"""

from __future__ import annotations

from typing import Any

from hwprobe.gpu import Clocks, Gpu
from hwprobe.hardware import Finding
from hwprobe.nvml_device import CLOCK_SM, reasons
from hwprobe.nvml_session import Lost, Session
from hwprobe.nvml_usage import NoGpus
from hwprobe.symptoms import slowed


class NvmlConditions:
    """See the module docstring. ``session`` says what is asked at this moment."""

    def __init__(self, session: Session) -> None:
        """Raises ``NoGpus``."""
        self._session = session
        session.begin("nvmlInit")
        try:
            import pynvml  # noqa: PLC0415
        except ImportError:
            raise NoGpus("the Python bindings of NVML are not installed") from None
        session.begin("nvmlInit")
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoGpus(f"NVML does not start: {error}") from None
        session.nvml = pynvml
        self._handles: dict[int, Any] = dict.fromkeys(range(session.ask("nvmlDeviceGetCount") or 0))
        if not self._handles:
            self.close()
            raise NoGpus("the driver counts no GPU")

    def look(self) -> list[Finding]:
        found: list[Finding] = []
        for index in self._handles:
            self._session.subject = f"gpu{index}"
            self._session.findings.clear()
            try:
                found += self._look_at(index)
            except Lost as lost:
                self._session.lost(lost)
                found.append(self._session.findings[-1])
        self._session.begin("")
        return found

    def _look_at(self, index: int) -> list[Finding]:
        """Raises ``Lost``."""
        ask = self._session.ask
        handle = self._handles[index]
        if handle is None:
            handle = self._handles[index] = ask("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            return []
        held = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle, then=reasons)
        now = ask("nvmlDeviceGetClockInfo", handle, CLOCK_SM)
        clocks = Clocks(sm_hz=None if now is None else now * 1e6)
        return list(slowed(Gpu(index=index, name="", throttled_by=held, clocks=clocks)))

    def close(self) -> None:
        self._session.subject = "nvml"
        self._session.ask("nvmlShutdown")
        self._session.begin("")
