from __future__ import annotations

import threading

from hwprobe.doctor import Check, Examined, Unable, describe, examine
from hwprobe.doctor.report import summary


def ill() -> Examined:
    examined = Examined()
    examined.warning("eth0", "slow", "a cable", "change it")
    examined.error("eth1", "no link", "no cable", "plug one in")
    return examined


def unable() -> Examined:
    raise Unable("no GPU here")


def refused() -> Examined:
    raise PermissionError(13, "Permission denied", "/dev/kmsg")


def test_checks_run_in_their_order_and_findings_carry_their_check() -> None:
    heard: list[str] = []
    checks = [Check("links", "links", ill), Check("gpus", "GPUs", unable), Check("rest", "the rest", Examined)]
    report = examine(checks, lambda checked: heard.append(checked.name))
    assert heard == ["links", "gpus", "rest"]
    assert [checked.outcome for checked in report.checks] == ["ill", "unable", "healthy"]
    assert [(finding.check, finding.subject) for finding in report.findings] == [("links", "eth0"), ("links", "eth1")]


def test_a_check_that_hangs_is_a_finding_and_the_next_one_runs() -> None:
    hang = threading.Event()

    def hangs() -> Examined:
        hang.wait()
        return Examined()

    try:
        report = examine([Check("disk", "disks", hangs, 0.2, "a file server"), Check("rest", "the rest", Examined)])
    finally:
        hang.set()
    assert [checked.outcome for checked in report.checks] == ["unanswered", "healthy"]
    (finding,) = report.findings
    assert (finding.severity, finding.subject) == ("error", "a file server")
    assert finding.evidence == "looking at disks did not end within 0.2 s"


def test_a_check_that_fails_by_itself_is_a_finding_and_the_next_one_runs() -> None:
    def fails() -> Examined:
        return Examined(notes=[str(int("a broken entry"))])

    report = examine([Check("ports", "ports", fails), Check("rest", "the rest", Examined)])
    assert [checked.outcome for checked in report.checks] == ["unanswered", "healthy"]
    (finding,) = report.findings
    assert (finding.check, finding.severity) == ("ports", "error")
    assert "looking at ports failed: ValueError: invalid literal" in finding.evidence
    assert "(test_runner.py:" in finding.evidence
    assert "--only ports" in finding.remedy


def test_what_this_process_may_not_see_is_said_and_is_no_finding() -> None:
    report = examine([Check("log", "the log", refused)])
    assert report.findings == []
    assert report.checks[0].outcome == "unable"
    assert "/dev/kmsg" in report.checks[0].notes[0]


def test_the_report_begins_with_what_is_to_be_done_and_tells_the_worst_first() -> None:
    report = examine([Check("links", "links", ill), Check("gpus", "GPUs", unable)])
    text = describe(report)
    assert text.splitlines()[0] == f"{report.host}: 1 error and 1 warning in 1 check"
    assert text.index("error: links: eth1") < text.index("warning: links: eth0")
    for words in ("no link", "no cable", "plug one in", "no GPU here"):
        assert words in text
    assert "\x1b" not in text
    assert "\x1b[1;31merror\x1b[0m" in describe(report, colour=True)


def test_a_healthy_host_is_one_line() -> None:
    assert summary(examine([Check("rest", "the rest", Examined)])).endswith(": nothing to be done (1 check)")
