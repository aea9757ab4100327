"""Checks, one after the other, each within its deadline.

Invariant: ``examine`` ends within the sum of the deadlines, whatever hangs: a call into a driver or a dead file system
cannot be interrupted, so that each check has a daemon thread of its own, and one that does not end is a finding. So is
one that fails by itself, on what nobody has foreseen; the others go on. What a check cannot do here (rights, tools,
nothing to look at) is said, and is no finding.
"""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Literal

import msgspec

from hwprobe.doctor.findings import Examined, Finding, Unable

Outcome = Literal["healthy", "ill", "unable", "unanswered"]

DEADLINE_S = 20.0


class Check(msgspec.Struct, frozen=True):
    """One thing to look at. ``hangs``: what it is that does not answer, where the deadline passes."""

    name: str
    about: str  # one phrase
    look: Callable[[], Examined]
    deadline_s: float = DEADLINE_S
    hangs: str = "the kernel"


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one check."""

    name: str
    about: str
    outcome: Outcome
    seconds: float
    findings: list[Finding]
    notes: list[str]


class Report(msgspec.Struct, frozen=True):
    """All that was looked at, in order."""

    host: str
    checks: list[Checked]

    @property
    def findings(self) -> list[Finding]:
        return [finding for checked in self.checks for finding in checked.findings]


def examine(checks: Iterable[Check], told: Callable[[Checked], None] = lambda checked: None) -> Report:
    """Run the checks in their order; ``told`` hears of each as it ends."""
    done: list[Checked] = []
    for check in checks:
        done.append(_run(check))
        told(done[-1])
    return Report(socket.gethostname(), done)


def _run(check: Check) -> Checked:
    started = time.monotonic()
    result: Future[Examined] = Future()

    def look() -> None:
        try:
            result.set_result(check.look())
        except BaseException as error:  # whoever waits gets it
            result.set_exception(error)

    threading.Thread(target=look, name=f"doctor-{check.name}", daemon=True).start()
    outcome, examined = _awaited(check, result)
    return Checked(
        name=check.name,
        about=check.about,
        outcome=outcome,
        seconds=round(time.monotonic() - started, 3),
        findings=[msgspec.structs.replace(finding, check=check.name) for finding in examined.findings],
        notes=examined.notes,
    )


def _awaited(check: Check, result: Future[Examined]) -> tuple[Outcome, Examined]:
    if not wait([result], check.deadline_s).done:
        return "unanswered", _late(check)
    try:
        examined = result.result()
    except (Unable, OSError) as error:
        return "unable", Examined(notes=[str(error)])
    except Exception as error:  # told as a finding, with its place
        return "unanswered", _failed(check, error)
    return ("ill" if examined.findings else "healthy"), examined


def _failed(check: Check, error: Exception) -> Examined:
    last = traceback.extract_tb(error.__traceback__)[-1]
    examined = Examined()
    examined.error(
        check.name,
        f"looking at {check.about} failed: {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})",
        "something here is not as this check expects it, so that nothing is known of the rest of it",
        f"look at {check.about} by other means; --only {check.name} repeats it, and the line above is what a report of "
        "this fault of the doctor needs",
    )
    return examined


def _late(check: Check) -> Examined:
    examined = Examined()
    examined.error(
        check.hangs,
        f"looking at {check.about} did not end within {check.deadline_s:g} s",
        f"{check.hangs} does not answer",
        f"see what {check.hangs} waits for, and look again",
    )
    return examined
