"""A report for a terminal.

Invariant: whoever reads only the first line knows whether anything is to be done; every finding is printed whole, the
worst first.
"""

from __future__ import annotations

import textwrap

from hwprobe.doctor.findings import Finding
from hwprobe.doctor.runner import Checked, Outcome, Report

WIDTH = 100
_LABEL = 9
_WORDS: dict[Outcome, tuple[str, str]] = {  # what is said, and its colour
    "healthy": ("ok", "32"),
    "ill": ("found", "31"),
    "unable": ("-", "2"),
    "unanswered": ("silent", "31"),
}


def describe(report: Report, *, colour: bool = False, width: int = WIDTH, checks: bool = True) -> str:
    """Everything; without ``checks`` only what was found (they were told as they ended)."""
    lines = [line for checked in report.checks for line in told(checked, colour=colour, width=width)] if checks else []
    return "\n".join([summary(report), *(["", *lines] if lines else []), *_found(report, colour, width)])


def summary(report: Report) -> str:
    """One line."""
    looked = [checked for checked in report.checks if checked.outcome != "unable"]
    errors = sum(finding.severity == "error" for finding in report.findings)
    warnings = len(report.findings) - errors
    if not report.findings:
        return f"{report.host}: nothing to be done ({_number(len(looked), 'check')})"
    parts = [_number(count, word) for count, word in ((errors, "error"), (warnings, "warning")) if count]
    return f"{report.host}: {' and '.join(parts)} in {_number(len(looked), 'check')}"


def told(checked: Checked, *, colour: bool = False, width: int = WIDTH) -> list[str]:
    """One check: its outcome, and its notes below each other."""
    word, code = _WORDS[checked.outcome]
    head = f"  {_painted(word.ljust(7), code, colour)} {checked.name.ljust(12)} "
    indent = " " * (2 + 7 + 1 + 12 + 1)
    notes = checked.notes or [checked.about]
    lines = [line for note in notes for line in textwrap.wrap(note, max(40, width - len(indent)))]
    return [head + lines[0], *(indent + line for line in lines[1:])]


def _found(report: Report, colour: bool, width: int) -> list[str]:
    worst_first = sorted(report.findings, key=lambda finding: finding.severity != "error")
    return [line for finding in worst_first for line in _finding(finding, colour, width)]


def _finding(finding: Finding, colour: bool, width: int) -> list[str]:
    code = "1;31" if finding.severity == "error" else "1;33"
    lines = ["", f"{_painted(finding.severity, code, colour)}: {finding.check}: {finding.subject}"]
    for label, text in (("found", finding.evidence), ("cause", finding.cause), ("remedy", finding.remedy)):
        indent = " " * (2 + _LABEL)
        wrapped = textwrap.wrap(text, max(40, width - len(indent)), break_on_hyphens=False, break_long_words=False)
        lines += [f"  {label.ljust(_LABEL)}{wrapped[0]}", *(indent + line for line in wrapped[1:])]
    return lines


def _painted(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
