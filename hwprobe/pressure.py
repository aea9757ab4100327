"""Whether memory runs short, for the host or for this process's control group.

Invariant: told from two marks, an upper one at which it begins and a lower one at which it ends, so that it does not
flicker; where neither pressure nor limit can be read, it is never short.

Sources: Documentation/accounting/psi.rst; for v1 and v2 limits see ``hwprobe.cgroup``. What a group uses is counted
without the page cache that the kernel would give up first (``inactive_file``), as Kubernetes counts it.
"""

from __future__ import annotations

import re
from pathlib import Path

from hwprobe.cgroup import own_directories
from hwprobe.hardware import Finding
from hwprobe.sysfs import read_int, read_text

STALLED_FROM, STALLED_UNTIL = 10.0, 5.0
"""Per cent of the last ten seconds in which somebody waited for memory."""

FULL_FROM, FULL_UNTIL = 0.95, 0.90
"""Share of the control group's limit that is in use."""


class MemoryPressure:
    """One host's memory, looked at again and again."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._groups = own_directories(cgroup, proc, "memory")
        self._stalled = self._full = False

    def look(self) -> list[Finding]:
        stalled, full = self._share_stalled(), self._share_used()
        self._stalled = stalled is not None and stalled >= (STALLED_UNTIL if self._stalled else STALLED_FROM)
        self._full = full is not None and full >= (FULL_UNTIL if self._full else FULL_FROM)
        found = []
        if self._stalled:
            detail = f"processes waited for memory in {stalled:.0f}% of the last ten seconds"
            found.append(Finding("memory_pressure", "warning", ("memory",), detail, "fewer places, or more memory"))
        if self._full:
            detail = f"the control group uses {100 * (full or 0):.0f}% of its memory limit"
            found.append(Finding("memory_full", "warning", ("memory",), detail, "raise the limit, or fewer places"))
        return found

    def _share_stalled(self) -> float | None:
        """Of the group where it has such a figure (v2), else of the host."""
        texts = [read_text(group / "memory.pressure") for group in self._groups]
        text = next((text for text in texts if text is not None), None) or read_text(self._proc / "pressure" / "memory")
        match = re.search(r"^some avg10=([\d.]+)", text or "", re.MULTILINE)
        return float(match[1]) if match else None

    def _share_used(self) -> float | None:
        """Of the tightest group on the way to the root."""
        shares = [share for group in self._groups if (share := _used(group)) is not None]
        return max(shares, default=None)


def _used(group: Path) -> float | None:
    v2 = (group / "memory.max").exists()
    limit = read_int(group / ("memory.max" if v2 else "memory.limit_in_bytes"))
    used = read_int(group / ("memory.current" if v2 else "memory.usage_in_bytes"))
    if limit is None or used is None or not 0 < limit < 1 << 60:
        return None
    match = re.search(r"^(?:total_)?inactive_file (\d+)", read_text(group / "memory.stat") or "", re.MULTILINE)
    return max(0, used - (int(match[1]) if match else 0)) / limit
