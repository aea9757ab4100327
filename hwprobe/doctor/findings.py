"""What a check says.

Invariant: a finding is something to be done about: it has what was seen, why that is so, and what to do. Whatever is
only worth knowing (a laptop's network card is slow) is a note, and does not make a machine ill.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["error", "warning"]
"""An error breaks a run or loses what it made; a warning makes it slower, or will break it later."""


class Fix(msgspec.Struct, frozen=True):
    """A setting of the running kernel that may be changed without harm to anything that runs; gone with a reboot."""

    setting: str  # its file below /proc/sys: net/ipv4/tcp_rmem
    before: str
    after: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    check: str = ""  # its name; filled in by whoever runs the check
    severity: Severity
    subject: str  # what it is about: eth0, 10.0.0.2, gpu3, a directory
    evidence: str  # what was expected, and what was found
    cause: str
    remedy: str
    fix: Fix | None = None


class Examined(msgspec.Struct):
    """What one check found."""

    findings: list[Finding] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    def error(self, subject: str, evidence: str, cause: str, remedy: str, fix: Fix | None = None) -> None:
        found = Finding(severity="error", subject=subject, evidence=evidence, cause=cause, remedy=remedy, fix=fix)
        self.findings.append(found)

    def warning(self, subject: str, evidence: str, cause: str, remedy: str, fix: Fix | None = None) -> None:
        found = Finding(severity="warning", subject=subject, evidence=evidence, cause=cause, remedy=remedy, fix=fix)
        self.findings.append(found)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def add(self, other: Examined) -> None:
        self.findings += other.findings
        self.notes += other.notes


class Unable(Exception):
    """A check cannot be made here; the message says why, and what it would take."""
