"""Questions to NVML, each with an answer or a finding.

Invariant: ``ask`` raises nothing but ``Lost``, whatever driver or device do; and what is being asked, and since when,
can be read from another thread: a call that hangs has a name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hwprobe.hardware import Finding, FindingCode, Severity


class Lost(Exception):
    """The GPU stopped answering; the rest of its queries would fail too."""


class Session:
    """One thread's questions about one subject: nvml, gpu3, ..."""

    def __init__(self, subject: str, nvml: Any = None) -> None:
        self.subject = subject
        self.nvml = nvml
        self.findings: list[Finding] = []
        self.call = ""
        self.since = time.monotonic()

    def begin(self, call: str) -> None:
        """What is done from now on, for whoever waits."""
        self.since = time.monotonic()
        self.call = call

    def ask(
        self, query: str, *arguments: object, then: Callable[[Any], Any] | None = None, plain: tuple[int, ...] = ()
    ) -> Any:
        """The answer, as ``then`` makes it; or None and a finding. Errors in ``plain`` are None without a finding.
        Raises ``Lost``."""
        self.begin(query)
        function = getattr(self.nvml, query, None)
        if function is None:
            self._add("unsupported", "info", f"no answer to {query}: these bindings do not have it")
            return None
        try:
            answer = function(*arguments)
            return answer if then is None else then(answer)
        except self.nvml.NVMLError as error:
            if error.value not in plain:
                self._record(query, error)
        except ValueError as error:  # text that is not UTF-8, a PCI id that is not one
            self._add("failed", "warning", f"bad answer to {query}: {error}")
        return None

    def _record(self, query: str, error: Any) -> None:
        nvml = self.nvml
        lost = error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
        if lost and self.subject != "nvml":
            raise Lost(f"NVML says: {error}") from None
        self._add(*self._kind(error.value), f"no answer to {query}: {error}")

    def _kind(self, value: int) -> tuple[FindingCode, Severity]:
        nvml = self.nvml
        if value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            return "unsupported", "info"
        if value == nvml.NVML_ERROR_NO_PERMISSION:
            return "denied", "warning"
        return "failed", "warning"

    def _add(self, code: FindingCode, severity: Severity, detail: str) -> None:
        self.findings.append(Finding(code, severity, (self.subject,), detail))

    def lost(self, error: Lost) -> None:
        remedy = "look for Xid errors in dmesg; nvidia-smi --gpu-reset, or reboot"
        self.findings.append(Finding("lost", "error", (self.subject,), str(error), remedy))
