"""What changes about a host's hardware while it is in use: GPUs that are lost or slowed down, memory that runs short.

    whoever has the map --(every few seconds)--> Watch.look() --> Changes: begun, ended --> AffinityMap.under(present)

Invariant: ``look`` never waits for a driver, whose calls are made by one daemon thread; a condition is told once as it
begins and once as it ends, however its figures move meanwhile. Where there is no GPU that thread has ended.
"""

from __future__ import annotations

import logging
import threading
import time

import msgspec

from hwprobe.hardware import Finding
from hwprobe.nvml_conditions import NvmlConditions
from hwprobe.nvml_session import Session
from hwprobe.nvml_usage import NoGpus
from hwprobe.pressure import MemoryPressure

log = logging.getLogger(__name__)

PERIOD_S = 5.0
HUNG_S = 15.0
"""A call of the driver that takes longer than this."""

STOP_TIMEOUT_S = 1.0

_Key = tuple[str, tuple[str, ...]]


class Changes(msgspec.Struct, frozen=True):
    """Since the last look."""

    begun: tuple[Finding, ...]
    ended: tuple[Finding, ...]
    present: tuple[Finding, ...]  # all that hold now
    gpus_seen: bool = True  # False: the driver has not answered yet, or there is none

    def __bool__(self) -> bool:
        return bool(self.begun or self.ended)


class Watch:
    """See the module docstring."""

    def __init__(
        self, memory: MemoryPressure | None = None, period_s: float = PERIOD_S, hung_s: float = HUNG_S
    ) -> None:
        self._memory = memory if memory is not None else MemoryPressure()
        self._period_s = period_s
        self._hung_s = hung_s
        self._session = Session("nvml")
        self._lock = threading.Lock()
        self._gpus: list[Finding] | None = None  # before they were looked at for the first time
        self._known: dict[_Key, Finding] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hwprobe-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            source = NvmlConditions(self._session)
        except NoGpus as reason:
            log.info("GPUs are not watched: %s", reason)
            return
        while not self._ending.is_set():
            found = source.look()
            with self._lock:
                self._gpus = found
            self._ending.wait(self._period_s)
        source.close()

    def look(self) -> Changes:
        """What holds now, beside what held at the last look."""
        with self._lock:
            gpus = self._gpus
        found = [*(gpus or ()), *self._hung(), *self._memory.look()]
        now: dict[_Key, Finding] = {(finding.code, finding.subjects): finding for finding in found}
        begun = tuple(finding for key, finding in now.items() if key not in self._known)
        ended = tuple(finding for key, finding in self._known.items() if key not in now)
        self._known = now
        return Changes(begun, ended, tuple(found), gpus is not None)

    def _hung(self) -> list[Finding]:
        call, since = self._session.call, self._session.since
        if not call or not self._thread.is_alive() or time.monotonic() - since < self._hung_s:
            return []
        detail = f"NVML does not return from {call}"
        return [Finding("timed_out", "error", (self._session.subject,), detail, "look for Xid errors in dmesg")]

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the thread; a call that hangs is left to end with the process. Idempotent."""
        self._ending.set()
        self._thread.join(timeout_s)
