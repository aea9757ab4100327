"""What the doctor may change by itself: limits of the running kernel, upwards, one file each.

Invariant: a setting is written only while it still says what was seen, and what was written is read back; nothing is
made permanent.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from hwprobe.doctor.findings import Finding, Fix
from hwprobe.sysfs import read_text

SETTINGS = Path("/proc/sys")


class Fixed(msgspec.Struct, frozen=True):
    """What became of one."""

    setting: str
    before: str
    after: str
    done: bool
    why_not: str = ""  # empty for one that was only shown


def read_setting(name: str, root: Path = SETTINGS) -> str | None:
    """Its numbers, with single spaces; None where there is no such setting here."""
    text = read_text(root / name)
    return None if text is None else " ".join(text.split())


def fixes_of(findings: Iterable[Finding]) -> list[Fix]:
    """Each once."""
    return list(dict.fromkeys(finding.fix for finding in findings if finding.fix is not None))


def shown(fix: Fix) -> Fixed:
    return Fixed(fix.setting, fix.before, fix.after, done=False)


def apply(fix: Fix, root: Path = SETTINGS) -> Fixed:
    """Raises nothing for what the kernel refuses."""
    now = read_setting(fix.setting, root)
    if now != fix.before:
        return _left(fix, f"it says {now} by now, not {fix.before}")
    try:
        (root / fix.setting).write_text(fix.after + "\n")
    except OSError as error:
        return _left(fix, f"{error.strerror}: run it as root on the host itself, not in a container")
    after = read_setting(fix.setting, root)
    return _left(fix, f"it says {after} afterwards") if after != fix.after else Fixed(*_three(fix), done=True)


def command(fix: Fix) -> str:
    """What a person would type."""
    return f"sysctl -w {fix.setting.replace('/', '.')}='{fix.after}'"


def _left(fix: Fix, why: str) -> Fixed:
    return Fixed(*_three(fix), done=False, why_not=why)


def _three(fix: Fix) -> tuple[str, str, str]:
    return fix.setting, fix.before, fix.after
